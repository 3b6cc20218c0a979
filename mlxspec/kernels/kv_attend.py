"""Attention of few queries of one row to keys and values in 8 or 4 bits, each read once for all queries that share it.

The twin is two of MLX's products with quantized matrices around a softmax. The kernel (two launches: parts of the row, then their sum) is
used where it was raced and won. A verify of w tokens has w times as many queries as a plain step for the same keys and values, so what is
read hardly grows with w. Up to 64 queries of a key head are read for at once; more are taken in tiles of 64.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np

from mlxspec.kernels import launch
from mlxspec.kernels.quantized_kv import KV_BITS, QuantizedTokens, products, sums, token_bytes
from mlxspec.platform.host import numbers

NAME = "kv_attend"
DIMS = (64, 128, 256)
_ROWS = (8, 16, 32, 64)  # queries of a key head that a threadgroup may take
_LONGEST = 16384  # tokens behind which a race is run
# Parts of a row, each a threadgroup for each key head: so many that what they read and write besides keys and values is one part in so many
# of those, or, in shorter rows, _BUSY threadgroups if each has _PART tokens at least.
_BESIDE, _BUSY, _PART = 25, 24, 1024

_attend = launch.MetalKernel(
    NAME,
    inputs=[
        "q",
        "key_codes",
        "key_scales",
        "key_biases",
        "value_codes",
        "value_scales",
        "value_biases",
        "ends",
    ],
    outputs=["best", "total", "sums"],
)
_join = launch.MetalKernel("kv_join", inputs=["best", "total", "sums"], outputs=["out"])


def is_ours(queries: mx.array, keys: QuantizedTokens) -> bool:
    """Return whether the kernel attends for these queries and keys."""
    if not _supports(queries, keys):
        return False
    return launch.wins(NAME, _race_key(queries, keys)) and launch.in_use(NAME)


def _supports(queries: mx.array, keys: QuantizedTokens) -> bool:
    _, num_kv, _, dim = keys.shape
    is_known = dim in DIMS and keys.bits in KV_BITS and queries.dtype in launch.FLOATS
    return is_known and queries.dtype == keys.scales.dtype and queries.shape[1] % num_kv == 0


def kv_attend_ops(
    queries: mx.array,
    keys: QuantizedTokens,
    values: QuantizedTokens,
    scale: float,
    mask: mx.array | None = None,
) -> mx.array:
    """Return attention (1, Hq, w, D) in MLX's own operations, with the queries of all heads that share keys as rows of one product.
    queries (1, Hq, w, D); keys and values of L tokens. mask (w, L) bool: the keys that each query sees; None: all up to its own, the
    queries being the last tokens."""
    _, num_heads, width, dim = queries.shape
    num_kv, length = keys.shape[1:3]
    scores = products((queries * scale).reshape(1, num_kv, -1, dim), keys)
    if mask is None and width > 1:
        mask = mx.arange(length)[None] <= mx.arange(length - width, length)[:, None]
    if mask is not None:
        apart = scores.reshape(1, num_kv, -1, width, length)
        scores = mx.where(mask, apart, mx.finfo(scores.dtype).min).reshape(scores.shape)
    weights = mx.softmax(scores, axis=-1, precise=True)
    return sums(weights, values).reshape(1, num_heads, width, dim)


def kv_attend_metal(
    queries: mx.array,
    keys: QuantizedTokens,
    values: QuantizedTokens,
    scale: float,
    ends: mx.array | None = None,
) -> mx.array:
    """Return attention as `kv_attend_ops` does, with the kernel in two launches. ends (w,) int32, ascending and at least 1: the number
    of first tokens that each query sees; None: all up to its own."""
    _, num_heads, width, dim = queries.shape
    num_kv, length = keys.shape[1:3]
    num_rows = num_heads // num_kv * width
    if ends is None:
        ends = mx.array(np.arange(length - width + 1, length + 1, dtype=np.int32))
    q = (queries if scale == 1.0 else queries * scale).reshape(num_kv, num_rows, dim)
    tile = next((n for n in _ROWS if n >= num_rows), _ROWS[-1])
    parts, tiles = num_parts(num_rows, num_kv, length, keys), -(-num_rows // tile)
    simdgroups = dim // 32 * (2 if tile > 32 else 1)
    packed = [x for of in (keys, values) for x in (of.codes, of.scales, of.biases)]
    found = _attend(
        [q, *packed, ends],
        outputs=[
            ((num_kv, parts, num_rows), mx.float32),
            ((num_kv, parts, num_rows), mx.float32),
            ((num_kv, parts, num_rows, dim), mx.float32),
        ],
        template={"T": queries.dtype, "D": dim, "BITS": keys.bits, "ROWS": tile},
        grid=(32 * num_kv, simdgroups, parts * tiles),
        threadgroup=(32, simdgroups, 1),
    )
    (out,) = _join(
        found,
        outputs=[((num_kv, num_rows, dim), queries.dtype)],
        template={"T": queries.dtype, "D": dim},
        grid=(dim, num_rows, num_kv),
        threadgroup=(dim, 1, 1),
    )
    return out.reshape(1, num_heads, width, dim)


def num_parts(num_rows: int, num_kv: int, length: int, keys: QuantizedTokens) -> int:
    """Return the number of parts into which a row's tokens are divided, for num_rows queries of each key head."""
    dim, dtype = keys.shape[3], keys.scales.dtype
    beside = num_rows * (dim * dtype.size + 2 * 4 * (dim + 2))
    of_token = 2 * token_bytes(dim, dtype, keys.bits)
    least = max(_PART, -(-_BESIDE * beside // of_token))  # tokens
    return max(1, length // least, min(length // _PART, -(-_BUSY // num_kv)))


# ---- races and the self-check


def tune(num_heads: int, num_kv: int, dim: int, dtype: mx.Dtype, bits: int) -> dict[str, float]:
    """Race the kernel against MLX's own operations for 1 to 17 queries after 16,384 tokens. Returns, by the race's name, MLX's time
    divided by the kernel's; empty where the kernel is not in use."""
    found: dict[str, float] = {}
    if dim not in DIMS or not launch.in_use(NAME):
        return found
    keys, values = (
        QuantizedTokens.of(mx.random.normal((1, num_kv, _LONGEST, dim)).astype(dtype), bits) for _ in range(2)
    )
    for width in (1, 2, 4, 8, 17):
        queries = mx.random.normal((1, num_heads, width, dim)).astype(dtype)
        key = _race_key(queries, keys)
        if key not in found and _supports(queries, keys):
            given = queries, keys, values, 1.0
            found[key] = launch.race(
                NAME, key, partial(kv_attend_metal, *given), partial(kv_attend_ops, *given)
            )
    return found


def _race_key(queries: mx.array, keys: QuantizedTokens) -> str:
    _, num_heads, width, dim = queries.shape
    num_kv = keys.shape[1]
    num_rows = num_heads // num_kv * width
    tile = next((n for n in _ROWS if n >= num_rows), _ROWS[-1])
    name = str(queries.dtype).removeprefix("mlx.core.")
    return (
        f"{num_kv} heads of {dim}, {name}, {keys.bits} bit, up to {tile * -(-num_rows // tile)} queries each"
    )


@launch.self_check(NAME, raced=True)
def _self_check() -> launch.Check:
    """Compare the kernel with numpy over the unpacked numbers and return the check: heads of each size, queries that see different
    numbers of tokens, several parts, and buffers with other tokens after the row's."""
    rng = np.random.default_rng(0)
    worst = 0.0
    for dim, bits, width, length in ((64, 8, 3, 1300), (128, 4, 1, 700), (256, 8, 5, 90), (256, 4, 2, 600)):
        for dtype, limit in ((mx.float32, 1e-5), (mx.bfloat16, 1e-2)):
            queries, keys, values = (
                mx.array(rng.standard_normal((1, n, m, dim), np.float32)).astype(dtype)
                for n, m in ((6, width), (2, length + 9), (2, length + 9))
            )
            queries = queries * dim**-0.5
            k, v = (QuantizedTokens.of(x, bits).first(length) for x in (keys, values))
            got = kv_attend_metal(queries, k, v, 1.0)
            wanted = _exact(numbers(queries), *(numbers(_wide(x).unpacked()) for x in (k, v)))
            worst = max(worst, launch.largest_error([got], [mx.array(wanted)]) / limit)
    return launch.Check(error=worst, limit=1.0)


def _wide(x: QuantizedTokens) -> QuantizedTokens:
    """Return the same quantized numbers with scales and biases in float32, to which they are then unpacked."""
    return QuantizedTokens(x.codes, x.scales.astype(mx.float32), x.biases.astype(mx.float32), x.length)


def _exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return causal attention in numpy; the queries are those of the last tokens."""
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    width, length = q.shape[2], k.shape[2]
    scores = np.where(np.tri(width, length, length - width, dtype=np.bool_), q @ k.swapaxes(-1, -2), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v
