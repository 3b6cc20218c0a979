"""`mlxspec pull`: fetch a model from Hugging Face into the cache that its own tools use. Knows options and output."""

from __future__ import annotations

import argparse
import json

from mlxspec.cli import terminal
from mlxspec.cli.progress_bar import shown_progress
from mlxspec.config import check_number


def run(args: argparse.Namespace) -> int:
    """Tell what it takes, fetch it, tell where it is."""
    from mlxspec.checkpoints.pull import offer, pull
    from mlxspec.loading.progress import amount

    if args.context is not None:
        check_number("--context", args.context, 1, 1 << 24, integer=True)
    offered = offer(args.repo, args.revision, context=args.context)
    plan, memory = offered.plan, offered.memory
    there = plan.size - plan.missing
    parts = [f"{plan.repo} at {plan.commit[:12]}: {amount(plan.size)} in {len(plan.files)} files"]
    if there * 100 >= plan.size:  # more than the few files that were looked at just now
        parts.append(f"{amount(there)} of it here already")
    if memory is not None:
        parts.append(
            f"runs in about {amount(memory.total)} of memory with {memory.context} tokens of context"
        )
    terminal.note(", ".join(parts) + ".")
    with shown_progress():
        folder = pull(offered, force=args.force)
    if args.json:
        found = {"repo": plan.repo, "revision": plan.commit, "folder": str(folder), "bytes": plan.size}
        terminal.say(json.dumps(found | {"fetched": plan.missing}) + "\n")
    else:
        terminal.say(f"{plan.repo} {plan.commit}\n{folder}\n")
    return 0
