"""Fetches a model and what drafts for it, in a process of its own that tells how far it is: a line of JSON on stdout each.

    python -m mlxspec.checkpoints.fetching NAME

The lines are {"status": what is done, "completed": bytes, "total": bytes}, {"notice": sentence}, and {"error": sentence} at the end of a
download that failed. The process that started it may end it at any time: files that are whole are kept, as after `mlxspec pull`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from mlxspec.checkpoints import head, pairing
from mlxspec.checkpoints.pull import check_fits
from mlxspec.errors import MlxspecError
from mlxspec.loading import progress
from mlxspec.loading.download import fetch, plan

_PAUSE = 0.2  # seconds between two lines on the same work


def main(name: str) -> int:
    """Returns the exit status."""
    try:
        with progress.watched_by(_watcher):
            _fetch(name)
    except MlxspecError as error:
        _say(error=str(error))
        return 1
    return 0


def _fetch(name: str) -> None:
    """The model with its MTP head; with the best drafter that was published for it where it can have no head. Raises MlxspecError."""
    wanted = plan(name)
    check_fits(wanted)
    fetch(wanted)
    if head.may_have_head(wanted):
        if not head.has_head(wanted):
            with _optional():
                head.add(head.find(wanted))
        return
    with _optional():
        offer, refused = pairing.find(wanted)
        for sentence in refused:
            _say(notice=sentence)
        if offer is not None:
            pairing.add(offer)


@contextlib.contextmanager
def _optional() -> Iterator[None]:
    """The model runs without what is fetched here."""
    try:
        yield
    except MlxspecError as error:
        _say(notice=str(error))


@contextlib.contextmanager
def _watcher(what: str, total: int) -> Iterator[progress.Step]:
    done, said = 0, 0.0

    def step(num_bytes: int) -> None:
        nonlocal done, said
        done += num_bytes
        if time.monotonic() - said >= _PAUSE or done >= total:
            said = time.monotonic()
            _say(status=what, completed=done, total=total)

    step(0)
    yield step


def _say(**told: Any) -> None:
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
