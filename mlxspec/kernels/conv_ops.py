"""Convolution, norms and gates of a Gated DeltaNet layer in plain MLX: the twin of the `conv_qkv` kernel.

Causal depthwise convolution from the kept window, SiLU, split into q, k, v, L2 norm of q and k, decay and step size.
The caller says how many inputs of the last forward are committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxspec.kernels.activations import silu
from mlxspec.kernels.flat import RaggedIndex

_L2_EPS = 1e-6  # on the sum of squares, as in the reference


class GdnShape(NamedTuple):
    """Heads and sizes of one Gated DeltaNet layer; hashable, so that it can key a kernel."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int

    @property
    def key_size(self) -> int:
        return self.num_k_heads * self.k_dim

    @property
    def conv_size(self) -> int:
        return 2 * self.key_size + self.num_v_heads * self.v_dim


class GdnInputs(NamedTuple):
    """The inputs of a Gated DeltaNet recurrence: q (scaled by Dk^-1/2) and k (N, Hk, Dk), v (N, Hv, Dv) in the compute dtype; log_g and
    beta (N, Hv) float32."""

    q: mx.array
    k: mx.array
    v: mx.array
    log_g: mx.array
    beta: mx.array


def conv_window(window: mx.array, inputs: mx.array, num_committed: mx.array, starts: mx.array) -> mx.array:
    """Return the K - 1 convolution inputs before the next token of each row, (B, K - 1, C): of the row's window and the inputs after it,
    those from number num_committed on.

    window (B, K - 1, C); inputs (M, C) flat, of the last forward; num_committed (B,) int32; starts (B + 1,) int32.
    """
    num_rows, count, size = window.shape
    if num_rows == 1:
        # `num_committed` has the 4 bytes of which cache/places.py says why
        return mx.slice(joined_inputs(window, inputs, None), num_committed, (1,), (1, count, size))
    column, owner = np.arange(count, dtype=np.int32), np.arange(num_rows, dtype=np.int32)[:, None]
    behind = column + (num_rows - 1) * count
    found = _find(num_committed, starts, *map(mx.array, (column, owner, behind)))
    return _end_to_end(window, inputs)[found]


@mx.compile
def _find(
    num_committed: mx.array, starts: mx.array, column: mx.array, owner: mx.array, behind: mx.array
) -> mx.array:
    """Return (B, K - 1) int32: the indices in `_end_to_end` of the inputs that `conv_window` returns. column (K - 1,) and owner (B, 1)
    int32: numbers of columns and rows. behind (K - 1,) int32: indices of the inputs of a row that begins at 0, less its window."""
    first = num_committed[:, None]
    return _number(column.shape[0], owner, first + column, starts[:-1, None] + first + behind)


def joined_inputs(window: mx.array, inputs: mx.array, index: RaggedIndex | None) -> mx.array:
    """Concatenate each row's window (B, K - 1, C) and its inputs from the flat (N, C), and return (B, K - 1 + W, C). For ragged rows,
    return all windows followed by all inputs: (B (K - 1) + N, C)."""
    if index is not None:
        return _end_to_end(window, inputs)
    return mx.concatenate([window, inputs.reshape(window.shape[0], -1, inputs.shape[1])], axis=1)


def window_after(
    joined: mx.array, shape: tuple[int, ...], starts: mx.array, index: RaggedIndex | None
) -> mx.array:
    """Return the window, of `shape` (B, K - 1, C), once all inputs are committed. joined: from `joined_inputs`; starts (B + 1,) int32."""
    num_rows, count, _ = shape
    if index is not None:
        head = num_rows * count
        widths = starts[1:] - starts[:-1]
        return conv_window(joined[:head].reshape(shape), joined[head:], widths, starts)
    width = joined.shape[1] - count
    window = joined[:, width:]
    # a copy where the view would keep a whole prompt alive
    return window if width < count else mx.contiguous(window)


def _end_to_end(window: mx.array, inputs: mx.array) -> mx.array:
    return mx.concatenate([window.reshape(-1, window.shape[2]), inputs])


def _number(count: int, owner: mx.array, place: mx.array, behind: mx.array) -> mx.array:
    """Return the index in `_end_to_end` of the entry at `place` of row `owner`, where each row has a window of `count` entries before
    its inputs. behind: the index if the entry is an input. The number of rows is an argument and no constant: as a constant it would
    be part of the code that MLX compiles for a CPU, and each number of rows would wait for g++."""
    return mx.where(place < count, owner * count + place, behind)


def conv_qkv_ops(
    joined: mx.array,
    b: mx.array,
    a: mx.array,
    taps: Sequence[mx.array],
    neg_a: mx.array,
    dt_bias: mx.array,
    shape: GdnShape,
    index: RaggedIndex | None,
) -> GdnInputs:
    """Apply the causal convolution and the gates, and return the recurrence's inputs. joined: from `joined_inputs`; b and a (N, Hv);
    taps: K arrays (1, C); neg_a = -exp(A_log) and dt_bias (Hv,)."""
    num_tokens, num_heads = a.shape[0], shape.num_k_heads
    seen = _seen(joined, len(taps)) if index is None else _seen_ragged(joined, len(taps), index)
    total = seen[0] * taps[0]
    for inputs, tap in zip(seen[1:], taps[1:], strict=True):
        total = total + inputs * tap
    mixed = silu(total)
    qk, v = mx.split(mixed, [2 * shape.key_size], axis=-1)
    qk = mx.fast.rms_norm(qk.reshape(num_tokens, 2 * num_heads, shape.k_dim), None, _L2_EPS / shape.k_dim)
    scale = shape.k_dim**-0.5
    scales = np.repeat(np.asarray([scale * scale, scale], np.float32), num_heads)[:, None]
    q, k = mx.split(qk * mx.array(scales).astype(qk.dtype), 2, axis=1)
    return GdnInputs(
        q,
        k,
        v.reshape(num_tokens, shape.num_v_heads, shape.v_dim),
        neg_a * nn.softplus(a.astype(mx.float32) + dt_bias),
        mx.sigmoid(b.astype(mx.float32)),
    )


def _seen(joined: mx.array, num_taps: int) -> list[mx.array]:
    """Return the inputs that each tap is multiplied with, K arrays (B, W, C), from joined (B, K - 1 + W, C)."""
    width = joined.shape[1] - num_taps + 1
    if width == 1:
        return mx.split(joined, num_taps, axis=1)
    return [joined[:, i : i + width] for i in range(num_taps)]


def _seen_ragged(joined: mx.array, num_taps: int, index: RaggedIndex) -> list[mx.array]:
    """Return the inputs that each tap is multiplied with, K arrays (1, N, C), from the joined inputs (B (K - 1) + N, C) of ragged rows."""
    num_rows, num_tokens = index.tokens.shape[0], index.owners.shape[0]
    tap = np.arange(num_taps, dtype=np.int32)[:, None]
    behind = np.arange(num_tokens, dtype=np.int32) + tap + (num_rows - 1) * (num_taps - 1)
    where = _number(num_taps - 1, index.owners, index.places + mx.array(tap), mx.array(behind))
    return mx.split(joined[where], num_taps)
