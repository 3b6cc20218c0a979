"""The scheduler: the queue of waiting requests, whose row makes room, and whose prompt is read next. Knows no arrays and
no model.

Rows are shared out by client (Request.client). Of the clients that wait, the one with the fewest rows gets the next row, with the request
that it has waited with longest. Where none is free and another client has at least two rows more, one of those makes room: it is parked,
and waits like the others. So each of k clients that ask for enough has a k-th part of the rows, and requests of one client are served
in the order in which they came.

Of the prompts being read, every second piece is the oldest one's, so none is starved; the other pieces go to the client, and of that to
the prompt, that has had the fewest, so a short prompt that comes while a long one is read has its first piece after at most one of the
others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from mlxspec.engine.request import Request
from mlxspec.errors import EngineStoppedError, QueueFullError


def next_of(waiting: Iterable[Request], places: Mapping[str, int]) -> Request | None:
    """Who gets the next row, None where nobody waits. places: rows by client."""
    return min(waiting, key=lambda r: (places.get(r.client, 0), r.number), default=None)


def makes_room(rows: Sequence[Request], client: str, places: Mapping[str, int]) -> Request | None:
    """Which of the rows is parked for `client`; None where its share is no smaller than any other's. The shortest one costs least."""
    most = max((places[r.client] for r in rows), default=0)
    if most <= places.get(client, 0) + 1:
        return None
    return min((r for r in rows if places[r.client] == most), key=lambda r: (len(r.history), -r.number))


class Queue:
    """Requests without a row, oldest first. max_waiting bounds what is submitted; it does not bound `put(..., bounded=False)`. Where it is
    full, a client's request takes the place of the newest one of a client that has at least two more."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._requests: deque[Request] = deque()
        self.is_draining = False

    @property
    def num_tokens(self) -> int:
        """Of all prompts that wait."""
        return sum(len(r.prompt) for r in self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(tuple(self._requests))

    def check(self, client: str = "") -> None:
        """Raises QueueFullError or EngineStoppedError where a request would not be taken."""
        self.check_open()
        if len(self._requests) >= self._max_waiting and self._displaced(client) is None:
            raise QueueFullError(len(self._requests))

    def check_open(self) -> None:
        """Raises EngineStoppedError where no request is taken any more."""
        if self.is_draining:
            raise EngineStoppedError("The engine is shutting down and takes no new requests.")

    def put(self, request: Request, *, bounded: bool = True) -> Request | None:
        """bounded False: for a caller who has all its requests at hand anyway. Returns the request whose place it has taken; that one is
        not here any more. Raises as `check` does."""
        self.check_open()
        displaced = None
        if bounded:
            self.check(request.client)
            if len(self._requests) >= self._max_waiting:
                displaced = self._displaced(request.client)
        if displaced is not None:
            self._requests.remove(displaced)
        self._requests.append(request)
        return displaced

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def _displaced(self, client: str) -> Request | None:
        waiting = Counter(r.client for r in self._requests)
        most = max(waiting.values(), default=0)
        if most <= waiting[client] + 1:
            return None
        return next(r for r in reversed(self._requests) if waiting[r.client] == most)


class Turns:
    """Whose piece is read next. See the module's promises."""

    def __init__(self) -> None:
        self._is_oldest = True

    def next(self, served: Sequence[int], clients: Sequence[str] | None = None) -> int:
        """Index into prompts, oldest first, of which each has had `served` pieces and is its client's. The same until `took`."""
        if self._is_oldest:
            return 0
        totals: Counter[str] = Counter()
        for client, pieces in zip(clients or (), served, strict=False):
            totals[client] += pieces
        keys = [(totals[clients[i]] if clients else 0, pieces) for i, pieces in enumerate(served)]
        return keys.index(min(keys))

    def took(self) -> None:
        """The piece was read."""
        self._is_oldest = not self._is_oldest
