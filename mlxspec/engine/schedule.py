"""Who is next: requests that wait, and whose turn it is to have a piece of its prompt read. Knows no arrays and no model.

Two promises. A request that waits gets a row in the order in which requests came. Of the prompts being read, every second piece is
the oldest one's, so none is starved; the other pieces go to whoever has had the fewest, so a short prompt that comes while a long one is
read has its first piece after at most one of the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mlxspec.engine.request import Request
from mlxspec.errors import EngineStoppedError, QueueFullError


class Queue:
    """Requests without a row, oldest first. max_waiting bounds what is submitted; it does not bound `put(..., bounded=False)`."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._requests: deque[Request] = deque()
        self.is_draining = False

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(tuple(self._requests))

    def check(self) -> None:
        """Raises QueueFullError or EngineStoppedError where a request would not be taken."""
        self.check_open()
        if len(self._requests) >= self._max_waiting:
            raise QueueFullError(len(self._requests))

    def check_open(self) -> None:
        """Raises EngineStoppedError where no request is taken any more."""
        if self.is_draining:
            raise EngineStoppedError("The engine is shutting down and takes no new requests.")

    def put(self, request: Request, *, bounded: bool = True) -> None:
        """bounded False: for a caller who has all its requests at hand anyway. Raises as `check` does."""
        self.check_open()
        if bounded:
            self.check()
        self._requests.append(request)

    @property
    def first(self) -> Request | None:
        return self._requests[0] if self._requests else None

    def remove(self, request: Request) -> None:
        self._requests.remove(request)


class Turns:
    """Whose piece is read next. See the module's promises."""

    def __init__(self) -> None:
        self._is_oldest = True

    def next(self, served: Sequence[int]) -> int:
        """Index into prompts, oldest first, of which each has had `served` pieces. The same until `took`."""
        return 0 if self._is_oldest else served.index(min(served))

    def took(self) -> None:
        """The piece was read."""
        self._is_oldest = not self._is_oldest
