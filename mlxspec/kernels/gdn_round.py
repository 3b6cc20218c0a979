"""One round of the gated delta rule: replay the accepted tokens of the last forward, run the new tokens, and give their tape.

`gdn_round` gives the state before the tokens and their tape (deferred commit), `gdn_advance` the state after them (all are certain),
`gdn_flush` the state without any new tokens. Each picks the Metal kernel, the same for all, a CPU's form, or the plain-mx twin. The cache
makes sure that num_committed (the kernel's `kept`) fits the tape.

Shapes: inputs as in `GdnInputs`, float32, float16 or bfloat16; state (B, Hv, Dv, Dk) float32; y (N, Hv, Dv) float32. v-head h uses k-head
h // (Hv / Hk). A row may have no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxspec.kernels import launch
from mlxspec.kernels.conv_ops import GdnInputs, GdnShape
from mlxspec.kernels.cpu import gdn_at_once
from mlxspec.kernels.flat import FlatRows, RaggedIndex
from mlxspec.kernels.gdn_ops import Tape, replay, replay_first, steps

_kernel = launch.MetalKernel(
    "gdn_round",
    inputs=[
        *GdnInputs._fields,
        "state",
        "tape_k",
        "tape_delta",
        "tape_log_g",
        "starts",
        "tape_starts",
        "kept",
        "span",
    ],
    outputs=["y", "state_out", "delta"],
)
_MAX_HEAD = 256


@dataclass(frozen=True)
class RowLayout:
    """The places of each row's tokens on the flat axis: starts (B + 1,) int32 for kernels, index for the twins; widest: tokens of the
    longest row, or a little more."""

    starts: mx.array
    index: RaggedIndex | None
    widest: int

    @classmethod
    def of(cls, rows: FlatRows) -> RowLayout:
        return cls(rows.starts_array, rows.index, rows.max_width)


@dataclass(frozen=True)
class Replay:
    """The committed part of the last forward: its tape, its rows, and the number of committed entries of each row, num_committed (B,)
    int32. same: that number where all rows are known to have the same one, otherwise None."""

    tape: Tape
    rows: RowLayout
    num_committed: mx.array
    same: int | None = None

    def onto(self, state: mx.array) -> mx.array:
        """Return the state after the committed entries, computed in plain mx operations."""
        if self.same is not None:
            return replay_first(state, self.tape, self.same)
        return replay(state, self.tape, self.num_committed, self.rows.index)


class GdnRoundResult(NamedTuple):
    """The result of `gdn_round`. y (N, Hv, Dv); state (B, Hv, Dv, Dk) after the tokens committed before this forward, without the new
    ones; the new tokens' tape."""

    y: mx.array
    state: mx.array
    tape: Tape


def supports(dtype: mx.Dtype, key_dim: int, value_dim: int) -> bool:
    """Return whether the Metal kernel takes this dtype and these head sizes; otherwise the twin is used."""
    return dtype in launch.FLOATS and all(d % 32 == 0 and 32 <= d <= _MAX_HEAD for d in (key_dim, value_dim))


def on_kernel(dtype: mx.Dtype, key_dim: int, value_dim: int) -> bool:
    """Return whether all functions of this module launch the Metal kernel for this dtype and these head sizes."""
    return supports(dtype, key_dim, value_dim) and launch.in_use("gdn_round")


def _use_metal(inputs: GdnInputs) -> bool:
    return on_kernel(inputs.q.dtype, inputs.q.shape[-1], inputs.v.shape[-1])


def gdn_round(
    inputs: GdnInputs, state: mx.array, rows: RowLayout, last: Replay | None = None
) -> GdnRoundResult:
    """Run tokens that may be rejected: replay `last` (None: nothing is deferred) onto `state`, run the tokens, and return y, the state
    before them, and their tape."""
    if _use_metal(inputs):
        return gdn_round_metal(inputs, state, rows, last)
    if last is not None:
        state = gdn_flush(state, last)
    if gdn_at_once.takes(inputs.q, state, rows.index):
        return GdnRoundResult(*gdn_at_once.verify(inputs, state, rows.index))
    return gdn_round_ops(inputs, state, rows)


