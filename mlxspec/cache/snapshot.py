"""One row's committed state, as the prefix store keeps it."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlxspec.cache.attention import KV


class Snapshot(NamedTuple):
    """One row's committed state after its first `length` tokens. Arrays are copies, so it outlives the cache.

    segments: of consecutive stretches of tokens from `start` to `length`, each the keys and values of every layer that keeps them token
    by token. point: the states of all other layers.
    """

    length: int
    segments: list[list[KV]]
    point: list[tuple[mx.array, ...]]
    start: int = 0

    @property
    def arrays(self) -> list[mx.array]:
        return [x for s in self.segments for kv in s for x in kv] + [x for state in self.point for x in state]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays)
