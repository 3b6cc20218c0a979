"""The scheduler: the queue of waiting requests, and the rules that decide which request gets a place next, which one makes room for it, and
whose prompt is read next.

A place is a prompt being read or a row that decodes. Places are shared out by client (Request.client). Of the clients that wait, the one
with the fewest places is next, of several the one whose turn was longest ago, with its oldest waiting request. Where no place is free, a
request of the client that has most makes room. It is parked, waits like the others and goes on where it was:
    the client has at least two places more: its newest request, prompts first;
    it has one more: the request that has had its place longest. Where n clients wait one place changes hands every TURN / n steps, one a
    step at most, so that each of them waits for about TURN steps, however many they are up to that number. A prompt makes room at once
    for a client that has no place, because parking a prompt costs nothing.
So each of k clients that send enough requests has a k-th part of the places over time, also where there are more clients than places, and
requests of one client are served in the order of their arrival.

Of the prompts being read, every second piece is the oldest one's, so none is starved. The other pieces go to the client, and of its prompts
to the one, that has had the fewest. So a short prompt that arrives while a long one is read has its first piece after at most one of the
others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from mlxspec.engine.request import Request
from mlxspec.errors import EngineStoppedError, QueueFullError

TURN = 8  # steps that a client waits for a place that is another's


class Shares:
    """The rule that decides which client gets the next free place. A place is a prompt that is read or a row that decodes."""

    def __init__(self) -> None:
        self._turns: dict[str, None] = {}  # clients, the one whose turn was longest ago first

    def next(self, waiting: Iterable[Request], places: Mapping[str, int]) -> Request | None:
        """Return the request that gets the next place; None where none waits. places: by client, the number of places it has."""
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
    """Return the running request that is parked so that `client` gets its place; None where none must be. step: number of the engine's
    current step. num_waiting: number of clients that wait for a place."""
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
    """The queue of requests that have not begun, oldest first. max_waiting: most requests, except for those that are put with
    bounded=False. In a full queue, a new request replaces the newest request of a client that has at least two more waiting than the
    new one's client."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._requests: deque[Request] = deque()
        self.is_draining = False

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all prompts in the queue."""
        return sum(len(r.prompt) for r in self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(tuple(self._requests))

    def check(self, client: str = "") -> None:
        """Raise QueueFullError or EngineStoppedError where a request of this client would be refused."""
        self.check_open()
        if len(self._requests) >= self._max_waiting and self._displaced(client) is None:
            raise QueueFullError(len(self._requests))

    def check_open(self) -> None:
        """Raise EngineStoppedError where new requests are refused because the engine shuts down."""
        if self.is_draining:
            raise EngineStoppedError("The engine is shutting down and takes no new requests.")

    def put(self, request: Request, *, bounded: bool = True) -> Request | None:
        """Add a request, and return the request that it has replaced in a full queue, or None. bounded: False ignores the limit, for a
        caller that holds all of its requests in memory anyway. Raises as `check` does."""
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
    """The rule that decides whose prompt is read next: every second piece is the oldest prompt's, the others go to the client, and of
    its prompts to the one, that has had the fewest pieces."""

    def __init__(self) -> None:
        self._is_oldest = True

    def next(self, served: Sequence[int], clients: Sequence[str] | None = None) -> int:
        """Return the index of the prompt whose piece is read next. served: pieces that each prompt has had, the oldest prompt first.
        clients: the client of each prompt. The result stays the same until `took` is called."""
        if self._is_oldest:
            return 0
        totals: Counter[str] = Counter()
        for client, pieces in zip(clients or (), served, strict=False):
            totals[client] += pieces
        keys = [(totals[clients[i]] if clients else 0, pieces) for i, pieces in enumerate(served)]
        return keys.index(min(keys))

    def took(self) -> None:
        """Note that the piece of the prompt that `next` returned was read."""
        self._is_oldest = not self._is_oldest
