"""The common parts of vision towers: activations, attention of all patches to all patches, rotary angles of a grid.

Knows arrays; knows no checkpoint names.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxspec.kernels.attention import FUSED_MANY
from mlxspec.models.config_values import Keys, Values
from mlxspec.models.layers import rotate, swapped
from mlxspec.platform import device

_SCORES_AT_MOST = 256 << 20  # bytes, where scores are written to memory


@partial(mx.compile, shapeless=True)
def gelu_tanh(x: mx.array) -> mx.array:
    """Return GELU of x in its tanh form, computed in float32."""
    y = x.astype(mx.float32)
    inner = math.sqrt(2 / math.pi) * (y + 0.044715 * y * y * y)
    return (0.5 * y * (1 + mx.tanh(inner))).astype(x.dtype)


@partial(mx.compile, shapeless=True)
def gelu_erf(x: mx.array) -> mx.array:
    """Return GELU of x in its exact form, computed in float32."""
    y = x.astype(mx.float32)
    return (0.5 * y * (1 + mx.erf(y * math.sqrt(0.5)))).astype(x.dtype)


def layer_norm(x: mx.array, norm: nn.LayerNorm) -> mx.array:
    return mx.fast.layer_norm(x, norm.weight, norm.bias, norm.eps)


def attend(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """Attend without a mask, and return the output (N, heads * D). q (N, heads, D); k, v (N, kv heads, D).

    On Metal, heads are padded with zeros to the next size that its fused kernel supports, which changes no score and no sum. Where there is
    no fused kernel, queries are processed in parts, so that their scores take at most 256 MiB.
    """
    num, heads, dim = q.shape
    is_fused = device.backend() == "metal" and dim <= FUSED_MANY[-1]
    if is_fused:
        wide = next(size for size in FUSED_MANY if size >= dim)
        q, k, v = (mx.pad(x, [(0, 0), (0, 0), (0, wide - dim)]) for x in (q, k, v))
    q, k, v = (x.transpose(1, 0, 2)[None] for x in (q, k, v))
    part = num if is_fused else max(1, _SCORES_AT_MOST // (heads * num * q.itemsize))
    outs = [
        mx.fast.scaled_dot_product_attention(q[:, :, start : start + part], k, v, scale=scale)
        for start in range(0, num, part)
    ]
    out = outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=2)
    return out[0].transpose(1, 0, 2)[..., :dim].reshape(num, heads * dim)


def layer_bytes(num: int, sizes: Any, itemsize: int) -> int:
    """Return an upper bound of the bytes that one layer over `num` patches takes while it runs. sizes: the tower's config. itemsize: bytes
    of one of the tower's numbers; queries and keys are rotated in float32."""
    size, heads, dim = sizes.hidden_size, sizes.num_heads, sizes.head_dim
    inner = max(sizes.intermediate_size, size)
    is_fused = device.backend() == "metal" and dim <= FUSED_MANY[-1]
    wide = heads * (next(n for n in FUSED_MANY if n >= dim) if is_fused else dim)
    attending = itemsize * (3 * size + 10 * wide) + 6 * 4 * wide
    feeding = itemsize * (3 * size + 4 * inner) + 2 * 4 * inner
    scores = (
        0 if is_fused else 3 * max(heads * num * itemsize, min(_SCORES_AT_MOST, heads * num * num * itemsize))
    )
    return num * max(attending, feeding) + scores


def turns(angles: np.ndarray) -> tuple[mx.array, mx.array]:
    """Return cosines and sines (N, ..., D) float32, as `rotate` takes them, of angles (N, ..., D / 2) in radians."""
    cos, sin = np.cos(angles), np.sin(angles)
    return mx.array(np.concatenate([cos, cos], -1)), mx.array(np.concatenate([-sin, sin], -1))


def turned(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Return x with its pairs rotated, computed in float32 and in x's dtype. Number i of the last axis is paired with number i + D / 2."""
    y = x.astype(mx.float32)
    return rotate(y, swapped(y), cos, sin).astype(x.dtype)


def axial(vision: Values) -> Values:
    """Return the rotary settings of a `vision_config`. Raises ModelError where their kind is not supported."""
    return vision.part("rope_parameters", Keys(only={"rope_type": ("axial", "default")}))


def axial_frequencies(dim: int, theta: float) -> np.ndarray:
    """Return the frequencies (dim / 4,) float32, in radians for each patch. Each of the two axes rotates half of a head's `dim` numbers."""
    half = dim // 2
    return (1.0 / theta ** (np.arange(0, half, 2, dtype=np.float32) / half)).astype(np.float32)


def block_order(rows: int, columns: int, merge: int) -> np.ndarray:
    """Return the order (rows * columns,) int of patches in which those of each block of merge x merge follow each other. Patches are
    numbered row by row."""
    grid = np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
    return grid.transpose(0, 2, 1, 3).ravel()
