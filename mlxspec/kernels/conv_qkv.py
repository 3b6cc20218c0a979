"""Convolution, norms and gates of a Gated DeltaNet layer: from its projection to the inputs of its recurrence.

`conv_qkv` picks the Metal kernel (one launch) or the plain-mx twin. The cache makes sure that num_committed
(the kernel's `kept`) fits the last forward.
The projection's columns are q | k | v | z | b | a; C = 2 Hk Dk + Hv Dv stand before z.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxspec.kernels import launch
from mlxspec.kernels.conv_ops import (
    GdnInputs,
    GdnShape,
    conv_qkv_ops,
    conv_window,
    joined_inputs,
    window_after,
)
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_round import RowLayout, supports

_kernel = launch.MetalKernel(
    "conv_qkv",
    inputs=[
        "projected",
        "window",
        "last_inputs",
        "weight",
        "neg_a",
        "dt_bias",
        "starts",
        "last_starts",
        "kept",
        "span",
    ],
    outputs=["q", "k", "v", "log_g", "beta", "window_out", "inputs_out"],
)
_NUM_TAPS = 4
_SEGMENT = 16  # tokens a simdgroup takes; at most 32, a lane each for the gates


@dataclass(frozen=True)
class ConvWeights:
    """The weights of a Gated DeltaNet layer's convolution and gates: weight (4, C); neg_a = -exp(A_log) and dt_bias (Hv,) float32; taps:
    the rows of weight, (1, C) each, cut at every call where None."""

    weight: mx.array
    neg_a: mx.array
    dt_bias: mx.array
    taps: Sequence[mx.array] | None = None


class Convolved(NamedTuple):
    """The result of `conv_qkv`. inputs: of the recurrence. window (B, 3, C): the convolution inputs before these tokens, or after them
    where they are certain. conv_inputs (M, C or more columns, M >= N): what a later forward needs to roll back to any of these
    tokens; None for certain tokens."""

    inputs: GdnInputs
    window: mx.array
    conv_inputs: mx.array | None


@dataclass(frozen=True)
class LastInputs:
    """The last forward's `Convolved.conv_inputs`, its rows, and the number of committed tokens of each row, num_committed (B,) int32."""

    inputs: mx.array
    rows: RowLayout
    num_committed: mx.array


def on_kernel(dtype: mx.Dtype, shape: GdnShape, num_taps: int) -> bool:
    """Return whether `conv_qkv` launches the Metal kernel for this dtype, shape and number of taps."""
    return num_taps == _NUM_TAPS and supports(dtype, shape.k_dim, shape.v_dim) and launch.in_use("conv_qkv")


def conv_qkv(
    projected: mx.array,
    window: mx.array,
    weights: ConvWeights,
    shape: GdnShape,
    rows: RowLayout,
    last: LastInputs | None = None,
    *,
    certain: bool = False,
    room: int | None = None,
) -> Convolved:
    """Convolve the projections and return the recurrence's inputs. projected (N, C + Hv Dv + 2 Hv) and window (B, 3, C) have one dtype.
    last None: the window holds the inputs right before these tokens.

    certain: all of these tokens are certain to be committed. room: number of tokens, at least N, for which the kernel makes conv_inputs,
    k and log_g, with zeros after the last token, so that later forwards meet few shapes. The twin makes them for N tokens.
    """
    run = conv_qkv_metal if on_kernel(projected.dtype, shape, window.shape[1] + 1) else conv_qkv_twin
    return run(projected, window, weights, shape, rows, last, certain=certain, room=room)


def conv_qkv_twin(
    projected: mx.array,
    window: mx.array,
    weights: ConvWeights,
    shape: GdnShape,
    rows: RowLayout,
    last: LastInputs | None = None,
    *,
    certain: bool = False,
    room: int | None = None,
) -> Convolved:
    """Compute what `conv_qkv` does in plain mx operations."""
    qkv, _, b, a = columns(projected, shape)
    if last is not None:
        window = conv_window(window, last.inputs[:, : shape.conv_size], last.num_committed, last.rows.starts)
    taps = mx.split(weights.weight, len(weights.weight)) if weights.taps is None else weights.taps
    joined = joined_inputs(window, qkv, rows.index)
    inputs = conv_qkv_ops(joined, b, a, taps, weights.neg_a, weights.dt_bias, shape, rows.index)
    if certain:
        return Convolved(inputs, window_after(joined, window.shape, rows.starts, rows.index), None)
    return Convolved(inputs, window, projected)


