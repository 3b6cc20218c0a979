"""Top-k, top-p and the likeliest tokens of many positions at once, without sorting the vocabulary.

Definitions, for the scores x of one position, each a float; equal scores are ties:

    top-k   a token stays if fewer than k tokens have a higher score. Ties at the k-th place stay, as far as there is room: of `room(k)`
            tokens in all, the lower ids first.
    top-p   a token stays if the tokens with a higher score hold less than the share p of all mass. With top-k, all mass is that of the
            k first places. Ties at the last place all stay, and the likeliest token always does.
    likeliest n   the n first tokens by score; of ties the lower ids come first.

Masses are whole numbers (a token's probability, or its weight beside the likeliest one, in small fixed units), so that a sum of them does
not depend on the order of its terms: every way to find a threshold finds the same one, on every device and among any other positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

_SHARE = 30  # bits of a share p
ONE = 1 << _SHARE  # all of it, in its units
_WEIGHT = 40  # bits of the likeliest token's weight; 2^23 of them fit into an int64
_PROBABILITY = 31  # bits of probability 1; one and what rounding adds fit into a uint32
_SORTED_AT_MOST = 8192  # tokens: sorting so few takes less than counting the digits of their scores
_DIGIT = 16  # bits of a digit of a score
_DIGITS = 1 << _DIGIT


def room(k: Any) -> Any:
    """Return how many tokens may stay by top-k, ties included: k and 8 to 23 more. k, result: a number, or an array of integers.

    The result is a multiple of 16: CPUs compute the rest of a division by their vector width in another way, and no result may depend on
    that.
    """
    return (k + 23) // 16 * 16


def numbers_held(vocab_size: int) -> int:
    """Return how many numbers one position takes in the largest of its arrays: its scores, or the masses of their digits."""
    return vocab_size if vocab_size <= _SORTED_AT_MOST else max(vocab_size, _DIGITS)


def largest(x: mx.array, num: int) -> mx.array:
    """Return the ids (N, num) int32 of the `num` highest scores of x (N, V), highest first, of equal scores the lower id first."""
    return highest(x, num)[0]


def highest(x: mx.array, num: int) -> tuple[mx.array, mx.array]:
    """Return the ids (N, num) int32 and values (N, num), in x's dtype, of the `num` highest scores of x (N, V), highest first, of equal
    ones the lower id first. 1 <= num <= V.

    The `num` highest scores lie in the `num` blocks of ids whose highest scores are highest. So only the maxima of all blocks and the
    contents of these blocks are sorted, about 2 sqrt(V num) numbers a position.
    """
    vocab = x.shape[1]
    size = (
        1 << (max(1, vocab // num).bit_length() - 1) // 2
    )  # of a block: a power of two, so that real vocabularies leave no rest
    num_blocks, rest = divmod(vocab, size)
    if 2 * (num_blocks + size * num) > vocab:
        return _Sorted(x, _count(vocab), num).read(x.dtype)
    whole = x[:, : vocab - rest].reshape(-1, num_blocks, size)
    blocks = _Sorted(mx.max(whole, axis=-1), _count(num_blocks), num)
    ids = (blocks.spread_ids * size + _count(size)).reshape(x.shape[0], -1)
    if rest:
        tail = mx.broadcast_to(_count(rest)[None] + (vocab - rest), (x.shape[0], rest))
        ids = mx.concatenate([ids, tail], axis=1)
    return _Sorted(mx.take_along_axis(x, ids, axis=1), ids, num).read(x.dtype)


class _Sorted:
    """The `num` first of `ids` (N, M) or (M,) int32 and of their scores x (N, M), by descending score and ascending id.

    Integers that hold score and id are sorted. No two are equal, so the result does not depend on how the device's sort orders ties.
    Both are read from the sorted integers. Where both fit into 32 bits, half as many bytes are sorted.
    """

    def __init__(self, x: mx.array, ids: mx.array, num: int) -> None:
        is_short = x.dtype.size == 2 and ids.ndim == 1 and ids.size <= 1 << 16
        self._width, form = (16, mx.int32) if is_short else (32, mx.int64)
        self._bits = 8 * x.dtype.size
        given = x.view(mx.int16 if self._bits == 16 else mx.int32).astype(form)
        given = mx.where(given == -1 << (self._bits - 1), 0, given)  # one zero, not two
        keys = ~self._turned(given) << self._width | ids.astype(form)
        self._keys = mx.sort(keys, axis=-1)[:, :num]

    def _turned(self, numbers: mx.array) -> mx.array:
        """Map a float's bits to a whole number with the same order, and back."""
        return numbers ^ ((numbers >> (self._bits - 1)) & ((1 << (self._bits - 1)) - 1))

    @property
    def ids(self) -> mx.array:
        """Return the ids, (N, num) int32."""
        return self._ids_in(self._keys)

    @property
    def spread_ids(self) -> mx.array:
        """Return the ids, (N, num, 1) int32. The shape is changed first, since a change of shape between two steps would keep them from
        being one kernel."""
        return self._ids_in(self._keys[:, :, None])

    def _ids_in(self, keys: mx.array) -> mx.array:
        return (keys & ((1 << self._width) - 1)).astype(mx.int32)

    def read(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Return the ids and their scores, (N, num) of this dtype."""
        scores = self._turned(~(self._keys >> self._width))
        return self.ids, scores.astype(mx.int16 if self._bits == 16 else mx.int32).view(dtype)


def _count(num: int) -> mx.array:
    """Return 0 to num - 1, int32, as data. `mx.arange` would be a kernel of its own."""
    return mx.array(np.arange(num, dtype=np.int32))


def weights(scores: mx.array) -> mx.array:
    """Return, (N, M) int64, the weight of each token relative to the likeliest one. scores (N, M) float32 fall along a row."""
    return _whole(mx.exp(scores - scores[:, :1]), _WEIGHT).astype(mx.int64)


def share_of(p: float) -> int:
    """Return a share p in units of 1 / ONE; more than ONE for p = 1, which keeps every token."""
    return max(1, round(p * ONE)) if p < 1.0 else ONE + 1


def shares_of(p: Sequence[float]) -> mx.array:
    """Return each share p in integer units of 1 / ONE, (N, 1) int64. It is more than ONE for p = 1, which keeps every token."""
    return mx.array(np.asarray([[share_of(one)] for one in p], np.int64))


@mx.compile
def confidence(logits: mx.array) -> mx.array:
    """Return the probability of the most likely token, (N,) float32, of logits (N, V) of any float dtype.

    Computes in float32: near 10, bfloat16 logits are 1/16 apart, which is 6 % of a probability.
    """
    logits = logits.astype(mx.float32)
    return mx.exp(mx.max(logits, axis=-1) - mx.logsumexp(logits, axis=-1))


def top_p_floor(x: mx.array, tempered: mx.array, p: Sequence[float]) -> mx.array:
    """Return the lowest score of `tempered` (N, V) float32 that top-p keeps at each position, (N, 1) float32.

    x (N, V): the scores before tempering, in any float type; they rank the tokens as `tempered` does. p: the share of each position,
    above 0; 1 keeps all.
    """
    return _compiled_top_p(x, tempered, shares_of(p))


def _top_p(x: mx.array, tempered: mx.array, share: mx.array) -> mx.array:
    masses = _whole(mx.softmax(tempered, axis=-1, precise=True), _PROBABILITY).astype(mx.uint32)
    find = sorted_floor if x.shape[1] <= _SORTED_AT_MOST else counted_floor
    return find(x, tempered, masses, share)


def sorted_floor(x: mx.array, tempered: mx.array, masses: mx.array, share: mx.array) -> mx.array:
    """Compute `top_p_floor` for masses (N, V) uint32 by sorting. share: the result of `shares_of`."""
    ids = largest(x, x.shape[1])
    scores, masses = (mx.take_along_axis(a, ids, axis=1) for a in (tempered, masses))
    return ranked_floor(scores, masses.astype(mx.int64), mx.array(True), share)


def counted_floor(x: mx.array, tempered: mx.array, masses: mx.array, share: mx.array) -> mx.array:
    """Compute `sorted_floor` by adding up the masses of equal digits of the scores.

    A 16-bit score is one digit, a float32 score is two. The second is examined where the first is that of the floor.
    """
    need = _limit(mx.sum(masses, axis=-1, keepdims=True).astype(mx.int64), share).astype(mx.uint32)
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
    """Return uint32 numbers in the order of the floats x. The two zeros are neighbours, and count as one score for a floor."""
    bits = 8 * x.dtype.size
    form, whole = (mx.int16, mx.uint16) if bits == 16 else (mx.int32, mx.uint32)
    given = x.view(form)
    sign = mx.array((1 << (bits - 1)) - 1, form)
    turned = given ^ ((given >> (bits - 1)) & sign)
    return (turned.view(whole) ^ mx.array(1 << (bits - 1), whole)).astype(mx.uint32)


def _digit_of_floor(digits: mx.array, masses: mx.array, need: mx.array) -> tuple[mx.array, mx.array]:
    """Return the highest digit (N, 1) uint32 that holds, with all higher ones, a mass of at least `need` (N, 1) uint32, 0 where none
    does; and the part of `need` that the higher digits do not hold. digits (N, V) uint32, below _DIGITS."""
    vocab = digits.shape[1]
    # what has no mass is added somewhere: a GPU adds to one place one number after the other
    spread = mx.arange(vocab, dtype=mx.uint32) & (_DIGITS - 1)
    held = _sums(masses, mx.where(masses > 0, digits, spread), _DIGITS)
    reached = mx.cumsum(held, axis=-1, reverse=True)
    found = mx.maximum(mx.sum(reached >= need, axis=-1, keepdims=True).astype(mx.int32) - 1, 0)
    above = mx.take_along_axis(reached, found, axis=-1) - mx.take_along_axis(held, found, axis=-1)
    return found.astype(mx.uint32), need - above


def _sums(numbers: mx.array, places: mx.array, num_places: int) -> mx.array:
    """Return sums (N, num_places): for each row, of its numbers (N, V) that have the same place in `places` (N, V) uint32.

    This is the transpose of a gather along the axis, which MLX has as one operation. `at[...].add` goes through index arrays of any number,
    which takes a CPU more than ten times as long.
    """
    nothing = mx.zeros((numbers.shape[0], num_places), numbers.dtype)
    _, (sums,) = mx.vjp(lambda x: mx.take_along_axis(x, places, axis=1), [nothing], [numbers])
    return sums


def ranked_floor(scores: mx.array, masses: mx.array, inside: mx.array, share: mx.array) -> mx.array:
    """Return, (N, 1), the lowest of scores (N, M) that stays. The scores fall along a row; those at the places `inside` hold masses (N,
    M) int64. share (N, 1) int64: the result of `shares_of`."""
    sums = mx.cumsum(masses, axis=-1)
    kept = inside & (sums - masses < _limit(sums[:, -1:], share))
    return mx.min(mx.where(kept, scores, mx.inf), axis=-1, keepdims=True)


def _whole(shares: mx.array, bits: int) -> mx.array:
    """Return shares, float32 in 0..1, in units of 2^-bits plus one half, to be cut to whole numbers: rounding down would lose half a
    unit for each token of a vocabulary's tail."""
    return shares * 2.0**bits + 0.5


def _limit(total: mx.array, share: mx.array) -> mx.array:
    """Return the least whole numbers (N, 1) that are at least the shares (N, 1) of `total` (N, 1) int64; one more than the total where
    every token stays."""
    high, low = total >> _SHARE, total & (ONE - 1)
    return mx.where(share > ONE, total + 1, high * share + ((low * share + ONE - 1) >> _SHARE))


_compiled_top_p = mx.compile(_top_p)