def gdn_advance(
    inputs: GdnInputs, state: mx.array, rows: RowLayout, last: Replay | None = None
) -> tuple[mx.array, mx.array]:
    """Run tokens that are certain to be committed: replay `last` (None: nothing is deferred) onto `state` (B, Hv, Dv, Dk), run the
    tokens, and return y (N, Hv, Dv) and the state after them."""
    if _use_metal(inputs):
        return gdn_advance_metal(inputs, state, rows, last)
    return gdn_advance_ops(inputs, state if last is None else gdn_flush(state, last), rows)


def gdn_flush(state: mx.array, last: Replay) -> mx.array:
    """Return the state after the accepted tokens of the last forward."""
    if on_kernel(last.tape.k.dtype, state.shape[-1], state.shape[-2]):
        return gdn_flush_metal(state, last)
    if gdn_at_once.takes(last.tape.k, state, last.rows.index):
        return gdn_at_once.replayed(state, last.tape, last.num_committed, last.rows.index)
    return gdn_flush_ops(state, last)


# ---- the twins


def gdn_round_ops(
    inputs: GdnInputs, state: mx.array, rows: RowLayout, last: Replay | None = None
) -> GdnRoundResult:
    """Return the result of `gdn_round`, computed in plain mx operations."""
    if last is not None:
        state = last.onto(state)
    ran = steps(*inputs, state, rows.index)
    return GdnRoundResult(ran.y, state, ran.tape)


def gdn_advance_ops(
    inputs: GdnInputs, state: mx.array, rows: RowLayout, last: Replay | None = None
) -> tuple[mx.array, mx.array]:
    """Return the result of `gdn_advance`, computed in plain mx operations."""
    if last is not None:
        state = last.onto(state)
    ran = steps(*inputs, state, rows.index)
    return ran.y, ran.after


def gdn_flush_ops(state: mx.array, last: Replay) -> mx.array:
    """Return the result of `gdn_flush`, computed in plain mx operations."""
    return last.onto(state)


# ---- the kernel


def gdn_round_metal(
    inputs: GdnInputs, state: mx.array, rows: RowLayout, last: Replay | None = None
) -> GdnRoundResult:
    """Return the result of `gdn_round`, computed by one launch of a Metal kernel, which reads and writes the state once."""
    y, after, delta = _launch(inputs, state, rows, last, advances=False)
    return GdnRoundResult(y, after, Tape(inputs.k, delta, inputs.log_g))


def gdn_advance_metal(
    inputs: GdnInputs, state: mx.array, rows: RowLayout, last: Replay | None = None
) -> tuple[mx.array, mx.array]:
    """Return the result of `gdn_advance`, computed by one launch of a Metal kernel, which reads and writes the state once and makes no
    tape."""
    y, after, _ = _launch(inputs, state, rows, last, advances=True)
    return y, after


def gdn_flush_metal(state: mx.array, last: Replay) -> mx.array:
    """Return the state after the accepted tokens of the last forward, as `gdn_flush` does, computed by one launch of a Metal kernel."""
    tape, none = last.tape, np.zeros(state.shape[0] + 1, np.int32)
    unread = GdnInputs(tape.k, tape.k, tape.delta, tape.log_g, tape.log_g)
    nothing = RowLayout(mx.array(none), None, 0)
    return _launch(unread, state, nothing, last, advances=True, flush=True)[1]


