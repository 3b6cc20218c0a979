"""State of one Gated DeltaNet layer for all rows, with deferred commit: base state, the last forward's tape, and how much of it stands.

Knows arrays and how to apply a tape; does not know which tokens were accepted (the model cache says `kept`) nor how a layer computes
its inputs. After a forward the state itself is not rolled back or forward: the next forward replays the first `kept` tape entries before
its own tokens, so a rejected draft costs nothing. The convolution is the same without arithmetic: window and inputs, `kept` picks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlxspec.kernels.conv_ops import conv_window
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_ops import Tape
from mlxspec.kernels.gdn_round import Kept, RowLayout, gdn_flush


class RecurrentState(NamedTuple):
    """What a layer's forward takes and gives.

    state (B, Hv, Dv, Dk) float32 and window (B, K - 1, C): before the tape. tape and inputs (M, C or more columns, of which the
    first C count), both of the last forward's flat tokens, are None when nothing is deferred.
    """

    state: mx.array
    window: mx.array
    inputs: mx.array | None = None
    tape: Tape | None = None


class RecurrentLayerCache:
    """One layer's RecurrentState, from forward to forward."""

    is_recurrent = True

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
        self.current = RecurrentState(
            mx.zeros((num_rows, num_value_heads, value_dim, key_dim), mx.float32),
            mx.zeros((num_rows, conv_kernel - 1, conv_dim), dtype),
        )
        self._staged: RecurrentState | None = None

    def append(self, result: RecurrentState) -> None:
        """Stage what a forward returned; commit makes it current, abort drops it."""
        self._staged = result

    def commit(self) -> None:
        if self._staged is not None:
            self.current, self._staged = self._staged, None

    def abort(self) -> None:
        self._staged = None

    def fork(self) -> RecurrentLayerCache:
        """Shares today's arrays, which are never written in place while two refer to them."""
        twin = object.__new__(RecurrentLayerCache)
        twin.current, twin._staged = self.current, None
        return twin

    def flush(self, kept: mx.array, rows: FlatRows) -> None:
        """Apply the tape without a forward."""
        state, window, inputs, tape = self.current
        if tape is None or inputs is None:
            return
        self.current = RecurrentState(
            gdn_flush(state, Kept(tape, RowLayout.of(rows), kept)),
            conv_window(window, inputs[:, : window.shape[2]], kept, rows.index),
        )

    def join(self, other: RecurrentLayerCache) -> None:
        """Rows of `other` behind our own; both flushed."""
        self.current = RecurrentState(
            mx.concatenate([self.current.state, other.current.state]),
            mx.concatenate([self.current.window, other.current.window]),
        )

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; flushed before."""
        index = mx.array(list(rows), mx.int32)
        self.current = RecurrentState(self.current.state[index], self.current.window[index])

    def snapshot(self, row: int, length: int) -> tuple[mx.array, mx.array]:
        """Copies (1, Hv, Dv, Dk) and (1, K - 1, C); flushed before."""
        return mx.contiguous(self.current.state[row : row + 1]), mx.contiguous(
            self.current.window[row : row + 1]
        )

    def restore(self, state: tuple[mx.array, mx.array]) -> None:
        self.current = RecurrentState(*state)

    @property
    def arrays(self) -> list[mx.array]:
        found = []
        for s in (self.current, self._staged):
            if s is not None:
                found += [s.state, s.window, *(x for x in (s.inputs,) if x is not None), *(s.tape or ())]
        return found
