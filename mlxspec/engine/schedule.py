"""The scheduler: the queue of waiting requests, who gets a place next, who makes room for it, and whose prompt is read next. Knows no
arrays and no model.

A place is a prompt being read or a row that decodes. Places are shared out by client (Request.client). Of the clients that wait, the one
with the fewest places is next, of several the one whose turn was longest ago, with the request that it has waited with longest. Where no
place is free, a request of the client that has most makes room. It is parked, waits like the others and goes on where it was:
    the client has at least two places more: its newest request, prompts first;
    it has one more: the request that has had its place longest. Where n clients wait one place changes hands every TURN / n steps, one a
    step at most, so that each of them waits for about TURN steps, however many they are up to that number. A prompt makes room at once
    for a client that has no place, because parking a prompt costs nothing.
So each of k clients that ask for enough has a k-th part of the places over time, also where there are more clients than places, and
requests of one client are served in the order in which they came.

Of the prompts being read, every second piece is the oldest one's, so none is starved; the other pieces go to the client, and of that to
the prompt, that has had the fewest, so a short prompt that comes while a long one is read has its first piece after at most one of the
others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from mlxspec.engine.request import Request
from mlxspec.errors import EngineStoppedError, QueueFullError

TURN = 8  # steps that a client waits for a place that is another's


class Shares:
    """The rule that decides which client gets the next place."""

    def __init__(self) -> None:
        self._turns: dict[str, None] = {}  # clients, the one whose turn was longest ago first

    def next(self, waiting: Iterable[Request], places: Mapping[str, int]) -> Request | None:
        """None where nobody waits. places: those taken, by client."""
        oldest: dict[str, Request] = {}
        for request in sorted(waiting, key=lambda r: r.number):
            oldest.setdefault(request.client, request)
        self._turns = {c: None for c in (*self._turns, *oldest) if c in oldest or places.get(c)}
        order = {client: place for place, client in enumerate(self._turns)}
        return min(oldest.values(), key=lambda r: (places.get(r.client, 0), order[r.client]), default=None)

    def took(self, client: str) -> None:
        """Note that a client has got a place."""
        self._turns.pop(client, None)
        self._turns[client] = None


def makes_room(running: Sequence[Request], client: str, step: int, num_waiting: int) -> Request | None:
    """The request, of those that have a place, that is parked for `client`, None where none is. step: of the engine, now. num_waiting:
    clients that wait for a place."""
    places = Counter(r.client for r in running)
    most = max(places.values(), default=0)
    richest = [r for r in running if places[r.client] == most]
    if most > places[client] + 1:
        return min(richest, key=lambda r: (r.num_generated > 0, -r.number))
    if most <= places[client]:
        return None
    quiet = step - max(r.since for r in running)  # steps since a place changed hands
    is_turn = quiet * num_waiting >= TURN
    over = [r for r in richest if is_turn or not (r.num_generated or places[client] or r.since >= step)]
    return min(over, key=lambda r: (r.since, r.number), default=None)


class Queue:
    """Requests without a row, oldest first. max_waiting bounds what is submitted; it does not bound `put(..., bounded=False)`. Where it is
    full, a client's request takes the place of the newest one of a client that has at least two more."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._requests: deque[Request] = deque()
        self.is_draining = False

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts that wait."""
        return sum(len(r.prompt) for r in self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(tuple(self._requests))

    def check(self, client: str = "") -> None:
        """Raise QueueFullError or EngineStoppedError where a request would not be taken."""
        self.check_open()
        if len(self._requests) >= self._max_waiting and self._displaced(client) is None:
            raise QueueFullError(len(self._requests))

    def check_open(self) -> None:
        """Raise EngineStoppedError where no request is taken any more."""
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
    """The rule that decides whose piece is read next. See the module's promises."""

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
        """Note that the piece of `next` was read."""
        self._is_oldest = not self._is_oldest
