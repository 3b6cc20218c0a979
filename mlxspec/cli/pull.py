"""`mlxspec pull`: fetch a model from Hugging Face into the cache that its own tools use, the MTP head that its conversion lacks, and a
drafter that was published for it. Knows options, the questions and output."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from mlxspec.cli import terminal
from mlxspec.cli.progress_bar import shown_progress
from mlxspec.errors import MlxspecError
from mlxspec.option import check_number

if TYPE_CHECKING:
    from mlxspec.checkpoints.head import HeadOffer
    from mlxspec.checkpoints.pairing import DrafterOffer
    from mlxspec.loading.download import Plan

_LACKING = "This conversion lacks the MTP head that drafts for the model"


def run(args: argparse.Namespace) -> int:
    """Tell what it takes, fetch it, tell where it is."""
    from mlxspec.checkpoints import head, pairing
    from mlxspec.checkpoints.pull import check_fits, memory_of
    from mlxspec.loading import repositories
    from mlxspec.loading.download import fetch, plan
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
    if memory is not None:
        parts.append(
            f"runs in about {amount(memory.total)} of memory with {memory.context} tokens of context"
        )
    terminal.note(", ".join(parts) + ".")
    if not args.force:
        check_fits(wanted)
    is_asked = args.with_mtp or args.mtp_from is not None
    may_ask = not args.json and terminal.is_terminal(sys.stdin) and terminal.is_terminal(sys.stderr)
    offer = _offer(args, wanted, is_asked) if is_asked or may_ask else None
    drafter = _drafter(args.drafter, wanted, may_ask) if memory is not None else None
    with shown_progress():
        folder = fetch(wanted)
        kept = 0 if offer is None else head.add(offer, args.mtp_bits)
        if drafter is not None:
            pairing.add(drafter)
    if args.json:
        found = {"repo": wanted.repo, "revision": wanted.commit, "folder": str(folder), "bytes": wanted.size}
        got = None if offer is None else {"from": offer.original, "fetched": offer.num_bytes, "bytes": kept}
        beside = None if drafter is None else {"repo": drafter.repo, "bytes": drafter.num_bytes}
        terminal.say(json.dumps(found | {"fetched": wanted.missing, "mtp": got, "drafter": beside}) + "\n")
    else:
        terminal.say(f"{wanted.repo} {wanted.commit}\n{folder}\n")
        if offer is not None:
            terminal.note(
                f"Its MTP head, from {offer.original}, takes {amount(kept)} and drafts whenever the model is loaded."
            )
        elif not may_ask and not is_asked:
            _tell(wanted)
        if drafter is not None:
            terminal.note(f"{drafter.repo} drafts whenever {wanted.repo} is loaded with --draft auto.")
        elif args.drafter is None and not may_ask and memory is not None:
            _tell_drafter(wanted)
    return 0


def _offer(args: argparse.Namespace, wanted: Plan, is_asked: bool) -> HeadOffer | None:
    """The MTP head that is to be fetched too, None for none. Raises MlxspecError where one was asked for and cannot be had."""
    from mlxspec.checkpoints import head
    from mlxspec.loading.progress import amount

    try:
        if not is_asked and not head.may_have_head(wanted):
            return None
        if head.may_have_head(wanted) and head.has_head(wanted):
            if is_asked:
                terminal.note(f"{wanted.repo} has its MTP head already.")
            return None
        offer = head.find(wanted, args.mtp_from)
    except MlxspecError as error:
        if is_asked:
            raise
        terminal.note(_not_found(error))
        return None
    if is_asked:
        terminal.note(f"Its MTP head is fetched from {offer.original}: {amount(offer.num_bytes)}.")
        return offer
    terminal.note(f"{_LACKING}; {offer.original} holds it.")
    if _yes(f"Fetch the head too, {amount(offer.num_bytes)}?"):
        return offer
    terminal.note(f"The head is left out; `mlxspec pull {wanted.repo} --with-mtp` fetches it later.")
    return None


def _yes(question: str) -> bool:
    """The answer of a terminal; no where nobody answers any more."""
    print(f"{question} [Y/n] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer:
        print(file=sys.stderr)  # the question's line is still open
    return answer != "" and answer.strip().lower() in ("", "y", "yes")


def _drafter(asked: str | None, wanted: Plan, may_ask: bool) -> DrafterOffer | None:
    """The drafter that is to be fetched too, None for none. Raises MlxspecError where one was asked for and cannot be had."""
    from mlxspec.checkpoints import pairing
    from mlxspec.loading.progress import amount

    if asked == "none" or (asked is None and not may_ask):
        return None
    named = None if asked in (None, "auto") else asked
    offer, refused = pairing.find(wanted, named)
    for sentence in refused:
        terminal.note(f"Not taken: {sentence}")
    if offer is None:
        if asked == "auto":
            terminal.note(
                f"No drafter that fits was published for {wanted.repo}, as far as `mlxspec models --drafters` knows."
            )
        return None
    note = f" ({offer.note})" if offer.note else ""
    if asked is not None:
        terminal.note(f"Its drafter is {offer.repo}, {offer.title}{note}: {amount(offer.num_bytes)} more.")
        return offer
    terminal.note(f"{offer.repo}, {offer.title}, was published for it{note}.")
    if _yes(f"Fetch the drafter too, {amount(offer.num_bytes)}?"):
        return offer
    terminal.note(f"The drafter is left out; `mlxspec pull {wanted.repo} --drafter auto` fetches it later.")
    return None


def _tell_drafter(wanted: Plan) -> None:
    """A remark on the drafters of a model that has been fetched without being asked about them."""
    from mlxspec.checkpoints import pairing

    found = pairing.published_for(wanted)
    if found:
        terminal.note(
            f"{found[0].repo}, a drafter, was published for it: `mlxspec pull {wanted.repo} --drafter auto` fetches the best one that fits."
        )


def _tell(wanted: Plan) -> None:
    """A remark on the head of a model that has been fetched without being asked about it."""
    from mlxspec.checkpoints import head
    from mlxspec.loading.progress import amount

    try:
        if not head.may_have_head(wanted) or head.has_head(wanted):
            return
        offer = head.find(wanted)
    except MlxspecError as error:
        return terminal.note(_not_found(error))
    terminal.note(
        f"{_LACKING}; {offer.original} holds it: `mlxspec pull {wanted.repo} --with-mtp` fetches it ({amount(offer.num_bytes)})."
    )


def _not_found(error: MlxspecError) -> str:
    return f"{_LACKING}, and it was not found: {error}"
