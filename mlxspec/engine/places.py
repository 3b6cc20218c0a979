"""Keeps the requests of an engine by place: in the queue, being read, decoding, or parked so that other clients have a turn.

Invariants: the `requests` of the rows are in the order of the cache's rows, and there is a cache exactly if there are requests. A parked
request keeps a snapshot of its row, or its partly read prompt, and goes on from there. Rows join, leave, and are parked only while no round
with them is launched and unread. schedule.py decides whose turn it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.snapshot import Snapshot
from mlxspec.engine.prefill import Prefills
from mlxspec.engine.request import Ending, Request
from mlxspec.engine.schedule import Queue, Shares, makes_room


class Rows:
    """The rows of an engine: the decoding requests with their cache, and the snapshots of parked requests. Iterating, indexing and `len`
    are over the decoding requests."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.cache: ModelCache | None = None
        self.parked: dict[Request, Snapshot] = {}

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __getitem__(self, place: int) -> Request:
        return self.requests[place]

    def join(self, request: Request, cache: ModelCache) -> None:
        """Add a request to the decoding rows. cache: the request's own, of one row; it must not be used again."""
        if self.cache is None:
            self.cache = cache
        else:
            self.cache.join(cache)
        self.requests.append(request)

    def leave(self, leaving: list[Request]) -> None:
        """Remove these requests and their rows in the cache; the other rows keep their order."""
        staying = [i for i, r in enumerate(self.requests) if r not in leaving]
        if not staying:
            self.cache = None
        elif self.cache is not None:
            self.cache.select(staying)
        self.requests = [self.requests[i] for i in staying]

    def park(self, request: Request) -> None:
        """Remove a decoding request's row, and keep a snapshot of its state with which `unpark` lets it decode again."""
        if self.cache is None:
            raise ValueError("no row can leave where there are none")
        kept = self.cache.snapshot(self.requests.index(request))
        mx.eval(kept.arrays)  # where that fails the row stays
        self.parked[request] = kept
        self.leave([request])

    def unpark(self, request: Request, cache: ModelCache) -> None:
        """Add a parked request to the decoding rows again, from its snapshot. cache: a fresh one of one row."""
        kept = self.parked[request]
        cache.restore(kept)
        cache.scales[0] = request.scales
        if request.seen is not None:
            cache.shift(0, request.seen.images.shift(kept.length))
        del self.parked[request]  # where the above fails it stays parked
        self.join(request, cache)

    def lose_all(self) -> list[Request]:
        """Drop the cache of all rows after a failed forward, because their states are unknown. Return their requests, which stay listed
        until they leave."""
        self.cache = None
        return self.requests

    @property
    def nbytes(self) -> int:
        """Return the bytes of the target's states, those of parked requests included."""
        parked = sum(s.nbytes for s in self.parked.values())
        return parked + (0 if self.cache is None else self.cache.nbytes)


class RequestPlaces:
    """All requests of an engine, by place: in the queue, being read, decoding, or parked. gone: requests that a full queue has dropped
    for another client's. step: number of the engine's step. awaits_read: whether rows can only be parked or join after the launched
    round has been read."""

    def __init__(self, max_waiting: int) -> None:
        self.queue, self.prefills, self.rows = Queue(max_waiting), Prefills(), Rows()
        self.gone: list[Request] = []
        self.step = 0
        self.awaits_read = False
        self._shares = Shares()

    @property
    def requests(self) -> list[Request]:
        """Return all requests that have not left the engine: waiting, parked, being read and decoding."""
        return [*self.queue, *self.parked, *self.running]

    def end(self, endings: Sequence[Ending]) -> None:
        """End the requests that these endings name."""
        by_number = {ending.number: ending for ending in endings}
        for request in self.requests if by_number else ():
            if request.number in by_number:
                request.end(by_number[request.number])

    @property
    def parked(self) -> list[Request]:
        """Return the requests that have begun and have no place now."""
        return [*self.rows.parked, *self.prefills.parked]

    @property
    def running(self) -> list[Request]:
        """Return the requests that have a place: their prompt is being read, or their row decodes."""
        return [*(p.request for p in self.prefills), *self.rows]

    @property
    def out_of_time(self) -> list[Ending]:
        """Return the endings of the requests whose deadline has passed by this process's clock, or whose grammar takes too long."""
        return [ending for r in self.requests if (ending := r.out_of_time) is not None]

    @property
    def is_busy(self) -> bool:
        """Return whether a step has work: a request has a place, or the caller of a dropped request must receive its end."""
        return bool(self.prefills or self.rows or self.gone)

    def admit(
        self,
        most: int,
        resting: frozenset[int],
        has_room: Callable[[Request], bool],
        make_cache: Callable[[], ModelCache],
        *,
        is_on_way: bool,
    ) -> Iterator[Request]:
        """Give places, at most `most`, to the waiting requests whose turn it is. Yields the requests that begin; the caller reserves the
        memory of each before it continues. Requests that go on after being parked are not yielded. A request in `resting` loses its
        place. While a new request waits for memory, only parked requests are admitted, because their memory is reserved already.
        has_room: whether memory for a request is free. make_cache: returns a cache of one row. is_on_way: whether a round is launched
        and not read, so that no row may move."""
        has_memory = True
        tired = [r for r in self.rows if r.number in resting]
        self.awaits_read = is_on_way and bool(tired)
        for row in () if is_on_way else tired:
            self._park(row)
        while self.queue or self.parked:
            running = self.running
            waiting = [
                r for r in (*self.parked, *(self.queue if has_memory else ())) if r.number not in resting
            ]
            request = self._shares.next(waiting, Counter(r.client for r in running))
            if request is None:
                return
            num_waiting = len({r.client for r in waiting})
            is_full = len(running) >= most
            victim = makes_room(running, request.client, self.step, num_waiting) if is_full else None
            if victim is None and is_full:
                return
            is_new = request in self.queue
            if is_new and not has_room(request):
                has_memory = False
                continue
            if is_on_way and (victim in self.rows.requests or request in self.rows.parked):
                self.awaits_read = True
                return
            if victim is not None and not self._park(victim):
                return
            request.since = self.step
            self._shares.took(request.client)
            if is_new:
                self.queue.remove(request)
                yield request
            elif request in self.rows.parked:
                try:
                    self.rows.unpark(request, make_cache())
                except Exception as error:  # it is parked, and leaves
                    request.fail(error)
                    return
            else:
                self.prefills.park(request, is_parked=False)

    def _park(self, request: Request) -> bool:
        """Park a running request, so that its place is free; return False where that fails, which ends the request."""
        try:
            (self.rows if request in self.rows.requests else self.prefills).park(request)
        except Exception as error:
            request.fail(error)
            return False
        return True

    def take_ended(self) -> list[Request]:
        """Remove the requests that have ended and do not decode, and return them. What was read of their prompts is kept in the prefix
        cache."""
        found, self.gone = self.gone, []
        for request in [r for r in (*self.queue, *self.rows.parked) if r.finish_reason is not None]:
            found.append(request)
            if self.rows.parked.pop(request, None) is None:
                self.queue.remove(request)
        for prefill in [p for p in self.prefills.every if p.request.finish_reason is not None]:
            self.prefills.remove(prefill)
            prefill.leave()
            found.append(prefill.request)
        return found
