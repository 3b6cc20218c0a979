"""`mlxspec pull`: fetches a model from Hugging Face into the cache that Hugging Face's tools use, with the MTP head that a conversion
lacks, or a drafter that was published for the model. Knows options and output."""

from __future__ import annotations

import argparse
import json

from mlxspec.cli import terminal
from mlxspec.cli.progress_bar import shown_progress
from mlxspec.option import check_number


def run(args: argparse.Namespace) -> int:
    """Fetch a model with what drafts for it, and print what it takes and where it is. Returns 0."""
    from mlxspec.checkpoints import head
    from mlxspec.checkpoints.fetching import Beside, beside, fetch
    from mlxspec.checkpoints.pull import check_chat, check_files, check_fits, memory_of
    from mlxspec.loading import repositories
    from mlxspec.loading.download import plan
    from mlxspec.loading.progress import amount

    if args.context is not None:
        check_number("--context", args.context, 1, 1 << 24, integer=True)
    head.check_bits(args.mtp_bits)
    for repo in (args.mtp_from, args.drafter):
        if repo not in (None, "auto", "none"):
            repositories.check_repo(repo)
    wanted = plan(args.repo, args.revision)
    memory = memory_of(wanted, args.context)
    there = wanted.size - wanted.missing
    parts = [f"{wanted.repo} at {wanted.commit[:12]}: {amount(wanted.size)} in {len(wanted.files)} files"]
    if there * 100 >= wanted.size:  # more than the few files that were looked at just now
        parts.append(f"{amount(there)} of it here already")
    terminal.note(f"{', '.join(parts)}.")
    with shown_progress():
        if args.force:
            check_files(wanted)
        else:
            check_fits(wanted)
            check_chat(wanted)
    found = Beside(None, None, ())
    if memory is not None:
        found = beside(wanted, memory, drafter=args.drafter, with_head=args.with_mtp, original=args.mtp_from)
    for notice in found.notices:
        terminal.note(notice)
    offer, drafter = found.head, found.drafter
    if offer is not None:
        terminal.note(f"Its MTP head is fetched from {offer.original}: {amount(offer.num_bytes)}.")
    if drafter is not None:
        note = f" ({drafter.note})" if drafter.note else ""
        terminal.note(
            f"Its drafter is {drafter.repo}, {drafter.title}{note}: {amount(drafter.num_bytes)} more."
        )
    if memory is not None:
        both = found.memory(memory)
        terminal.note(
            f"It runs in about {amount(both.total)} of memory with {both.context} tokens of context."
        )
    with shown_progress():
        folder, kept = fetch(wanted, found, args.mtp_bits)
    if args.json:
        told = {"repo": wanted.repo, "revision": wanted.commit, "folder": str(folder), "bytes": wanted.size}
        got = None if offer is None else {"from": offer.original, "fetched": offer.num_bytes, "bytes": kept}
        other = None if drafter is None else {"repo": drafter.repo, "bytes": drafter.num_bytes}
        terminal.say(json.dumps(told | {"fetched": wanted.missing, "mtp": got, "drafter": other}) + "\n")
        return 0
    terminal.say(f"{wanted.repo} {wanted.commit}\n{folder}\n")
    if offer is not None:
        terminal.note(
            f"Its MTP head, from {offer.original}, takes {amount(kept)} and drafts whenever the model is loaded."
        )
    if drafter is not None:
        terminal.note(f"{drafter.repo} drafts whenever {wanted.repo} is loaded with --draft auto.")
    return 0
