"""Positions of a forward sampled in blocks, one after the other: the float32 copies that a block takes are gone before the next begins.

Sampling takes several arrays as large as the logits. A position's result does not depend on its block, because each row of logits is
sampled by itself. MLX makes room for the results of many operations before it runs them, so a block is waited for before the next one is
built. That costs a round its lead over the host. So positions are cut into blocks only where one block would take more bytes than the
device has for it, and never up to AT_ONCE positions, which most rounds have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import mlx.core as mx

from mlxspec.platform import device
from mlxspec.sampling.noise import Positions, Shifted
from mlxspec.sampling.truncate import numbers_held

AT_ONCE = 5  # positions: a round's own token and four drafted ones
MOST_COPIES = 16  # arrays (n, V) of float32 that sampling n positions holds at once, whatever is asked
T = TypeVar("T")


def block_size(num: int, vocab_size: int, copies: int) -> int:
    """Positions that are sampled together of `num`. copies: arrays (n, V) float32 that sampling n positions holds at once."""
    if num <= AT_ONCE or not copies:
        return num
    return max(1, device.sampling_bytes() // (4 * copies * numbers_held(vocab_size)))


def most_bytes(num: int, vocab_size: int) -> int:
    """What sampling so many positions takes beside their logits, at most."""
    of_one = 4 * MOST_COPIES * numbers_held(vocab_size)
    block = min(num, max(1, device.sampling_bytes() // of_one))
    return of_one * max(block, min(num, AT_ONCE))


def in_blocks(logits: mx.array, size: int, sample: Callable[[slice, mx.array], mx.array]) -> mx.array:
    """What `sample` gives for each block of logits (N, V), put together. It gets which positions a block has, and their logits."""
    num = logits.shape[0]
    if size >= num:
        return sample(slice(0, num), logits)
    parts: list[mx.array] = []
    for start in range(0, num, size):
        device.finish(*parts[-1:])
        some = slice(start, min(start + size, num))
        parts.append(sample(some, logits[some]))
    return mx.concatenate(parts)


def positions_of(positions: Positions, some: slice) -> Positions:
    """Those of a block."""
    if isinstance(positions, Shifted):
        return Shifted(positions.first[some], positions.by[some], positions.most)
    return positions[some]


def positions_at(positions: Positions, places: Sequence[int]) -> Positions:
    """Those at these places."""
    if isinstance(positions, Shifted):
        by = positions.by[mx.array(list(places))]
        return Shifted([positions.first[i] for i in places], by, positions.most)
    return [positions[i] for i in places]


def part_of(values: Sequence[T] | None, some: slice) -> Sequence[T] | None:
    """Those of a block, None where there are none at all."""
    return None if values is None else values[some]
