"""Attention of Gemma models: rotations of whole or partial heads, windows, rows that attend to views of caches.

Knows arrays and views that end with the row's newest token; knows no parameters, no layers and no positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np

from mlxspec.cache.attention import Tailed, View
from mlxspec.cache.windowed import ALIGNMENT
from mlxspec.kernels.attention import attend, attend_tailed
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.gemma_config import RotaryShape
from mlxspec.models.layers import Rotary

_QUERY_BLOCK = 256  # queries attended together, multiple of ALIGNMENT: those of a long prompt do not see each other's windows


class GemmaRotary(Rotary):
    """Angles for all pairs of a head; pairs that are not rotated have angle 0."""

    def __init__(self, shape: RotaryShape) -> None:
        pairs = np.arange(shape.head_dim // 2, dtype=np.float64)
        frequencies = shape.scaling.apply(shape.theta ** (-2 * pairs / shape.head_dim), shape.theta)
        super().__init__(np.where(pairs < shape.num_pairs, frequencies, 0.0), shape.scaling.amplitude)


def attend_rows(
    queries: mx.array,
    views: Sequence[View],
    rows: FlatRows,
    scale: float,
    window: int | None,
    blocks: Sequence[tuple[range, ...]] = (),
    *,
    both_ways: bool = False,
) -> mx.array:
    """queries (N, Hq, D), per row keys and values (1, Hkv, n, D) that end with the row's last query -> (N, Hq * D). Those in two parts are
    of layers without a window. blocks: by row, ranges of its queries that all see each other; none: each sees what comes before it.
    both_ways: a window hides what is as far behind a query, too."""
    outs = []
    for r, view in enumerate(views):
        width = rows.widths[r]
        if width == 0:
            continue
        own = queries if rows.num_rows == 1 else queries[rows.starts[r] : rows.starts[r + 1]]
        # one token: the head axis and the token axis trade places without moving a byte
        own = own.reshape(1, -1, 1, queries.shape[2]) if width == 1 else own.swapaxes(0, 1)[None]
        if blocks and blocks[r] and not isinstance(view, Tailed):
            mask = _mask_with_blocks(width, view[0].shape[2], window, blocks[r], both_ways)
            out = attend(own, *view, scale, mask)
        elif isinstance(view, Tailed):
            out = attend_tailed(own, *view[:4], scale, view.mask)
        elif window is None:
            out = attend(own, *view, scale)
        else:
            out = attend_windowed(own, *view, scale, window)
        outs.append(out.reshape(1, -1) if width == 1 else out[0].swapaxes(0, 1).reshape(width, -1))
    return outs[0] if len(outs) == 1 else mx.concatenate(outs)


def attend_windowed(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, window: int
) -> mx.array:
    """Causal attention of one row in which a query sees the `window` keys that end at its own place.

    queries (1, Hq, w, D) stand at the end of keys, values (1, Hkv, n, D), which begin at a multiple of ALIGNMENT; returns (1, Hq, w, D).
    """
    width, length = queries.shape[2], keys.shape[2]
    if length <= window:
        return attend(queries, keys, values, scale)
    outs = []
    for start in range(0, width, _QUERY_BLOCK):
        end = min(start + _QUERY_BLOCK, width)
        seen = length - width + end
        first = max(0, length - width + start - window + 1) // ALIGNMENT * ALIGNMENT
        block = queries[:, :, start:end] if end - start < width else queries
        mask = _mask(end - start, seen - first, window)
        outs.append(attend(block, keys[:, :, first:seen], values[:, :, first:seen], scale, mask))
    return outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=2)


@lru_cache(maxsize=8)  # of one forward: its layers have two kinds at most
def _mask_with_blocks(
    width: int, length: int, window: int | None, blocks: tuple[range, ...], both_ways: bool
) -> mx.array:
    """(w, n) bool: which of n keys each of the w queries at their end sees, where the queries of a block see all keys of their block. A
    window hides the keys before it there too."""
    places = np.arange(length - width, length)
    distance = places[:, None] - np.arange(length)[None]
    seen = distance >= 0
    for block in blocks:
        first, last = length - width + block.start, length - width + block.stop
        seen[block.start : block.stop, first:last] = True
    distance = np.abs(distance) if both_ways else distance
    return mx.array(seen if window is None else seen & (distance < window))


@lru_cache(
    maxsize=256
)  # few shapes recur at every layer of every round: a width, and a place among ALIGNMENT
def _mask(width: int, length: int, window: int) -> mx.array:
    """(w, n) bool: which of n keys each of the w queries at their end sees."""
    distance = np.arange(length - width, length)[:, None] - np.arange(length)[None]
    return mx.array((distance >= 0) & (distance < window))
