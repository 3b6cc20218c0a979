"""The rows that decode, and those that are parked so that other clients have a turn.

Invariants: `requests` are in the order of the cache's rows, and there is a cache exactly if there are requests. A parked request keeps a
snapshot of its row and goes on from there. Rows join, leave, and are parked only where no round is on its way that they are part of.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from mlxspec.cache.model_cache import ModelCache, Snapshot
from mlxspec.engine.request import Request


class Rows:
    """One engine's. Iterating, indexing and `len` are over the decoding requests."""

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
        """A row begins to decode. cache: its own, of one row; it must not be used again."""
        if self.cache is None:
            self.cache = cache
        else:
            self.cache.join(cache)
        self.requests.append(request)

    def leave(self, leaving: list[Request]) -> None:
        """These rows go."""
        staying = [i for i, r in enumerate(self.requests) if r not in leaving]
        if not staying:
            self.cache = None
        elif self.cache is not None:
            self.cache.select(staying)
        self.requests = [self.requests[i] for i in staying]

    def park(self, request: Request) -> None:
        """Its row leaves; its state stays."""
        if self.cache is None:
            raise ValueError("no row can leave where there are none")
        kept = self.parked[request] = self.cache.snapshot(self.requests.index(request))
        mx.eval(kept.arrays)
        self.leave([request])

    def unpark(self, request: Request, cache: ModelCache) -> None:
        """Its row goes on where it was. cache: a fresh one, of one row."""
        kept = self.parked.pop(request)
        cache.restore(kept)
        cache.scales[0] = request.scales
        if request.seen is not None:
            cache.shift(0, request.seen.images.shift(kept.length))
        self.join(request, cache)

    def lose_all(self) -> list[Request]:
        """A forward of all rows has failed, and nothing is known of their states. Returns their requests, which stay until they leave."""
        self.cache = None
        return self.requests

    @property
    def nbytes(self) -> int:
        """Of the target's states, parked ones included."""
        parked = sum(s.nbytes for s in self.parked.values())
        return parked + (0 if self.cache is None else self.cache.nbytes)
