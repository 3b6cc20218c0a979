"""Keys and values of a sliding-window attention layer, each row in a buffer that holds little more than the window.

The interface is that of cache/attention.py: the caller says where a row's committed tokens end, and what lies beyond is scratch. A buffer
is always in the order of positions and drops its oldest tokens only when it is full. So a forward sees what depends on the committed
tokens only. A view may begin before the window does: the caller masks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import mlx.core as mx

from mlxspec.cache.attention import AttentionLayerCache, View, copied
from mlxspec.cache.places import Places

# Views begin at multiples of this. A key then has the same place among a kernel's lanes whatever the width of the forward, so that sums
# over keys add up in the same order in a verify of many tokens and in single steps.
ALIGNMENT = 32
_SLACK = 256  # tokens a full buffer makes room for, or half a window, whichever is more


class WindowedLayerCache(AttentionLayerCache):
    """The keys and values of one sliding-window layer, in buffers keys[r], values[r] of shape (1, Hkv, capacity, D) for each row r. The
    first token in a buffer has position starts[r].

    A token sees the last `window` tokens up to and including itself. Forks share `starts` and the buffers. When a fork drops old tokens to
    make room, it keeps all that the cache it was forked from still needs; `_floors` are the lengths of that cache.
    """

    is_per_token = False

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        window: int,
        dtype: mx.Dtype,
        num_rows: int = 0,
        value_dim: int | None = None,
    ) -> None:
        super().__init__(num_kv_heads, head_dim, dtype, num_rows, value_dim)
        self.window = window
        self.starts = [0] * num_rows
        self._is_fork = False
        self._floors: list[int] | None = None  # of a fork, from its first append on

    def first_seen(self, length: int) -> int:
        """Return the position at which the view of a forward after `length` committed tokens begins: a multiple of 32."""
        return max(0, length - self.window + 1) // ALIGNMENT * ALIGNMENT

    def append(self, keys: mx.array, values: mx.array, places: Places) -> Sequence[View]:
        """Write keys and values as AttentionLayerCache.append does, and return the same kind of views. The lengths in `places` must be
        exact. A view ends with the written tokens and begins at most 31 tokens before the window of the first written token."""
        if self._is_fork and self._floors is None:
            self._floors = list(places.lengths)
        return super().append(keys, values, places)

    def view(self, row: int, length: int, least: int | None = None) -> tuple[mx.array, mx.array]:
        """Return the keys and values, among the first `length` tokens of a row, that a token after the first `least` tokens sees. The view
        begins up to 31 tokens earlier, at a multiple of 32. least None: `length`."""
        first = self.first_seen(length if least is None else least) - self.starts[row]
        end = length - self.starts[row]
        return self.keys[row][:, :, first:end], self.values[row][:, :, first:end]

    def _place(self, row: int, length: int) -> int:
        return length - self.starts[row]

    def fork(self, *, tails: bool = False) -> WindowedLayerCache:
        """Return a cache that shares this cache's buffers. tails: has no effect, as a window's buffers are small."""
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
        """Return copies of the keys and values that the next forward sees, (1, Hkv, n, D) each, and the position of their first token, ()
        int32. length: committed tokens of the row. start has no effect."""
        keys, values = self.view(row, length)
        return copied(keys), copied(values), mx.array(self.first_seen(length), mx.int32)

    def restore(self, *pieces: tuple[mx.array, ...]) -> None:  # type: ignore[override]
        """Replace all rows by one row with the state of a snapshot. The snapshot's arrays are copied, so other caches may use them too."""
        (state,) = pieces
        super().restore((state[0], state[1]))
        self.starts = [int(state[2].item())]

    def bytes_for(self, length: int, widest: int) -> int:
        seen = min(length, self.window + ALIGNMENT + widest)
        return self._bytes_of(seen + max(_SLACK, self.window // 2))

    @property
    def snapshot_bytes(self) -> int:
        """Return an upper bound of the bytes of a snapshot of one row of any length."""
        return (self.window + ALIGNMENT) * super().snapshot_bytes

    def _reserve(self, row: int, length: int, end: int) -> None:
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
