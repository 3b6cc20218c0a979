"""One row's committed state, as the prefix cache keeps it."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlxspec.cache.attention import KV


class Snapshot(NamedTuple):
    """The committed state of one row after its first `length` tokens. Its arrays are copies, so they stay valid when the cache is gone.

    segments: consecutive stretches of the tokens from `start` to `length`, each with the keys and values of every layer that stores every
    token. point: the states of all other layers after `length` tokens.
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
