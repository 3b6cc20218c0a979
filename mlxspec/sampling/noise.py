"""Gumbel noise keyed by (seed, position): the same place in the same request always draws the same noise, whoever asks.

argmax(logits + Gumbel) is a draw from softmax(logits) (Gumbel 1954; Maddison et al. 2014). A drafter that adds the noise the target
will add at that position agrees with it far more often than an independent draw would. Knows no logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

_MASK = (1 << 64) - 1


def gumbel(seeds: Sequence[int], positions: Sequence[int], vocab_size: int) -> mx.array:
    """(N, V) float32, row i for seeds[i] and positions[i] (the index, in prompt and answer together, of the token to be drawn)."""
    words = [_mix(_mix(seed & _MASK) ^ position) for seed, position in zip(seeds, positions, strict=True)]
    keys = mx.array(np.asarray([(w >> 32, w & 0xFFFFFFFF) for w in words], np.uint32))
    if len(words) == 1:
        return mx.random.gumbel((1, vocab_size), key=keys[0])
    return mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))(keys)


def _mix(x: int) -> int:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014): neighbouring inputs give unrelated outputs."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
