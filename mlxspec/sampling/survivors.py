"""Sampling where top-k is asked for: the survivors are found first, and everything else works on them alone.

Of V tokens of a position `width` survive, about k: tempering, top-p, min-p and noise take numbers of theirs only, beside one pass over the
logits and one over the random bits. A greedy position has one survivor that counts. All of it is one compiled function, so that a GPU runs
few kernels. A survivor has the noise that it has in a draw from all V tokens, so a draft agrees with the target as often as it would there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from mlxspec.config import SamplingParams
from mlxspec.sampling.truncate import ONE, highest, ranked_floor, room, share_of, weights

COLDEST = 1e-6  # a temperature as good as greedy; float32 logits over much less would be infinite


class Survivors(NamedTuple):
    """The tokens that stay at N positions after top-k. ids (N, W) int32 by descending score, among equal ones the lower id first; scores
    (N, W) float32, -inf where a token does not stay."""

    ids: mx.array
    scores: mx.array


class Cuts(NamedTuple):
    """The truncation parameters of N positions. Arrays (N, 1): k int32, temperature float32, share of top-p int64, least float32 (the
    logarithm of min-p).

    width: the most tokens that stay at a position. shares, leasts: whether any position has top-p, or min-p.
    """

    k: mx.array
    temperature: mx.array
    share: mx.array
    least: mx.array
    width: int
    shares: bool
    leasts: bool


def has_survivors(params: SamplingParams, vocab_size: int) -> bool:
    """Return whether a position with these parameters is sampled from survivors: by top-k, or greedily."""
    return params.temperature == 0.0 or (0 < params.top_k < vocab_size and not params.has_filters)


def cuts(params: Sequence[SamplingParams], vocab_size: int) -> Cuts:
    """Return the parameters of positions that all have survivors."""
    if all(p is params[0] for p in params):
        params = params[:1]
    return _cuts(tuple((p.top_k, p.temperature, p.top_p, p.min_p) for p in params), vocab_size)


@lru_cache(64)  # a round asks for the same again
def _cuts(params: tuple[tuple[int, float, float, float], ...], vocab_size: int) -> Cuts:
    k, warm, share, least = zip(*map(_of_position, params), strict=True)
    return Cuts(
        k=_column(k, mx.int32),
        temperature=_column(warm, mx.float32),
        share=_column(share, mx.int64),
        least=_column(least, mx.float32),
        width=min(_rounded(room(max(k))), vocab_size),
        shares=any(s <= ONE for s in share),
        leasts=any(math.isfinite(value) for value in least),
    )


def _of_position(asked: tuple[int, float, float, float]) -> tuple[int, float, int, float]:
    """Return the values of one position for the fields k, temperature, share and least of `Cuts`. asked: the position's top_k,
    temperature, top_p and min_p. Temperature 0 gives k = 1, temperature 1 and no top-p."""
    top_k, temperature, top_p, min_p = asked
    least = math.log(min_p) if min_p > 0.0 else -math.inf
    if temperature == 0.0:
        return 1, 1.0, ONE + 1, least
    return top_k, max(temperature, COLDEST), share_of(top_p), least


def _column(values: Sequence[float], dtype: mx.Dtype) -> mx.array:
    return mx.array([[value] for value in values], dtype)


def _rounded(width: int) -> int:
    """Round a width up to one of eight between two powers of two. MLX keeps a compiled function for each width, and clients choose k."""
    step = max(16, 1 << max(0, (width - 1).bit_length() - 4))
    return -(-width // step) * step


def survivors(logits: mx.array, asked: Cuts) -> Survivors:
    """Return the survivors among logits (N, V) of any float dtype."""
    return Survivors(*_compiled_find(logits, *asked))


def _find(
    logits: mx.array,
    k: mx.array,
    temperature: mx.array,
    share: mx.array,
    least: mx.array,
    width: int,
    shares: bool,
    leasts: bool,
) -> tuple[mx.array, mx.array]:
    ids, scores = highest(logits, width)
    scores = scores.astype(mx.float32) / temperature
    places = mx.array([*range(width)], mx.int32)[None]
    inside = places < k
    if shares:
        floor = ranked_floor(scores, mx.where(inside, weights(scores), 0), inside, share)
    else:
        floor = mx.min(mx.where(inside, scores, mx.inf), axis=-1, keepdims=True)
    if leasts:
        floor = mx.maximum(floor, scores[:, :1] + least)
    return ids, mx.where((scores < floor) | (places >= room(k)), -mx.inf, scores)


def draw(
    logits: mx.array,
    asked: Cuts,
    keys: mx.array,
    is_noisy: mx.array | None,
    vocab_size: int,
    ids: mx.array | None = None,
) -> mx.array:
    """Return tokens (N,) int32 for logits (N, V): the argmax of the survivors' scores and noise. keys (N, 2) uint32: of each position's
    noise. is_noisy (N or 1, 1) bool: where noise is added; elsewhere the likeliest token is taken; None: everywhere. ids (R,) int32:
    logits are (N, R), of these tokens; the noise is that of the whole vocabulary in any case."""
    return _compiled_draw(logits, keys, is_noisy, ids, vocab_size, *asked)


def _draw(
    logits: mx.array,
    keys: mx.array,
    is_noisy: mx.array | None,
    names: mx.array | None,
    vocab_size: int,
    *asked: Any,
) -> mx.array:
    ids, scores = _find(logits, *asked)
    ids = ids if names is None else names[ids]
    if keys.shape[0] == 1:
        uniform = mx.random.uniform(shape=(1, vocab_size), key=keys.reshape(2))
    else:
        uniform = mx.vmap(lambda key: mx.random.uniform(shape=(vocab_size,), key=key))(keys)
    noise = -mx.log(-mx.log(mx.take_along_axis(uniform, ids, axis=1)))
    if is_noisy is not None:
        noise = mx.where(is_noisy, noise, 0.0)
    best = mx.argmax(scores + noise, axis=-1, keepdims=True)
    return mx.take_along_axis(ids, best, axis=1)[:, 0]


_compiled_find, _compiled_draw = mx.compile(_find), mx.compile(_draw)
