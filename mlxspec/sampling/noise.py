"""Noise keyed by (seed, position): a position of a request always draws the same noise, for the target and for drafters.

argmax(logits + Gumbel) is a draw from softmax(logits) (Gumbel 1954; Maddison et al. 2014). A drafter that adds the noise the target
will add at that position agrees with it far more often than an independent draw would. Draws that must be independent of the target's
noise have a stream of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


class NoiseStream(IntEnum):
    """Independent sources of noise for the same place."""

    TARGET = 0  # the choice of a token, also from what a rejection leaves
    DRAFT = 0x6A09E667F3BCC908  # a drafter's own choice
    ACCEPT = 0x3B67AE8584CAA73B  # whether a draft is accepted


_WORD = (1 << 64) - 1


class Shifted(NamedTuple):
    """Positions that only the device knows: first[i] + by[i], by (N,) int32 in 0..most."""

    first: Sequence[int]
    by: mx.array
    most: int


Positions = Sequence[int] | Shifted


def gumbel(
    seeds: Sequence[int], positions: Positions, vocab_size: int, stream: NoiseStream = NoiseStream.TARGET
) -> mx.array:
    """(N, V) float32, row i for seeds[i] and position i (the index, in prompt and answer together, of the token to be drawn)."""
    return _compiled_gumbel(keys_of(seeds, positions, [stream] * len(seeds)), vocab_size)


def _gumbel(keys: mx.array, vocab_size: int) -> mx.array:
    if keys.shape[0] == 1:
        return mx.random.gumbel((1, vocab_size), key=keys.reshape(2))
    return mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))(keys)


def noisiest(scores: mx.array, keys: mx.array) -> mx.array:
    """(N,) uint32: places of the highest sums of scores (N, V) and the noise of these keys (N, 2)."""
    return _compiled_noisiest(scores, keys)


def _noisiest(scores: mx.array, keys: mx.array) -> mx.array:
    return mx.argmax(scores + _gumbel(keys, scores.shape[1]), axis=-1)


_compiled_gumbel, _compiled_noisiest = mx.compile(_gumbel), mx.compile(_noisiest)


def keys_of(seeds: Sequence[int], positions: Positions, streams: Sequence[NoiseStream]) -> mx.array:
    """(N, 2) uint32, of each position with its stream. Where only the device knows the positions, it picks from the keys of all that are
    possible."""
    words, places = _words_at(seeds, positions, streams)
    keys = _halves(words)
    return keys if places is None else keys[places]


def _words_at(
    seeds: Sequence[int], positions: Positions, streams: Sequence[NoiseStream]
) -> tuple[NDArray[np.uint64], mx.array | None]:
    """64 random bits of all positions that are possible, and which of them are meant, (N,); None: those, in order."""
    if not isinstance(positions, Shifted):
        return _words(seeds, positions, streams), None
    first, by, most = positions
    shifts = range(most + 1)
    words = _words(
        [s for s in seeds for _ in shifts],
        [p + i for p in first for i in shifts],
        [s for s in streams for _ in shifts],
    )
    return words, mx.arange(len(first)) * (most + 1) + by


def _halves(words: NDArray[np.uint64]) -> mx.array:
    return mx.array(
        np.stack([words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32)
    )


def uniform(seeds: Sequence[int], positions: Positions, stream: NoiseStream) -> mx.array:
    """(N,) float32 in [0, 1), in steps of 2^-24."""
    words, places = _words_at(seeds, positions, [stream] * len(seeds))
    drawn = mx.array((words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24))
    return drawn if places is None else drawn[places]


def _words(
    seeds: Sequence[int], positions: Sequence[int], streams: Sequence[NoiseStream]
) -> NDArray[np.uint64]:
    """(N,) 64 random bits."""
    if len(seeds) != len(positions):
        raise ValueError(f"{len(seeds)} seeds for {len(positions)} positions")
    seed = np.asarray([(s & _WORD) ^ stream for s, stream in zip(seeds, streams, strict=True)], np.uint64)
    return _mix(_mix(seed) ^ np.asarray(positions, np.uint64))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014): neighbouring inputs give unrelated outputs."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
