"""What stands between a Gated DeltaNet layer's projection and its recurrence, in plain mx: the twin of the `conv_qkv` kernel.

Causal depthwise convolution from the kept window, SiLU, split into q, k, v, L2 norm of q and k, decay and step size.
Knows nothing of layers or commits; the caller says how many inputs of the last forward are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

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
    return _pick(
        mx.concatenate([window, pad_rows(inputs, window.shape[0], index)], axis=1), kept, window.shape[1]
    )


def window_after(window: mx.array, inputs: mx.array, starts: mx.array, index: RaggedIndex | None) -> mx.array:
    """The window when all inputs (N, C) stand; starts (B + 1,) int32."""
    if index is not None:
        return conv_window(window, inputs, starts[1:] - starts[:-1], index)
    num_rows, count, size = window.shape
    inputs = inputs.reshape(num_rows, -1, size)
    width = inputs.shape[1]
    if width < count:
        return mx.concatenate([window[:, width:], inputs], axis=1)
    return mx.contiguous(inputs[:, width - count :])  # a copy: the view would keep a whole prompt alive


def conv_qkv_ops(
    qkv: mx.array,
    b: mx.array,
    a: mx.array,
    window: mx.array,
    weight: mx.array,
    neg_a: mx.array,
    dt_bias: mx.array,
    shape: GdnShape,
    index: RaggedIndex | None,
) -> GdnInputs:
    """qkv (N, C), b and a (N, Hv); window (B, K - 1, C) before the first token; weight (K, C); neg_a = -exp(A_log), dt_bias (Hv,)."""
    num_tokens, num_rows = qkv.shape[0], window.shape[0]
    joined = mx.concatenate([window, pad_rows(qkv, num_rows, index)], axis=1)
    mixed = unpad_rows(_conv_silu(joined, weight), index)
    split = 2 * shape.key_size
    qk, v = mx.split(mixed, [split], axis=-1)
    qk = mx.fast.rms_norm(
        qk.reshape(num_tokens, 2, shape.num_k_heads, shape.k_dim), None, _L2_EPS / shape.k_dim
    )
    q, k = mx.split(qk.reshape(num_tokens, 2 * shape.num_k_heads, shape.k_dim), 2, axis=1)
    scale = shape.k_dim**-0.5
    return GdnInputs(
        q * (scale * scale),
        k * scale,
        v.reshape(num_tokens, shape.num_v_heads, shape.v_dim),
        neg_a * nn.softplus(a.astype(mx.float32) + dt_bias),
        mx.sigmoid(b.astype(mx.float32)),
    )


def _conv_silu(joined: mx.array, weight: mx.array) -> mx.array:
    """joined (B, K - 1 + W, C) -> (B, W, C)"""
    taps = mx.split(weight, weight.shape[0])  # (1, C) each
    width = joined.shape[1] - len(taps) + 1
    total = joined[:, :width] * taps[0]
    for i in range(1, len(taps)):
        total = total + joined[:, i : i + width] * taps[i]
    return silu(total)


def _pick(joined: mx.array, first: mx.array, count: int) -> mx.array:
    """Rows first[b]..first[b] + count - 1 of joined (B, L, C)."""
    num_rows, length, size = joined.shape
    where = (first + mx.arange(num_rows) * length)[:, None] + mx.arange(count)
    return joined.reshape(num_rows * length, size)[where]
