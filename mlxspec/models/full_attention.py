"""Attention of all rows of a forward to their whole contexts, for layers that have no window. Knows arrays and caches; no parameters."""

from __future__ import annotations

import mlx.core as mx

from mlxspec.cache.attention import AttentionLayerCache, Tailed
from mlxspec.cache.places import Places
from mlxspec.kernels.attention import attend, attend_tailed


def attend_in_places(
    q: mx.array, k: mx.array, v: mx.array, places: Places, cache: AttentionLayerCache, scale: float
) -> mx.array:
    """q (1, N, Hq, D), k and v (1, N, Hkv, D): write k and v where `places` has them, attend row by row; returns (N, Hq * D)."""
    outs, rows = [], places.rows
    for r, view in enumerate(cache.append(k, v, places)):
        width = rows.widths[r]
        if width == 0:
            continue
        queries = q if rows.num_rows == 1 else q[:, rows.starts[r] : rows.starts[r + 1]]
        if isinstance(view, Tailed):
            out = attend_tailed(queries.swapaxes(1, 2), *view[:4], scale, view.mask)
            outs.append(out[0].swapaxes(0, 1).reshape(width, -1))
            continue
        keys, values = view
        mask = places.masks[r]
        # one token: the head axis and the token axis trade places without moving a byte
        queries = queries.reshape(1, -1, 1, q.shape[3]) if width == 1 else queries.swapaxes(1, 2)
        ends = None if isinstance(keys, mx.array) else places.ends(r)
        out = attend(queries, keys, values, scale, mask, ends)  # (1, Hq, w, D)
        outs.append(out.reshape(1, -1) if width == 1 else out.swapaxes(1, 2).reshape(width, -1))
    return outs[0] if len(outs) == 1 else mx.concatenate(outs)
