"""`mlxspec pull`: fetch a model from Hugging Face into the cache that its own tools use. Knows options and output."""

from __future__ import annotations

import argparse
import json

from mlxspec.cli import terminal
from mlxspec.cli.progress_bar import shown_progress
from mlxspec.config import check_number


def run(args: argparse.Namespace) -> int:
    """Tell what it takes, fetch it, tell where it is."""
    from mlxspec.checkpoints.pull import check_fits, memory_of
    from mlxspec.loading.download import fetch, plan
    from mlxspec.loading.progress import amount

    if args.context is not None:
        check_number("--context", args.context, 1, 1 << 24, integer=True)
    wanted = plan(args.repo, args.revision)
    memory = memory_of(wanted, args.context)
    there = wanted.size - wanted.missing
    parts = [f"{wanted.repo} at {wanted.commit[:12]}: {amount(wanted.size)} in {len(wanted.files)} files"]
    if there * 100 >= wanted.size:  # more than the few files that were looked at just now
        parts.append(f"{amount(there)} of it here already")
    if memory is not None:
        parts.append(
            f"runs in about {amount(memory.total)} of memory with {memory.context} tokens of context"
        )
    terminal.note(", ".join(parts) + ".")
    if not args.force:
        check_fits(wanted)
    with shown_progress():
        folder = fetch(wanted)
    if args.json:
        found = {"repo": wanted.repo, "revision": wanted.commit, "folder": str(folder), "bytes": wanted.size}
        terminal.say(json.dumps(found | {"fetched": wanted.missing}) + "\n")
    else:
        terminal.say(f"{wanted.repo} {wanted.commit}\n{folder}\n")
    return 0
