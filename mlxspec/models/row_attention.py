"""Attention of all rows of a forward, each to its own keys and values: whole contexts, sliding windows, sinks, blocks of image tokens.

Knows arrays and views that end with the row's newest token; knows no parameters, no layers and no positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import mlx.core as mx
import numpy as np

from mlxspec.cache.attention import AttentionLayerCache, Tailed, View
from mlxspec.cache.places import Places
from mlxspec.cache.windowed import ALIGNMENT
from mlxspec.kernels.attention import attend, attend_tailed
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.quantized_kv import Stored, unpacked

_QUERY_BLOCK = 256  # queries attended together, multiple of ALIGNMENT: those of a long prompt do not see each other's windows


def attend_in_places(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    places: Places,
    cache: AttentionLayerCache,
    scale: float,
    *,
    at_end: bool = False,
) -> mx.array:
    """Write keys and values (1, N, Hkv, D) at `places`, attend with queries (1, N, Hq, D) row by row, and return the output (N, Hq * D).
    at_end: only the last query of each active row attends, and the output has one line for each of them."""
    rows, views = places.rows, cache.append(k, v, places)
    if not at_end or places.exact is not None:
        out = attend_rows(q, views, rows, scale, places=places)
        return rows.last(out) if at_end else out
    return attend_rows(rows.last(q[0])[None], views, FlatRows(tuple(min(n, 1) for n in rows.widths)), scale)


def attend_rows(
    queries: mx.array,
    views: Sequence[View],
    rows: FlatRows,
    scale: float,
    window: int | None = None,
    blocks: Sequence[tuple[range, ...]] = (),
    *,
    both_ways: bool = False,
    places: Places | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend row by row, and return the output (N, Hq * Dv). queries: (N, Hq, D) or (1, N, Hq, D). views: for each row keys (1, Hkv, n, D)
    and values (1, Hkv, n, Dv) whose last token is the row's last query.

    window: how many keys a query sees, its own included; None for all. Tailed views must have no window. blocks: for each row ranges of its
    queries that all see each other; other queries see the keys before them. both_ways: whether the window also limits the keys after a
    query. places: where lengths are only upper bounds, gives the keys that each query sees; a window needs exact lengths. sinks (Hq,): an
    additional score of each head that takes weight and adds nothing to the output.
    """
    outs = []
    for r, view in enumerate(views):
        width = rows.widths[r]
        if width == 0:
            continue
        own = queries if rows.num_rows == 1 else queries[..., rows.starts[r] : rows.starts[r + 1], :, :]
        # one token: the head axis and the token axis trade places without moving a byte
        size = queries.shape[-1]
        own = own.reshape(1, -1, 1, size) if width == 1 else own.reshape(1, width, -1, size).swapaxes(1, 2)
        out = _attend_view(
            own,
            view,
            scale,
            window,
            blocks[r] if blocks else (),
            both_ways=both_ways,
            mask=None if places is None else places.masks[r],
            ends=None if places is None or isinstance(view[0], mx.array) else places.ends(r),
            sinks=sinks,
        )
        outs.append(out.reshape(1, -1) if width == 1 else out.swapaxes(1, 2).reshape(width, -1))
    return outs[0] if len(outs) == 1 else mx.concatenate(outs)


def _attend_view(
    queries: mx.array,
    view: View,
    scale: float,
    window: int | None,
    blocks: tuple[range, ...],
    *,
    both_ways: bool,
    mask: mx.array | None,
    ends: mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attend with the queries (1, Hq, w, D) of one row, and return the output (1, Hq, w, Dv). mask, ends: the keys that each query sees,
    where lengths are only upper bounds. Other parameters are those of `attend_rows`."""
    by_mlx = sinks is not None or view[0].shape[3] != view[1].shape[3]
    core: Callable[..., mx.array] = partial(_by_mlx, sinks=sinks) if by_mlx else attend
    if isinstance(view, Tailed):
        if not by_mlx:
            return attend_tailed(queries, *view[:4], scale, view.mask)
        keys, values = (
            mx.concatenate([unpacked(a), unpacked(b)], axis=2)
            for a, b in zip(view[:2], view[2:4], strict=True)
        )
        return core(queries, keys, values, scale, view.mask)
    if blocks:
        return core(
            queries,
            *view,
            scale,
            _mask_with_blocks(queries.shape[2], view[0].shape[2], window, blocks, both_ways),
        )
    if window is None:
        return core(queries, *view, scale, mask, ends)
    return _attend_windowed(core, queries, *view, scale, window)


def _by_mlx(
    queries: mx.array,
    keys: Stored,
    values: Stored,
    scale: float,
    mask: mx.array | None = None,
    ends: mx.array | None = None,
    *,
    sinks: mx.array | None,
) -> mx.array:
    """Attend as `attend` does, by MLX's operations alone, which support sinks and values of another size than keys. Return the output (1,
    Hq, w, Dv)."""
    keys, values = unpacked(keys), unpacked(values)
    width, length = queries.shape[2], keys.shape[2]
    if mask is None and width > _QUERY_BLOCK and keys.shape[3] != values.shape[3]:
        # MLX writes scores out for these: those of a whole prompt would take gigabytes
        outs = []
        for start in range(0, width, _QUERY_BLOCK):
            end = min(start + _QUERY_BLOCK, width)
            seen = length - width + end
            block = queries[:, :, start:end]
            outs.append(_by_mlx(block, keys[:, :, :seen], values[:, :, :seen], scale, sinks=sinks))
        return mx.concatenate(outs, axis=2)
    what = mask if mask is not None else "causal" if width > 1 else None
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=what, sinks=sinks)


def _attend_windowed(
    core: Callable[..., mx.array], queries: mx.array, keys: Stored, values: Stored, scale: float, window: int
) -> mx.array:
    """Return the output (1, Hq, w, Dv) of causal attention of one row in which a query sees the last `window` keys, its own included.

    queries (1, Hq, w, D) belong to the last w of the keys and values (1, Hkv, n, D), whose first position is a multiple of 32. core: the
    function that attends, such as `attend`.
    """
    width, length = queries.shape[2], keys.shape[2]
    if length <= window:
        return core(queries, keys, values, scale)
    keys, values = unpacked(keys), unpacked(values)
    outs = []
    for start in range(0, width, _QUERY_BLOCK):
        end = min(start + _QUERY_BLOCK, width)
        seen = length - width + end
        first = max(0, length - width + start - window + 1) // ALIGNMENT * ALIGNMENT
        block = queries[:, :, start:end] if end - start < width else queries
        mask = _mask(end - start, seen - first, window)
        outs.append(core(block, keys[:, :, first:seen], values[:, :, first:seen], scale, mask))
    return outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=2)


@lru_cache(maxsize=8)  # of one forward: its layers have two kinds at most
def _mask_with_blocks(
    width: int, length: int, window: int | None, blocks: tuple[range, ...], both_ways: bool
) -> mx.array:
    """Return the mask (width, length) bool of the keys that each of the last `width` queries sees, where the queries of a block see all
    keys of their block. A window limits these too, before a query and, with both_ways, after it."""
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
    """Return the mask (width, length) bool of the keys that each of the last `width` queries sees: at most `window`, its own included."""
    distance = np.arange(length - width, length)[:, None] - np.arange(length)[None]
    return mx.array((distance >= 0) & (distance < window))
