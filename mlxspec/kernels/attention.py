"""Causal attention of one row: MLX's own kernel where it was checked on this device, else plain operations.

MLX has several attention kernels for GPUs and picks by device, head size, number of queries and length. Some were wrong on some
machines: launches too large for an M1's registers left zeros until MLX 0.32.2 and raise since (mlx #3885, #4018). So when a head
shape first comes up, MLX's result is compared with plain operations. Where it differs it is not used, and reports say so.
"""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxspec.kernels import cpu, kv_attend, launch
from mlxspec.kernels.cpu.softmax import weigh
from mlxspec.kernels.quantized_kv import (
    KV_BITS,
    QuantizedTokens,
    Stored,
    first,
    has_products,
    products,
    sums,
    unpacked,
    unpacking_bytes,
)
from mlxspec.platform import device

_QUERY_BLOCK = 256  # queries attended together where scores are written out: half of a causal square is not worth computing
_NARROWEST_BLOCK = 32
_SCORES = 512 << 20  # bytes that scores of a block may take, unless it is the narrowest
# scores and what becomes of them, of a block and of those that MLX has made room for already; and where softmax is spelled out
_ALIVE, _ALIVE_SPELLED = 4, 16
# Metal attends without writing scores out for heads of these sizes: a few queries, as many as a key's heads times them are 32, and many.
# tests/kernels/test_mlx_wheel.py compares these tables with the kernels in MLX's wheel.
_FEW, _FEW_HEADS = 8, 32
FUSED_FEW, FUSED_MANY = (64, 96, 128, 256), (64, 72, 80, 96, 128)
# and of a prompt in 16 bits: heads of 256, a first piece of so many tokens; with matrix units (M5) any piece of so many, and heads of 512
# where heads times tiles of 32 queries fill the GPU
_FIRST_PIECE, _BY_UNITS, _TILE, _TILES = 2048, 1024, 32, 1024
# queries: more of them keep a GPU busy whichever way they lie; on a CPU more than a round has, so that all its widths go MLX's way
_FOLDED = 64
# (queries, keys): MLX changes kernels at 8 queries and from 1,024 and 4,096 keys on
_TRIALS = ((1, 40), (1, 1100), (1, 4200), (4, 40), (4, 1100), (8, 4200), (17, 300))
_WIDE_TRIALS = (
    (_BY_UNITS, 1100, False),
    (_BY_UNITS, 1100, True),
    (_FIRST_PIECE, _FIRST_PIECE, False),
)  # and whether there is a mask
_LIMIT = 0.05  # of the largest number: rounding of 16-bit types is a tenth of this, a wrong kernel many times as much


class Heads(NamedTuple):
    """The properties of queries (1, Hq, w, D) and keys (1, Hkv, L, D) by which MLX picks a kernel."""

    num: int
    num_kv: int
    dim: int
    dtype: mx.Dtype


# of the models we run, for checks without a model: Qwen3.5 of 27B, 9B and 4B, 35B, 122B; Gemma 4's windowed and full layers
COMMON = tuple(
    Heads(*sizes, mx.bfloat16)
    for sizes in (
        (24, 4, 256),
        (16, 4, 256),
        (16, 2, 256),
        (32, 2, 256),
        (16, 8, 256),
        (16, 1, 512),
        (32, 4, 512),
    )
)


def has_kernel(heads: Heads) -> bool:
    """Return whether MLX has one attention kernel for these heads on this device that agrees with plain operations. The first call for
    each kind of heads runs some forwards on a GPU."""
    return device.has_fused_attention() and _is_right(heads)


def score_bytes(heads: Heads, width: int, length: int, kv_bits: int = 16) -> int:
    """Return the bytes that `attend` takes while it runs, for at most this number of queries and keys: scores, 0 where a kernel never
    writes them, and quantized keys and values that are unpacked for it. kv_bits: 4 or 8 where they are quantized."""
    few, found = kv_bits in KV_BITS and _goes_packed(width), 0
    if kv_bits in KV_BITS and not few:
        found = unpacking_bytes(2 * heads.num_kv * length * heads.dim, heads.dtype)
    if not few:  # the last piece of a prompt is narrower, and may be one that is not fused
        width = max((w for w in (min(width, _FEW), width) if _writes_scores(heads, w)), default=0)
    return found + _bytes_a_score(heads) * heads.num * min(width, _block(heads, length)) * length


def _goes_packed(width: int) -> bool:
    """Return whether `width` queries read quantized keys and values as they are stored. More queries have each number unpacked once,
    instead of once for each tile of queries."""
    return has_products() and width <= _FOLDED


