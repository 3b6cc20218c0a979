"""Top-k, top-p and the likeliest tokens of many positions at once, without sorting the vocabulary.

Definitions, for the scores x of one position, each a float; equal scores are ties:

    top-k   a token stays if fewer than k tokens have a higher score. Ties at the k-th place all stay.
    top-p   a token stays if the tokens with a higher score hold less than the share p of all mass. With top-k, all mass is that of the
            k first places. Ties at the last place all stay, and the likeliest token always does.
    likeliest n   the n first tokens by score; of ties the lower ids come first.

Masses are whole numbers (a token's probability, or its weight beside the likeliest one, in small fixed units), so that a sum of them does
not depend on the order of its terms: every way to find a threshold finds the same one, on every device and among any other positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

_SHARE = 30  # bits of a share p
_WEIGHT = 40  # bits of the likeliest token's weight; 2^23 of them fit into an int64
_PROBABILITY = 31  # bits of probability 1; one and what rounding adds fit into a uint32
_LANES = 16  # numbers: CPUs may compute what is left over of so many in another way, which must not depend on the other positions
_SORTED_AT_MOST = 8192  # tokens: sorting so few takes less than counting the digits of their scores
_DIGIT = 16  # bits of a digit of a score
_DIGITS = 1 << _DIGIT


def numbers_held(vocab_size: int) -> int:
    """Of one position, in an array of its scores, or of the masses of their digits where those are more."""
    return vocab_size if vocab_size <= _SORTED_AT_MOST else max(vocab_size, _DIGITS)


def largest(x: mx.array, num: int) -> mx.array:
    """(N, V) floats -> (N, num) int32: ids of the `num` highest scores, highest first, of ties the lower id first; 1 <= num <= V.

    The `num` highest scores lie in the `num` blocks of ids whose highest scores are highest. So only the maxima of all blocks and the
    contents of these blocks are sorted, about 2 sqrt(V num) numbers a position.
    """
    vocab = x.shape[1]
    size = max(1, math.isqrt(vocab // num))  # of a block
    num_blocks, rest = divmod(vocab, size)
    if 2 * (num_blocks + size * num) > vocab:
        return _ranked(x, mx.arange(vocab)[None])[:, :num]
    whole = x[:, : vocab - rest]
    blocks = _ranked(mx.max(whole.reshape(-1, num_blocks, size), axis=-1), mx.arange(num_blocks)[None])
    ids = (blocks[:, :num, None] * size + mx.arange(size)).reshape(x.shape[0], -1)
    if rest:
        tail = mx.broadcast_to(mx.arange(vocab - rest, vocab)[None], (x.shape[0], rest))
        ids = mx.concatenate([ids, tail], axis=1)
    return _ranked(mx.take_along_axis(x, ids, axis=1), ids)[:, :num]


def _ranked(x: mx.array, ids: mx.array) -> mx.array:
    """`ids` (N or 1, M), ascending int32, of the scores x (N, M), by falling score and rising id: (N, M) int32.

    Sorts numbers that hold both, none twice, so that it is all one whether the device's sort keeps the order of ties.
    """
    x = x.astype(mx.float32)
    bits = mx.where(x == 0, 0.0, x).view(mx.int32)  # one zero, not two
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (-rising.astype(mx.int64) << 32) | ids.astype(mx.int64)
    return (mx.sort(keys, axis=-1) & 0xFFFFFFFF).astype(mx.int32)


def top_k_floor(x: mx.array, tempered: mx.array, k: Sequence[int], p: Sequence[float]) -> mx.array:
    """The lowest scores that stay, (N, 1) float32, of `tempered` (N, V) float32.

    x (N, V): scores that `tempered` never orders otherwise, in any float type. k: 1 to V of each position; p: above 0, 1 for all.
    """
    width = min(x.shape[1], -(-max(k) // _LANES) * _LANES)
    scores = mx.take_along_axis(tempered, largest(x, width), axis=1)
    inside = mx.arange(width)[None] < mx.array(list(k))[:, None]
    if all(share == 1.0 for share in p):
        return mx.min(mx.where(inside, scores, mx.inf), axis=-1, keepdims=True)
    weights = _whole(mx.exp(scores - scores[:, :1]), _WEIGHT).astype(mx.int64)
    return _ranked_floor(scores, mx.where(inside, weights, 0), inside, p)


def top_p_floor(x: mx.array, tempered: mx.array, p: Sequence[float]) -> mx.array:
    """The lowest scores that stay, (N, 1) float32, of `tempered` (N, V) float32; arguments as `top_k_floor` has them."""
    masses = _whole(mx.softmax(tempered, axis=-1, precise=True), _PROBABILITY).astype(mx.uint32)
    find = sorted_floor if x.shape[1] <= _SORTED_AT_MOST else counted_floor
    return find(x, tempered, masses, p)


def sorted_floor(x: mx.array, tempered: mx.array, masses: mx.array, p: Sequence[float]) -> mx.array:
    """`top_p_floor` for masses (N, V) uint32, by sorting."""
    ids = largest(x, x.shape[1])
    scores, masses = (mx.take_along_axis(a, ids, axis=1) for a in (tempered, masses))
    return _ranked_floor(scores, masses.astype(mx.int64), mx.array(True), p)


def counted_floor(x: mx.array, tempered: mx.array, masses: mx.array, p: Sequence[float]) -> mx.array:
    """`top_p_floor` for masses (N, V) uint32, by adding up the masses of equal digits of the scores: for 16-bit types a score is one digit,
    for float32 two, of which the second is looked at where the first is that of the floor."""
    need = _limit(mx.sum(masses, axis=-1, keepdims=True).astype(mx.int64), p).astype(mx.uint32)
    rising = _rising(x)
    if x.dtype.size == 2:
        floor, _ = _digit_of_floor(rising, masses, need)
    else:
        high = rising >> _DIGIT
        first, need = _digit_of_floor(high, masses, need)
        low, _ = _digit_of_floor(rising & (_DIGITS - 1), mx.where(high == first, masses, 0), need)
        floor = first << _DIGIT | low
    return mx.min(mx.where(rising >= floor, tempered, mx.inf), axis=-1, keepdims=True)


def _rising(x: mx.array) -> mx.array:
    """uint32 numbers in the order of the floats x. The two zeros are neighbours, and as floors they are one score."""
    bits = 8 * x.dtype.size
    form, whole = (mx.int16, mx.uint16) if bits == 16 else (mx.int32, mx.uint32)
    given = x.view(form)
    sign = mx.array((1 << (bits - 1)) - 1, form)
    turned = given ^ ((given >> (bits - 1)) & sign)
    return (turned.view(whole) ^ mx.array(1 << (bits - 1), whole)).astype(mx.uint32)


def _digit_of_floor(digits: mx.array, masses: mx.array, need: mx.array) -> tuple[mx.array, mx.array]:
    """The highest digit (N, 1) uint32 that, with all higher ones, holds a mass of `need` (N, 1) uint32, 0 if none does; and what is needed
    beside the higher ones. digits (N, V) uint32, below _DIGITS."""
    vocab = digits.shape[1]
    # what has no mass is added somewhere: a GPU adds to one place one number after the other
    spread = mx.arange(vocab, dtype=mx.uint32) & (_DIGITS - 1)
    held = _sums(masses, mx.where(masses > 0, digits, spread), _DIGITS)
    reached = mx.cumsum(held, axis=-1, reverse=True)
    found = mx.maximum(mx.sum(reached >= need, axis=-1, keepdims=True).astype(mx.int32) - 1, 0)
    above = mx.take_along_axis(reached, found, axis=-1) - mx.take_along_axis(held, found, axis=-1)
    return found.astype(mx.uint32), need - above


def _sums(numbers: mx.array, places: mx.array, num_places: int) -> mx.array:
    """(N, num_places): of each row, the sums of its numbers (N, V) at the same places (N, V) uint32.

    This is the transpose of a gather along the axis, and MLX has it as such: one operation, where `at[...].add` goes through index arrays
    of any number, which takes a CPU more than ten times as long.
    """
    nothing = mx.zeros((numbers.shape[0], num_places), numbers.dtype)
    _, (sums,) = mx.vjp(lambda x: mx.take_along_axis(x, places, axis=1), [nothing], [numbers])
    return sums


def _ranked_floor(scores: mx.array, masses: mx.array, inside: mx.array, p: Sequence[float]) -> mx.array:
    """Of scores (N, M), falling, those at the places `inside` holding masses (N, M) int64."""
    sums = mx.cumsum(masses, axis=-1)
    kept = inside & (sums - masses < _limit(sums[:, -1:], p))
    return mx.min(mx.where(kept, scores, mx.inf), axis=-1, keepdims=True)


def _whole(shares: mx.array, bits: int) -> mx.array:
    """float32 in 0..1 -> float32, in units of 2^-bits, to be cut off: the tail of a vocabulary must not lose half a unit a token."""
    return shares * 2.0**bits + 0.5


def _limit(total: mx.array, p: Sequence[float]) -> mx.array:
    """The least whole numbers that are the shares p of `total` (N, 1) int64, or more; one more than all for a p of 1."""
    one = 1 << _SHARE
    shares = np.asarray([[max(1, round(share * one)) if share < 1.0 else one] for share in p], np.int64)
    share = mx.array(shares)
    high, low = total >> _SHARE, total & (one - 1)
    everything = mx.array([[share == 1.0] for share in p])
    return mx.where(everything, total + 1, high * share + ((low * share + one - 1) >> _SHARE))
