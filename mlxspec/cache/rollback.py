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
    """The recurrent state that a Gated DeltaNet layer's forward takes and returns.

    window (B, K - 1, C): the convolution inputs before those of the last forward. state (B, Hv, Dv, Dk) float32: the state of the
    recurrence. After a verify, `state` is the state before that forward, `tape` records the effect of each of its tokens on the state, and
    `inputs` are its convolution inputs: (M, C or more), of which the first C columns count. inputs and tape are None where nothing is
    deferred; window and state are then those right before the next token.
    """

    state: mx.array
    window: mx.array
    inputs: mx.array | None = None
    tape: Tape | None = None


@dataclass(frozen=True)
class Committed:
    """The committed tokens of the last forward, the same for all layers: the first num_committed (B,) int32 tokens of each of its rows.
    same: the count as a number, where all rows have equal widths and equal counts and the host knows the count; else None."""

    rows: RowLayout
    num_committed: mx.array
    same: int | None = None

    @classmethod
    def of(cls, rows: FlatRows, num_committed: Sequence[int] | mx.array) -> Committed:
        """Return the commit of a forward with these rows. num_committed: committed tokens of each row; an array where only the device knows
        them."""
        if isinstance(num_committed, mx.array):
            return cls(RowLayout.of(rows), num_committed)
        same = num_committed[0] if rows.is_uniform and len(set(num_committed)) == 1 else None
        return cls(RowLayout.of(rows), mx.array(np.asarray(num_committed, np.int32)), same)


def last_replay(past: RecurrentState, committed: Committed | None) -> Replay | None:
    """Return the replay of the accepted tokens that `past` has deferred; None where nothing is deferred. committed: the commit of the
    forward that made `past`; None where nothing is deferred."""
    if committed is None or past.tape is None:
        return None
    return Replay(past.tape, committed.rows, committed.num_committed, committed.same)


def advance(
    inputs: GdnInputs, state: mx.array, last: Replay | None, here: RowLayout, widths: FlatRows
) -> tuple[mx.array, mx.array]:
    """Run certain tokens through the recurrence. Return the outputs y (N, Hv, Dv) and the state (B, Hv, Dv, Dk) after the tokens. last:
    deferred tokens, which are replayed onto `state` first. here, widths: the rows of these tokens, for the kernels and for the host."""
    if widths.max_width <= STEPS_AT_MOST:
        return gdn_advance(inputs, state, here, last)
    if last is not None:
        state = gdn_flush(state, last)
    return gdn_prefill(inputs, state, widths, here.starts)


def capacity(num_tokens: int) -> int:
    """Return for how many tokens kernels make a tape: the smallest power of two that is at least num_tokens and at least 4. Powers of two
    keep the number of tape shapes small, and every pair of a forward's shape and the tape shape before it is compiled. The rest of a tape
    costs memory only."""
    return max(_LEAST_ROOM, 1 << (num_tokens - 1).bit_length())


def tape_bytes(width: int, state: Sequence[int]) -> int:
    """Return an upper bound of the bytes of one row's tape of up to `width` tokens. state: the shape (Hv, Dv, Dk) of the layer's state."""
    num_heads, value_dim, key_dim = state
    return 4 * capacity(width) * num_heads * (value_dim + key_dim + 1)
