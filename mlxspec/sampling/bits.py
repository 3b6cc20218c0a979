"""Sets of tokens as packed bits: bit i % 32 of word i // 32 is token i. Grammars, bad words and forced tokens give the allowed tokens so.

`unpack` makes a mask of them on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Bits: TypeAlias = NDArray[np.uint32]  # (ceil(V / 32),)


def num_words(vocab_size: int) -> int:
    return (vocab_size + 31) // 32


def only(tokens: Iterable[int], vocab_size: int) -> Bits:
    """Return the set of these tokens."""
    flags = np.zeros(num_words(vocab_size) * 32, np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)


def all_but(tokens: Iterable[int], vocab_size: int) -> Bits:
    """Return the set of all tokens except these."""
    flags = np.zeros(num_words(vocab_size) * 32, np.uint8)
    flags[:vocab_size] = 1
    flags[list(tokens)] = 0
    return np.packbits(flags, bitorder="little").view(np.uint32)


def holds(bits: Bits, token: int) -> bool:
    return bool(bits[token >> 5] >> np.uint32(token & 31) & np.uint32(1))


def unpack(bits: mx.array, vocab_size: int) -> mx.array:
    """Unpack sets (N, ceil(V / 32)) uint32 into a mask (N, V) bool."""
    flags = (bits[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return flags.reshape(bits.shape[0], -1)[:, :vocab_size].astype(mx.bool_)
