"""Data for kv_attend and the comparisons that must hold; used by its tests and by the planted faults."""

from __future__ import annotations

from unittest import mock

import mlx.core as mx
import numpy as np
from checks_gdn import numpy_of

from mlxspec.kernels import kv_attend as kernel
from mlxspec.kernels.quantized_kv import QuantizedTokens

# Of float32 sums of up to 256 and a few thousand terms; 16-bit results are rounded once more, from float32.
ROUNDING = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 6e-3}


def draw(
    width: int,
    length: int,
    *,
    heads: int = 4,
    kv: int = 2,
    dim: int = 64,
    bits: int = 8,
    dtype: mx.Dtype = mx.float32,
    room: int = 5,
    seed: int = 0,
) -> tuple[mx.array, QuantizedTokens, QuantizedTokens]:
    """Queries (1, heads, width, dim) of which each sees some keys far better than others, so that a wrong place shows; behind the row's
    tokens the buffers hold `room` others, of numbers that would be seen first if they were looked at."""
    rng = np.random.default_rng(seed)
    q = mx.array(3 * rng.standard_normal((1, heads, width, dim)).astype(np.float32)).astype(dtype)
    packed = []
    for _ in range(2):
        x = rng.standard_normal((1, kv, length + room, dim)).astype(np.float32)
        x[:, :, length:] *= 100
        packed.append(QuantizedTokens.of(mx.array(x).astype(dtype), bits).first(length))
    return q, packed[0], packed[1]


def numbers_of(tokens: QuantizedTokens) -> np.ndarray:
    """(Hkv, length, D) in float64, from codes, scales and biases, without MLX's unpacking."""
    codes = np.array(tokens.codes)[0, :, : tokens.length].view(np.uint8)
    if tokens.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1)
    scales, biases = (
        numpy_of(x)[0, :, : tokens.length, :, None].astype(np.float64) for x in (tokens.scales, tokens.biases)
    )
    codes = codes.reshape(*scales.shape[:3], 64)
    return (codes * scales + biases).reshape(*scales.shape[:2], -1)


def exact(
    q: mx.array, keys: QuantizedTokens, values: QuantizedTokens, scale: float, ends: np.ndarray
) -> np.ndarray:
    """(Hq, w, D) in float64; query i of each head sees the first ends[i] tokens."""
    q = numpy_of(q if scale == 1.0 else q * scale)[0].astype(np.float64)
    groups = q.shape[0] // keys.shape[1]
    k, v = (np.repeat(numbers_of(x), groups, axis=0) for x in (keys, values))
    sees = np.arange(keys.length)[None] < ends[:, None]
    scores = np.where(sees, q @ k.swapaxes(-1, -2), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def check_attention(
    width: int, length: int, *, scale: float = 0.125, ends: np.ndarray | None = None, **how
) -> mx.array:
    """Against float64; without ends each query sees what is before it, the last one everything."""
    q, keys, values = draw(width, length, **how)
    given = None if ends is None else mx.array(ends.astype(np.int32))
    got = kernel.kv_attend_metal(q, keys, values, scale, given)
    seen = np.arange(length - width + 1, length + 1) if ends is None else ends
    wanted = exact(q, keys, values, scale, seen)
    assert got.dtype == q.dtype
    found = numpy_of(got)[0].astype(np.float64)
    assert np.isfinite(found).all(), "not a number"
    off = np.abs(found - wanted).max() / np.abs(wanted).max()
    assert off <= ROUNDING[q.dtype], f"off by {off:.1e} of the largest number"
    return got


def check_far(parts: int) -> None:
    """Scores so far apart, and the largest so late, that an exponential against any but the largest overflows."""
    q, keys, values = draw(2, 200, heads=2, kv=1)
    late = np.linspace(0.0, 1.0, 205, dtype=np.float32)[None, None, :, None]
    keys = QuantizedTokens.of(mx.array(late * np.ones((1, 1, 205, 64), np.float32)), 8).first(200)
    q = mx.abs(q) * 20
    with mock.patch.object(kernel, "num_parts", return_value=parts):
        got = numpy_of(kernel.kv_attend_metal(q, keys, values, 1.0))[0]
    wanted = exact(q, keys, values, 1.0, np.array([199, 200]))
    assert np.isfinite(got).all(), "not a number"
    assert np.abs(got - wanted).max() <= 2e-3 * np.abs(wanted).max()
