"""What stands between a Gated DeltaNet layer's projection and its recurrence, in plain mx: the twin of the `conv_qkv` kernel.

Causal depthwise convolution from the kept window, SiLU, split into q, k, v, L2 norm of q and k, decay and step size.
Knows nothing of layers or commits; the caller says how many inputs of the last forward are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxspec.kernels.activations import silu
from mlxspec.kernels.flat import RaggedIndex, pad_rows, unpad_rows

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
    """q (scaled by Dk^-1/2), k (N, Hk, Dk) and v (N, Hv, Dv) in the compute dtype; log_g, beta (N, Hv) float32."""

    q: mx.array
    k: mx.array
    v: mx.array
    log_g: mx.array
    beta: mx.array


def conv_window(window: mx.array, inputs: mx.array, kept: mx.array, index: RaggedIndex | None) -> mx.array:
    """The K - 1 convolution inputs that stand before the next token: (B, K - 1, C), rows kept..kept + K - 2 of [window | inputs].

    window (B, K - 1, C); inputs (M, C) flat, of the last forward; kept (B,) int32.
    """
    return _pick(joined_inputs(window, inputs, index), kept, window.shape[1])


def joined_inputs(window: mx.array, inputs: mx.array, index: RaggedIndex | None) -> mx.array:
    """Each row's window (B, K - 1, C) and behind it its inputs, of (N, C) flat: (B, K - 1 + W, C)."""
    return mx.concatenate([window, pad_rows(inputs, window.shape[0], index)], axis=1)


def window_after(joined: mx.array, count: int, starts: mx.array, index: RaggedIndex | None) -> mx.array:
    """The window (B, count, C) when all inputs stand; joined as from `joined_inputs`, starts (B + 1,) int32."""
    if index is not None:
        return _pick(joined, starts[1:] - starts[:-1], count)
    width = joined.shape[1] - count
    window = joined[:, width:]
    # a copy where the view would keep a whole prompt alive
    return window if width < count else mx.contiguous(window)


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
    """joined (B, K - 1 + W, C) as from `joined_inputs`; b and a (N, Hv); taps K of (1, C); neg_a = -exp(A_log), dt_bias (Hv,)."""
    num_tokens, num_heads = a.shape[0], shape.num_k_heads
    mixed = _conv_silu(joined, taps)
    if index is not None:
        mixed = unpad_rows(mixed, index)
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


def _conv_silu(joined: mx.array, taps: Sequence[mx.array]) -> mx.array:
    """joined (B, K - 1 + W, C) -> (B, W, C)"""
    width = joined.shape[1] - len(taps) + 1
    if width == 1:
        seen = mx.split(joined, len(taps), axis=1)
    else:
        seen = [joined[:, i : i + width] for i in range(len(taps))]
    total = seen[0] * taps[0]
    for inputs, tap in zip(seen[1:], taps[1:], strict=True):
        total = total + inputs * tap
    return silu(total)


def _pick(joined: mx.array, first: mx.array, count: int) -> mx.array:
    """Rows first[b]..first[b] + count - 1 of joined (B, L, C)."""
    num_rows, length, size = joined.shape
    if num_rows == 1:
        return mx.slice(joined, first, (1,), (1, count, size))
    offsets = np.arange(num_rows)[:, None] * length + np.arange(count)
    where = first[:, None] + mx.array(offsets.astype(np.int32))
    return joined.reshape(num_rows * length, size)[where]
