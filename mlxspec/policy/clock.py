"""The clock that measuring at load decides by: what still fits into the seconds, and what a round took. Among ranks it is rank 0's, read by
all of them, so that all measure the same rounds and come to the same costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_shared: Callable[[], float] | None = None


def now() -> float:
    """Seconds."""
    return time.perf_counter() if _shared is None else _shared()


@contextmanager
def of(read: Callable[[], float]) -> Iterator[None]:
    """Within it, `now` is what `read` gives. One thread of a process measures at a time."""
    global _shared
    before, _shared = _shared, read
    try:
        yield
    finally:
        _shared = before
