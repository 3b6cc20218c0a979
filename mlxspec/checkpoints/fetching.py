"""Fetches a model and what drafts for it: its MTP head, or a drafter that was published for it.

    python -m mlxspec.checkpoints.fetching NAME

does so in a process of its own, which tells how far it is: a line of JSON on stdout each, {"status": what is done, "completed": bytes,
"total": bytes}, {"notice": sentence}, or {"error": sentence} at the end of a download that failed. The process that started it may end it
at any time: files that are whole are kept, as after `mlxspec pull`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mlxspec.checkpoints import head, pairing
from mlxspec.checkpoints.head import HeadOffer
from mlxspec.checkpoints.memory import MemoryEstimate
from mlxspec.checkpoints.pairing import DrafterOffer
from mlxspec.checkpoints.pull import check_chat, check_fits, memory_of
from mlxspec.errors import MlxspecError
from mlxspec.loading import download, progress
from mlxspec.loading.download import Plan

_PAUSE = 0.2  # seconds between two lines on the same work


class Beside(NamedTuple):
    """The drafters that are fetched with a model: an MTP head, a published drafter, both or none. notices: sentences on what is not
    fetched."""

    head: HeadOffer | None
    drafter: DrafterOffer | None
    notices: tuple[str, ...]

    def memory(self, model: MemoryEstimate) -> MemoryEstimate:
        """Return the memory of the model together with these drafters. model: the memory of the model alone."""
        held = [offer.memory for offer in (self.head, self.drafter) if offer is not None]
        return replace(
            model,
            drafter_weights=sum(both.drafter_weights for both in held),
            drafter_state=sum(both.drafter_state for both in held),
        )


def beside(
    wanted: Plan,
    memory: MemoryEstimate,
    *,
    drafter: str | None = None,
    with_head: bool = False,
    original: str | None = None,
) -> Beside:
    """Choose the drafters to fetch with the model of the plan `wanted`, and return them. Fetches configs and headers, and no tensor.
    memory: of the model alone.

    drafter: None for the MTP head, or, where the model has none, the best published drafter that fits; "auto" for the head and that
    drafter; "none" for neither; else a repository. with_head: find the head even with "none". original: the repository of the head, None
    to follow the model's card. Raises MlxspecError where a head or a repository that was requested by name cannot be used.
    """
    notices: list[str] = []
    is_asked = with_head or original is not None
    has_head, offer = False, None
    try:
        if is_asked or (drafter != "none" and head.may_have_head(wanted)):
            has_head = head.may_have_head(wanted) and head.has_head(wanted)
            offer = None if has_head else head.find(wanted, memory, original)
    except MlxspecError as error:
        if is_asked:
            raise
        notices.append(f"The MTP head that drafts for {wanted.repo} was not found: {error}")
    if is_asked and has_head:
        notices.append(f"{wanted.repo} has its MTP head already.")
    found = None
    if drafter not in (None, "auto", "none"):
        found, _ = pairing.find(wanted, memory, drafter)
    elif drafter == "auto" or (drafter is None and not has_head and offer is None):
        found, refused = pairing.find(wanted, memory)
        notices += [f"Not taken: {sentence}" for sentence in refused]
        if found is None and drafter == "auto":
            notices.append(
                f"No drafter that fits was published for {wanted.repo} (`mlxspec models --drafters`)."
            )
    return Beside(offer, found, tuple(notices))


def fetch(wanted: Plan, found: Beside, bits: int | None = None) -> tuple[Path, int]:
    """Fetch a model and its chosen drafters. bits: 4, 8 or 16, the bits of the MTP head, None for 4. Returns the model's folder and the
    bytes of its fetched head. Raises MlxspecError where a download fails; files that are complete are kept."""
    more = [offer.num_bytes for offer in (found.head, found.drafter) if offer is not None]
    download.check_disk(wanted, sum(more))
    folder = download.fetch(wanted)
    kept = 0 if found.head is None else head.add(found.head, bits)
    if found.drafter is not None:
        pairing.add(found.drafter)
    return folder, kept


def main(name: str) -> int:
    """Fetch a model with what drafts for it, and print the progress as lines of JSON. name: the repository. Returns the exit status, 1
    where the download failed."""
    try:
        with progress.watched_by(_watcher):
            wanted = download.plan(name)
            check_fits(wanted)
            check_chat(wanted)
            memory = memory_of(wanted)
            found = Beside(None, None, ()) if memory is None else beside(wanted, memory)
            for notice in found.notices:
                _say(notice=notice)
            fetch(wanted, found)
    except MlxspecError as error:
        _say(error=str(error))
        return 1
    return 0


@contextlib.contextmanager
def _watcher(what: str, total: int) -> Iterator[progress.Step]:
    done, said = 0, 0.0

    def step(num_bytes: int) -> None:
        nonlocal done, said
        done += num_bytes
        if time.monotonic() - said >= _PAUSE or done >= total:
            said = time.monotonic()
            _say(status=what, completed=done, total=total)

    yield step


def _say(**told: Any) -> None:
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