def _launch(
    inputs: GdnInputs,
    state: mx.array,
    rows: RowLayout,
    last: Replay | None,
    *,
    advances: bool,
    flush: bool = False,
) -> list[mx.array]:
    q, k, v, log_g, _ = inputs
    (num_tokens, key_heads, key_dim), (_, value_heads, value_dim) = q.shape, v.shape
    num_rows = state.shape[0]
    share, simdgroups = tile(num_tokens / num_rows, key_dim, value_dim)
    unread = rows.starts  # what stands in for an input that this mode does not read
    tape = last.tape if last else Tape(k, state, log_g)
    return _kernel(
        [
            *(*inputs, state, *tape, rows.starts),
            *((last.rows.starts, last.num_committed) if last else (unread, unread)),
            mx.array(np.asarray([num_tokens, k.shape[0]], np.int32)),
        ],
        outputs=[
            ((1,) if flush else v.shape, mx.float32),
            (state.shape, mx.float32),
            # as many as keys have room for, see conv_qkv
            ((1,) if advances else (k.shape[0], *v.shape[1:]), mx.float32),
        ],
        template={
            "T": q.dtype,
            "Hk": key_heads,
            "Hv": value_heads,
            "Dk": key_dim,
            "Dv": value_dim,
            "ADVANCES": int(advances),
            "REPLAY": int(last is not None),
            "FLUSH": int(flush),
            "ROWS": share,
        },
        grid=(32, value_dim // (4 * share), num_rows * value_heads),
        threadgroup=(32, simdgroups, 1),
    )


def tile(width: float, key_dim: int, value_dim: int) -> tuple[int, int]:
    """Return the number of state rows for each lane (at most 32 numbers in registers) and of simdgroups for each threadgroup.

    Every threadgroup of a head reads that head's keys again, so wide rounds use large threadgroups; narrow rounds use small ones, which
    are spread better over the cores. Neither changes a bit of the result.
    """
    share = max(1, min(4, 256 // key_dim))
    while value_dim % (4 * share):
        share //= 2
    in_head = value_dim // (4 * share)
    wanted = 4 if width <= 4 else 8 if width <= 16 else 16
    return share, max(n for n in range(1, wanted + 1) if in_head % n == 0)


@launch.self_check("gdn_round", of_models=True)
def _self_check(shape: GdnShape | None = None, dtype: mx.Dtype | None = None) -> launch.Check:
    """Compare the kernel with its twin and return the check. Run are two ragged rounds in every mode, the second after parts of the
    first are committed, and a wide round in the largest threadgroups."""
    small, wide = (GdnShape(2, 4, 128, 64), GdnShape(1, 1, 128, 128)) if shape is None else (shape, shape)
    dtypes = (mx.float32, mx.bfloat16) if dtype is None else (dtype,)
    found = [error for kind in dtypes for error in (_check_dtype(small, kind), _check_wide(wide, kind))]
    return launch.Check(error=max(found), limit=1e-5)


def _check_wide(shape: GdnShape, dtype: mx.Dtype) -> float:
    """Return the error of a wide round in the largest threadgroups: a device may have registers for small threadgroups of a kernel and
    not for large ones."""
    inputs, state, widths = drawn(shape, dtype, (18,))
    rows = RowLayout.of(widths)
    last = Replay(gdn_round_ops(inputs, state, rows).tape, rows, mx.array([17], mx.int32))
    ours, twin = gdn_round_metal(inputs, state, rows, last), gdn_round_ops(inputs, state, rows, last)
    return launch.largest_error([ours.y, ours.state, ours.tape.delta], [twin.y, twin.state, twin.tape.delta])


def _check_dtype(shape: GdnShape, dtype: mx.Dtype) -> float:
    """Return the error of ragged rounds in one dtype. Kernel and twin see the same inputs and compute in float32, so one limit serves
    every dtype."""
    (first, state, before), (second, _, after) = (drawn(shape, dtype, w) for w in ((3, 1, 5), (2, 4, 1)))
    rows = RowLayout.of(before), RowLayout.of(after)
    last = Replay(gdn_round_ops(first, state, rows[0]).tape, rows[0], mx.array([2, 0, 5], mx.int32))
    found = []
    for run, certain, flush in (
        (gdn_round_metal, gdn_advance_metal, gdn_flush_metal),
        (gdn_round_ops, gdn_advance_ops, gdn_flush_ops),
    ):
        y, base, tape = run(second, state, rows[1], last)
        found.append([y, base, tape.delta, *certain(second, state, rows[1], last), flush(state, last)])
    return launch.largest_error(*found)


def drawn(shape: GdnShape, dtype: mx.Dtype, widths: Sequence[int]) -> tuple[GdnInputs, mx.array, FlatRows]:
    """Return random tokens, states and rows for self-checks, the same for equal arguments."""
    rng, rows = np.random.default_rng(0), FlatRows(tuple(widths))

    def draw(*size: int) -> mx.array:
        return mx.array(rng.standard_normal(size, np.float32))

    n, heads = rows.num_tokens, shape.num_v_heads
    keys = (draw(n, shape.num_k_heads, shape.k_dim) for _ in range(2))
    q, k = ((x / mx.linalg.norm(x, axis=-1, keepdims=True)).astype(dtype) for x in keys)
    v = draw(n, heads, shape.v_dim).astype(dtype)
    inputs = GdnInputs(q, k, v, -mx.abs(draw(n, heads)), mx.sigmoid(draw(n, heads)))
    return inputs, draw(rows.num_rows, heads, shape.v_dim, shape.k_dim), rows
