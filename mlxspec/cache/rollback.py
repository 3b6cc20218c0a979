"""Rollback of a Gated DeltaNet layer's recurrent state to the accepted tokens, by a tape.

A verify keeps the state before it and its *tape*: what each of its tokens did to that state. The next forward replays the accepted tokens
first, and `flush` replays them without a forward. The model cache says how many tokens are committed (`num_committed`). The convolution in
front of the recurrence rolls back by itself (recurrent.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxspec.kernels.conv_ops import GdnInputs
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_ops import Tape
from mlxspec.kernels.gdn_prefill import gdn_prefill
from mlxspec.kernels.gdn_round import Replay, RowLayout, gdn_advance, gdn_flush

STEPS_AT_MOST = 16  # certain tokens wider than this go through the chunked form
_LEAST_ROOM = 4  # tokens


class RecurrentState(NamedTuple):
    """The recurrent state that a layer's forward takes and returns.

    window (B, K - 1, C): convolution inputs before the last forward's; state (B, Hv, Dv, Dk) float32. After a forward that may be taken
    back, `inputs` (M, C or more columns, of which the first C count) are its convolution inputs, state is the one before it, and tape what
    it did to that. inputs and tape None: nothing is deferred; window and state are those right before the next token.
    """

    state: mx.array
    window: mx.array
    inputs: mx.array | None = None
    tape: Tape | None = None


@dataclass(frozen=True)
class Committed:
    """The committed tokens of the last forward, the same for all layers: the first num_committed (B,) int32 tokens of each of its rows.
    same: that number where rows of one width have one, and the host knows it; else None."""

    rows: RowLayout
    num_committed: mx.array
    same: int | None = None

    @classmethod
    def of(cls, rows: FlatRows, num_committed: Sequence[int] | mx.array) -> Committed:
        """num_committed: an array where only the device knows the numbers."""
        if isinstance(num_committed, mx.array):
            return cls(RowLayout.of(rows), num_committed)
        same = num_committed[0] if rows.is_uniform and len(set(num_committed)) == 1 else None
        return cls(RowLayout.of(rows), mx.array(np.asarray(num_committed, np.int32)), same)


def last_replay(past: RecurrentState, committed: Committed | None) -> Replay | None:
    """The accepted tokens that `past` has deferred; None where nothing is. committed: None exactly there."""
    if committed is None or past.tape is None:
        return None
    return Replay(past.tape, committed.rows, committed.num_committed, committed.same)


def advance(
    inputs: GdnInputs, state: mx.array, last: Replay | None, here: RowLayout, widths: FlatRows
) -> tuple[mx.array, mx.array]:
    """Run certain tokens: y (N, Hv, Dv) and the state (B, Hv, Dv, Dk) after them. last: replayed onto `state` first."""
    if widths.max_width <= STEPS_AT_MOST:
        return gdn_advance(inputs, state, here, last)
    if last is not None:
        state = gdn_flush(state, last)
    return gdn_prefill(inputs, state, widths, here.starts)


def capacity(num_tokens: int) -> int:
    """Tokens that kernels make a tape for, at least num_tokens. A power of two: forwards then follow forwards of few shapes, and each pair
    of shapes is compiled. Memory is all that it takes."""
    return max(_LEAST_ROOM, 1 << (num_tokens - 1).bit_length())


def tape_bytes(width: int, state: Sequence[int]) -> int:
    """Upper bound of the bytes of a tape of up to `width` tokens of a row, in a layer of state (Hv, Dv, Dk)."""
    num_heads, value_dim, key_dim = state
    return 4 * capacity(width) * num_heads * (value_dim + key_dim + 1)