def _writes_scores(heads: Heads, width: int) -> bool:
    """Return whether attention of `width` queries writes its scores to memory at some length of the keys."""
    if not has_kernel(heads):
        return True
    if width > _FEW:
        return heads.dim not in FUSED_MANY
    return heads.dim not in FUSED_FEW or width * heads.num > _FEW_HEADS * heads.num_kv


def _fuses_piece(heads: Heads, width: int, length: int, *, masked: bool) -> bool:
    """Return whether MLX fuses attention for a prompt's piece of this width and length, for heads whose attention it does not fuse at
    every length. For heads of 512 MLX has a kernel for single queries too, which is not used: a plain step would compute otherwise
    than a verify."""
    if heads.dtype == mx.float32 or width < _BY_UNITS:  # TF32 is off
        return False
    if not device.has_matrix_units():
        return heads.dim == 256 and not masked and width == length >= _FIRST_PIECE
    return heads.dim == 256 or (heads.dim == 512 and not masked and heads.num * -(-width // _TILE) >= _TILES)


def _block(heads: Heads, length: int) -> int:
    """Return the number of queries that are attended together where scores are written to memory."""
    fit = _SCORES // (_bytes_a_score(heads) * heads.num * max(1, length))
    return max(_NARROWEST_BLOCK, min(_QUERY_BLOCK, fit // _NARROWEST_BLOCK * _NARROWEST_BLOCK))


def _bytes_a_score(heads: Heads) -> int:
    return heads.dtype.size * (_ALIVE_SPELLED if cpu.takes(heads.dtype) else _ALIVE)


def attend(
    queries: mx.array,
    keys: Stored,
    values: Stored,
    scale: float,
    mask: mx.array | None = None,
    ends: mx.array | None = None,
) -> mx.array:
    """Return causal attention (1, Hq, w, D) of one row. queries (1, Hq, w, D) belong to the last w tokens of keys and values (1, Hkv, L,
    D).

    mask (w, L) bool: the keys that each query sees, if it is not all up to its own. ends (w,) int32: the same as a number of first keys
    for each query; used for quantized keys only.
    """
    heads = Heads(queries.shape[1], keys.shape[1], queries.shape[3], queries.dtype)
    width, length = queries.shape[2], keys.shape[2]
    is_packed = False
    if isinstance(keys, QuantizedTokens) and isinstance(values, QuantizedTokens) and _goes_packed(width):
        is_packed = True
        if (mask is None or ends is not None) and kv_attend.is_ours(queries, keys):
            return kv_attend.kv_attend_metal(queries, keys, values, scale, ends)
    else:
        keys, values = unpacked(keys), unpacked(values)
    block = _block(heads, length)
    writes = is_packed or (
        _writes_scores(heads, width)
        and not (has_kernel(heads) and _fuses_piece(heads, width, length, masked=mask is not None))
    )
    if is_packed:
        folds = True
    elif device.has_fused_attention():
        folds = writes and (width <= _FOLDED or not has_kernel(heads))
    else:  # what MLX has on a CPU are plain operations too
        folds = width > _FOLDED and cpu.takes(queries.dtype)
    if width <= block or not writes:
        return _whole(queries, keys, values, scale, mask, folds)
    outs: list[mx.array] = []
    for start in range(0, width, block):
        end = min(start + block, width)
        seen = length if mask is not None else length - width + end
        own = None if mask is None else mask[start:end]
        asked = queries[:, :, start:end]
        if outs:  # one behind the other: MLX would write the scores of all of them first
            asked = mx.depends(asked, outs[-1])
        outs.append(_whole(asked, first(keys, seen), first(values, seen), scale, own, folds))
    return mx.concatenate(outs, axis=2)


def _whole(
    queries: mx.array, keys: Stored, values: Stored, scale: float, mask: mx.array | None, folds: bool
) -> mx.array:
    if isinstance(keys, QuantizedTokens) and isinstance(values, QuantizedTokens):
        return kv_attend.kv_attend_ops(queries, keys, values, scale, mask)
    keys, values = unpacked(keys), unpacked(values)
    return (_folded if folds else _by_mlx)(queries, keys, values, scale, mask)


def attend_tailed(
    queries: mx.array,
    keys: Stored,
    values: Stored,
    tail_keys: Stored,
    tail_values: Stored,
    scale: float,
    mask: mx.array | None = None,
) -> mx.array:
    """Return attention (1, Hq, w, D) of one row whose keys and values lie in two parts, L tokens in the first and n in the tail.

    mask (w, L + n) bool: the keys that each query sees; None: all. In plain operations: MLX's kernels take keys in one array.
    """
    _, num_heads, width, dim = queries.shape
    num_kv, length = keys.shape[1], keys.shape[2]
    q = (queries * scale).reshape(1, num_kv, -1, dim)
    scores = mx.concatenate([products(q, k) for k in (keys, tail_keys)], axis=-1)
    if mask is not None:
        apart = scores.reshape(1, num_kv, -1, width, scores.shape[-1])
        scores = _masked(apart, mask).reshape(scores.shape)
    before, rest = mx.split(mx.softmax(scores, axis=-1, precise=True), [length], axis=-1)
    return (sums(before, values) + sums(rest, tail_values)).reshape(1, num_heads, width, dim)


def causal_mask(width: int, length: int) -> mx.array:
    """Return (width, length) bool: the tokens that each of the last `width` of `length` tokens sees. Computed on the device: on the host
    the work and the bytes to transfer would grow with a row's length."""
    ends = mx.arange(length - width, length, dtype=mx.int32)
    return mx.arange(length, dtype=mx.int32)[None] <= ends[:, None]


@partial(mx.compile, shapeless=True)
def _masked(scores: mx.array, mask: mx.array) -> mx.array:
    return mx.where(mask, scores, mx.finfo(scores.dtype).min)


def _by_mlx(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> mx.array:
    what = mask if mask is not None else "causal" if queries.shape[2] > 1 else None
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=what)


def _folded(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> mx.array:
    """Return attention as `attend` does, in plain operations. The queries of all heads that share keys are rows of one product, so a GPU
    reads keys and values once. MLX's own attention reads them once for each head, which is most of the time of a verify of few tokens
    after a long text."""
    _, num_heads, width, dim = queries.shape
    num_kv, length = keys.shape[1], keys.shape[2]
    q = (queries * scale).reshape(1, num_kv, -1, dim)
    scores = q @ keys.swapaxes(-1, -2)
    if mask is None and width > 1:
        mask = causal_mask(width, length)
    if mask is not None:
        apart = scores.reshape(1, num_kv, -1, width, length)
        scores = _masked(apart, mask).reshape(scores.shape)
    return weigh(scores, values).reshape(1, num_heads, width, dim)


@cache
def _is_right(heads: Heads) -> bool:
    try:
        error = _largest_error(heads)
    except Exception as problem:  # must cost only this kernel, whatever it is
        why = f"cannot run on this device: {(str(problem) or type(problem).__name__).splitlines()[0]}"
    else:
        if error <= _LIMIT:
            return True
        why = f"differs from plain operations on this device: error {error:.2e}, limit {_LIMIT:.0e}"
    name = f"of MLX's attention ({heads.num} heads of {heads.dim}, {heads.num_kv} of keys)"
    launch.add_report(launch.KernelReport(name=name, in_use=False, failed=True, is_ours=False, reason=why))
    return False


def _largest_error(heads: Heads) -> float:
    """Return the largest error of attention over random rows whose queries see some keys far better than others, so that a wrong place
    shows."""
    rng = np.random.default_rng(0)
    worst, scale = 0.0, heads.dim**-0.5

    def draw(num: int, length: int) -> mx.array:
        return mx.array(rng.standard_normal((1, num, length, heads.dim), np.float32)).astype(heads.dtype)

    for width, length, given in (*((*t, m) for t in _TRIALS for m in (False, True)), *_WIDE_TRIALS):
        if width >= _BY_UNITS and not _fuses_piece(heads, width, length, masked=given):
            continue
        # keys and values are views of buffers with room behind, as caches have them
        keys, values = (draw(heads.num_kv, length + 8)[:, :, :length] for _ in range(2))
        queries = 3 * draw(heads.num, width)
        q, k, v = (x.astype(mx.float32) for x in (queries, keys, values))
        late = 3 if given else 0
        ends = np.arange(length - width - late, length - late)[:, None]
        mask = mx.array(np.arange(length)[None] <= ends)
        found = _by_mlx(queries, keys, values, scale, mask if given else None)
        for start in range(0, width, _QUERY_BLOCK):  # scores of all of them may be gigabytes
            part = slice(start, start + _QUERY_BLOCK)
            wanted = _folded(q[:, :, part], k, v, scale, mask[part])
            worst = max(worst, launch.largest_error([found[:, :, part]], [wanted]))
    return worst