def columns(projected: mx.array, shape: GdnShape) -> list[mx.array]:
    """Split projected (N, C + Hv Dv + 2 Hv or more) into the convolution's inputs (N, C), z (N, Hv Dv), b and a (N, Hv)."""
    size, heads = shape.conv_size, shape.num_v_heads
    ends = np.cumsum([size, heads * shape.v_dim, heads, heads]).tolist()
    return mx.split(projected, ends, axis=-1)[:4]


def conv_qkv_metal(
    projected: mx.array,
    window: mx.array,
    weights: ConvWeights,
    shape: GdnShape,
    rows: RowLayout,
    last: LastInputs | None = None,
    *,
    certain: bool = False,
    room: int | None = None,
) -> Convolved:
    """Compute what `conv_qkv` does with the Metal kernel."""
    num_tokens, stride = projected.shape
    num_rows, dtype = window.shape[0], projected.dtype
    units = 2 * shape.num_k_heads + shape.num_v_heads
    room = num_tokens if certain else max(num_tokens, room or 0)
    keys, values = (shape.num_k_heads, shape.k_dim), (num_tokens, shape.num_v_heads, shape.v_dim)
    last_inputs, last_starts, num_committed = (
        (last.inputs, last.rows.starts, last.num_committed) if last else (projected, rows.starts, rows.starts)
    )
    *inputs, window, conv_inputs = _kernel(
        [
            projected,
            window,
            last_inputs,
            weights.weight,
            weights.neg_a,
            weights.dt_bias,
            rows.starts,
            last_starts,
            num_committed,
            mx.array(np.asarray([num_tokens, room], np.int32)),
        ],
        outputs=[
            ((num_tokens, *keys), dtype),
            ((room, *keys), dtype),
            (values, dtype),
            ((room, shape.num_v_heads), mx.float32),
            (values[:2], mx.float32),
            (window.shape, dtype),
            ((1, 1) if certain else (room, shape.conv_size), dtype),
        ],
        template={
            "T": dtype,
            "Hk": shape.num_k_heads,
            "Hv": shape.num_v_heads,
            "Dk": shape.k_dim,
            "Dv": shape.v_dim,
            "STRIDE": stride,
            "LAST_STRIDE": last_inputs.shape[1] if last else shape.conv_size,
            "SEGMENT": _SEGMENT,
            "REPLAY": int(last is not None),
            "FACTS": int(certain),
        },
        grid=(32 * num_segments(rows.widest), units, num_rows),
        threadgroup=(32, min(4, units), 1),
    )
    return Convolved(GdnInputs(*inputs), window, None if certain else conv_inputs)


def num_segments(widest: int) -> int:
    """Return the number of simdgroups among which a head's tokens of one row are divided. widest: tokens of the longest row."""
    return -(-widest // _SEGMENT)


_EXAMPLE = GdnShape(2, 4, 64, 32)


@launch.self_check("conv_qkv", of_models=True)
def _self_check(shape: GdnShape = _EXAMPLE, _: mx.Dtype = mx.float32) -> launch.Check:
    """Compare the kernel with its plain twin on rows of different lengths, and return the largest error. Three cases are run: tokens to be
    verified, and certain tokens, both after a forward of which each row has committed a different part; and certain tokens without an
    earlier forward. The check runs in float32 whatever the model's dtype, because the twin rounds between operations."""
    rng, heads = np.random.default_rng(0), shape.num_v_heads
    rows = [RowLayout.of(FlatRows(widths)) for widths in ((3, 1, 20), (2, 4, 1))]

    def draw(*size: int) -> mx.array:
        return mx.array(rng.standard_normal(size, np.float32))

    columns = shape.conv_size + heads * shape.v_dim + 2 * heads
    weights = ConvWeights(draw(4, shape.conv_size), -mx.abs(draw(heads)), draw(heads))
    window, last = (
        draw(3, 3, shape.conv_size),
        LastInputs(draw(24, columns), rows[0], mx.array([2, 0, 20], mx.int32)),
    )
    projected, found = draw(7, columns), []
    for run in (conv_qkv_metal, conv_qkv_twin):
        outputs: list[mx.array] = []
        for certain, kept in ((False, last), (True, last), (True, None)):
            inputs, after, again = run(projected, window, weights, shape, rows[1], kept, certain=certain)
            outputs += [*inputs, after, *(() if again is None else (again[:, : shape.conv_size],))]
        found.append(outputs)
    return launch.Check(error=launch.largest_error(*found), limit=1e-5)
