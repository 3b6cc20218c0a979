"""Keys and values of a sliding-window attention layer, each row in a buffer that holds little more than the window.

The interface is that of cache/attention.py: the caller says where a row's committed tokens end, and what lies beyond is scratch. A buffer
is always in the order of positions and drops its oldest tokens only when it is full. So a forward sees what depends on the committed
tokens only. A view may begin before the window does: the caller masks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import mlx.core as mx

from mlxspec.cache.attention import AttentionLayerCache, copied
from mlxspec.cache.places import Places

# Views begin at multiples of this. A key then has the same place among a kernel's lanes whatever the width of the forward, so that sums
# over keys add up in the same order in a verify of many tokens and in single steps.
ALIGNMENT = 32
_SLACK = 256  # tokens a full buffer makes room for, or half a window, whichever is more


class WindowedLayerCache(AttentionLayerCache):
    """Buffers keys[r], values[r] of shape (1, Hkv, capacity, D), of which the first token is that at position starts[r].

    A token sees the `window` tokens that end with itself. `starts` is shared with forks, as buffers are. A fork that makes room keeps
    what its family's root still needs: `floors` are the root's lengths.
    """

    is_per_token = False

    def __init__(
        self, num_kv_heads: int, head_dim: int, window: int, dtype: mx.Dtype, num_rows: int = 0
    ) -> None:
        super().__init__(num_kv_heads, head_dim, dtype, num_rows)
        self.window = window
        self.starts = [0] * num_rows
        self._is_fork = False
        self._floors: list[int] | None = None  # of a fork, from its first append on

    def first_seen(self, length: int) -> int:
        """Position at which the view of a forward after `length` committed tokens begins."""
        return max(0, length - self.window + 1) // ALIGNMENT * ALIGNMENT

    def append(self, keys: mx.array, values: mx.array, places: Places) -> list[tuple[mx.array, mx.array]]:
        """Write keys, values (N, Hkv, D) behind each row's lengths, which must be exact; return per row views (1, Hkv, n, D) that end with
        what was written and begin at or up to ALIGNMENT - 1 tokens before the first token's window; they mean nothing for a row of
        width 0."""
        rows = places.rows
        keys, values = (x if x.ndim == 4 else x[None] for x in (keys, values))
        if self._is_fork and self._floors is None:
            self._floors = list(places.lengths)
        views = []
        for r, (length, width) in enumerate(zip(places.lengths, rows.widths, strict=True)):
            if width == 0:
                views.append((self.keys[r], self.values[r]))
                continue
            self._make_room(r, length, length + width)
            begin, end = length - self.starts[r], length + width - self.starts[r]
            for buffers, new in ((self.keys, keys), (self.values, values)):
                new = new if rows.num_rows == 1 else new[:, rows.starts[r] : rows.starts[r + 1]]
                new = new.reshape(1, -1, 1, new.shape[3]) if width == 1 else new.swapaxes(1, 2)
                buffers[r][:, :, begin:end] = new
            first = self.first_seen(length) - self.starts[r]
            views.append((self.keys[r][:, :, first:end], self.values[r][:, :, first:end]))
        return views

    def view(self, row: int, length: int, least: int | None = None) -> tuple[mx.array, mx.array]:
        """Keys and values that a token after `length` committed ones sees, and up to ALIGNMENT - 1 tokens before them. least: what
        length is at least, where it is a bound; the view begins where a token after so many would see first."""
        first = self.first_seen(length if least is None else least) - self.starts[row]
        end = length - self.starts[row]
        return self.keys[row][:, :, first:end], self.values[row][:, :, first:end]

    def can_truncate(self, row: int, length: int) -> bool:
        """Whether all tokens that a token after `length` tokens sees are still here."""
        return self.starts[row] <= self.first_seen(length)

    def fork(self, *, tails: bool = False) -> WindowedLayerCache:
        """tails: without effect, as a window's buffers are small."""
        twin = copy.copy(self)
        twin._is_fork = True
        return twin

    def join(self, other: AttentionLayerCache) -> None:
        super().join(other)
        if isinstance(other, WindowedLayerCache):
            self.starts += other.starts

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.starts[:] = [self.starts[r] for r in rows]

    def snapshot(self, row: int, length: int, start: int = 0) -> tuple[mx.array, ...]:  # type: ignore[override]
        """Copies of what the next forward sees, (1, Hkv, n, D) each, and the position of their first token, () int32."""
        keys, values = self.view(row, length)
        return copied(keys), copied(values), mx.array(self.first_seen(length), mx.int32)

    def restore(self, *pieces: tuple[mx.array, ...]) -> None:  # type: ignore[override]
        """Become one row that holds this state. Its arrays stay usable for others."""
        (state,) = pieces
        super().restore((state[0], state[1]))
        self.starts = [int(state[2].item())]

    def bytes_for(self, length: int, widest: int) -> int:
        seen = min(length, self.window + ALIGNMENT + widest)
        return self._bytes_of(seen + max(_SLACK, self.window // 2))

    @property
    def snapshot_bytes(self) -> int:
        """Upper bound of the bytes of a snapshot of a row that is longer than the window."""
        return (self.window + ALIGNMENT) * super().snapshot_bytes

    def _make_room(self, row: int, length: int, end: int) -> None:
        start = self.starts[row]
        if end - start <= self.keys[row].shape[2]:
            return
        needed = length if self._floors is None else min(length, self._floors[row])
        keep = max(start, self.first_seen(needed))
        extra = end - length + max(_SLACK, self.window // 2)
        for buffers, form in zip(self.parts, self._forms, strict=True):
            kept = buffers[row][:, :, keep - start : length - start]
            buffers[row] = mx.concatenate([kept, self._buffer(form, extra)], axis=2)
        self.starts[row] = keep
