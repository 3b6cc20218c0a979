"""Noise keyed by (seed, position): a position of a request always draws the same noise, for the target and for drafters.

argmax(logits + Gumbel) is a draw from softmax(logits) (Gumbel 1954; Maddison et al. 2014). A drafter that adds the noise the target
will add at that position agrees with it far more often than an independent draw would. Whether XTC happens
is drawn from a source of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

_XTC = 0x510E527FADE682D1  # a source of its own for whether XTC happens: independent of the choice of a token at the same place
_WORD = (1 << 64) - 1


class Shifted(NamedTuple):
    """Positions that only the device knows: first[i] + by[i], by (N,) int32 in 0..most."""

    first: Sequence[int]
    by: mx.array
    most: int


Positions = Sequence[int] | Shifted


def positions_at(positions: Positions, places: Sequence[int]) -> Positions:
    """Return the positions at these places of the list."""
    if not isinstance(positions, Shifted):
        return [positions[i] for i in places]
    return Shifted([positions.first[i] for i in places], positions.by[mx.array(list(places))], positions.most)


def gumbel(seeds: Sequence[int], positions: Positions, vocab_size: int) -> mx.array:
    """Return the Gumbel noise (N, V) float32 of the choices at these positions."""
    return gumbel_of(keys_of(seeds, positions), vocab_size)


def gumbel_of(keys: mx.array, vocab_size: int) -> mx.array:
    """Return the Gumbel noise (N, V) float32 of keys (N, 2)."""
    return _compiled_gumbel(keys, vocab_size)


def _gumbel(keys: mx.array, vocab_size: int) -> mx.array:
    if keys.shape[0] == 1:
        return mx.random.gumbel((1, vocab_size), key=keys.reshape(2))
    return mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))(keys)


def noisiest(scores: mx.array, keys: mx.array) -> mx.array:
    """Return, (N,) uint32, the token with the highest sum of its score (N, V) and the noise of keys (N, 2)."""
    return _compiled_noisiest(scores, keys)


def _noisiest(scores: mx.array, keys: mx.array) -> mx.array:
    return mx.argmax(scores + _gumbel(keys, scores.shape[1]), axis=-1)


_compiled_gumbel, _compiled_noisiest = mx.compile(_gumbel), mx.compile(_noisiest)


def keys_of(seeds: Sequence[int], positions: Positions) -> mx.array:
    """Return the keys (N, 2) uint32 of the noise at each position. A position is the index, in prompt and answer together, of the token
    to be drawn. Where only the device knows the positions, it picks from the keys of all possible ones."""
    words, places = _words_at(seeds, positions)
    keys = mx.array(words, mx.uint32)
    return keys if places is None else keys[places]


def xtc_coins(seeds: Sequence[int], positions: Positions) -> mx.array:
    """Return numbers (N,) float32 in [0, 1), in steps of 2^-24. XTC is applied at a position whose number is below its probability."""
    words, places = _words_at(seeds, positions, _XTC)
    drawn = mx.array([(high >> 8) * 2.0**-24 for high, _ in words], mx.float32)
    return drawn if places is None else drawn[places]


def _words_at(
    seeds: Sequence[int], positions: Positions, source: int = 0
) -> tuple[list[tuple[int, int]], mx.array | None]:
    """Return random words of all possible positions, and the indices (N,) of the actual ones among them; None where these are all, in
    order."""
    first, by, most = positions if isinstance(positions, Shifted) else (positions, None, 0)
    if len(seeds) != len(first):
        raise ValueError(f"{len(seeds)} seeds for {len(first)} positions")
    words = [
        _words(seed, p + i, source) for seed, p in zip(seeds, first, strict=True) for i in range(most + 1)
    ]
    if by is not None and len(first) > 1:
        by = by + mx.array([i * (most + 1) for i in range(len(first))], mx.int32)
    return words, by


@lru_cache(1 << 14)  # a position is asked for by each draft that reaches it, and by the target
def _words(seed: int, position: int, source: int) -> tuple[int, int]:
    """Return two random words of 32 bits."""
    mixed = _mix(_mix((seed & _WORD) ^ source) ^ position)
    return mixed >> 32, mixed & 0xFFFFFFFF


def _mix(x: int) -> int:
    """Mix the bits of x by SplitMix64's finalizer (Steele, Lea, Flood 2014), so that neighbouring inputs give unrelated outputs."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)
