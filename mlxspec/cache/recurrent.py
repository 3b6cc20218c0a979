"""The state of one Gated DeltaNet layer for all rows, with deferred commit.

A commit moves nothing. The next forward begins with the accepted tokens of the last one; the model cache says how many (`num_committed`).
For the recurrence, rollback.py does that. The convolution needs no arithmetic: its window and inputs are kept, and `num_committed` says
where to cut.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Generic, Self, TypeVar

import mlx.core as mx

from mlxspec.cache.attention import copied
from mlxspec.cache.rollback import Committed, RecurrentState, capacity, last_replay, tape_bytes
from mlxspec.kernels.conv_ops import conv_window
from mlxspec.kernels.gdn_round import gdn_flush

State = TypeVar("State")


class StateLayerCache(Generic[State]):
    """The state of one layer whose forwards return a new state and do not change the old one. current: the committed state; staged: the
    state that the open forward returned, or None."""

    is_recurrent = True
    is_per_token = False

    def __init__(self, current: State) -> None:
        self.current = current
        self.staged: State | None = None

    def append(self, result: State) -> None:
        """Stage the state that a forward returned. `commit` makes this state current, and `abort` drops it."""
        self.staged = result

    def commit(self) -> None:
        if self.staged is not None:
            self.current, self.staged = self.staged, None

    def abort(self) -> None:
        self.staged = None

    def fork(self, *, tails: bool = False) -> Self:
        """Return a cache that shares the current state, which no forward changes. tails: has no effect."""
        twin = copy.copy(self)
        twin.staged = None
        return twin


class RecurrentLayerCache(StateLayerCache[RecurrentState]):
    """The RecurrentState of one Gated DeltaNet layer for all rows, kept between forwards."""

    def __init__(
        self,
        num_value_heads: int,
        value_dim: int,
        key_dim: int,
        conv_dim: int,
        conv_kernel: int,
        dtype: mx.Dtype,
        num_rows: int = 0,
    ):
        super().__init__(
            RecurrentState(
                mx.zeros((num_rows, num_value_heads, value_dim, key_dim), mx.float32),
                mx.zeros((num_rows, conv_kernel - 1, conv_dim), dtype),
            )
        )

    def flush(self, committed: Committed) -> None:
        """Apply the committed tokens of the last forward to the state, without running another forward."""
        window, inputs, last = self.current.window, self.current.inputs, last_replay(self.current, committed)
        if inputs is None or last is None:
            return
        self.current = RecurrentState(
            gdn_flush(self.current.state, last),
            conv_window(window, inputs[:, : window.shape[2]], committed.num_committed, committed.rows.starts),
        )

    def join(self, other: RecurrentLayerCache) -> None:
        """Append the rows of `other` after the rows of this cache. Both must have been flushed."""
        self.current = RecurrentState(
            mx.concatenate([self.current.state, other.current.state]),
            mx.concatenate([self.current.window, other.current.window]),
        )

    def select(self, rows: Sequence[int]) -> None:
        """Keep the rows with these indices, in this order. The cache must have been flushed."""
        index = mx.array(list(rows), mx.int32)
        self.current = RecurrentState(self.current.state[index], self.current.window[index])

    def snapshot(self, row: int, length: int, start: int = 0) -> tuple[mx.array, mx.array]:
        """Return copies of a row's state (1, Hv, Dv, Dk) and convolution window (1, K - 1, C). The cache must have been flushed. length and
        start have no effect."""
        return copied(self.current.state[row : row + 1]), copied(self.current.window[row : row + 1])

    def restore(self, state: tuple[mx.array, mx.array]) -> None:
        self.current = RecurrentState(*state)

    def bytes_for(self, length: int, widest: int) -> int:
        """Return the bytes of a row, which do not depend on `length`: the state, the convolution window, and for a forward of `widest`
        tokens its tape and convolution inputs. The array of inputs also keeps the columns that were projected together with them: gate,
        decay and step size."""
        state, window = self.current.state, self.current.window
        _, num_heads, value_dim, key_dim = state.shape
        columns = window.shape[2] + num_heads * (value_dim + 2)
        inputs = max(widest * columns, capacity(widest) * window.shape[2])
        window_bytes = window.dtype.size * (window.shape[1] * window.shape[2] + inputs)
        size = 4 * num_heads * value_dim * key_dim
        return size + window_bytes + tape_bytes(widest, state.shape[1:])

    @property
    def snapshot_bytes(self) -> int:
        """Return the bytes of a snapshot of one row, which do not depend on its number of tokens."""
        return sum(x.dtype.size * math.prod(x.shape[1:]) for x in (self.current.state, self.current.window))

    @property
    def arrays(self) -> list[mx.array]:
        found = []
        for s in (self.current, self.staged):
            if s is not None:
                found += [s.state, s.window, *(x for x in (s.inputs,) if x is not None), *(s.tape or ())]
        return found
