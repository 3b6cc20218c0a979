"""Keys and values of one attention layer, each row in a growing buffer of its own.

The cache keeps no lengths: at every append the caller says where a row's committed tokens end. What lies beyond that length is scratch.
So rollback needs no work here, and a fork may write there.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxspec.cache.places import Places

KV = tuple[mx.array, mx.array]  # keys and values (1, Hkv, n, D)
_STEP = 256  # buffers grow in these many tokens, or an eighth, whichever is more


class AttentionLayerCache:
    """Buffers keys[r], values[r] of shape (1, Hkv, capacity, D).

    `keys` and `values` are lists shared with forks on purpose: an update in place needs the one and only reference to an array
    (an old one held "just in case" turns a write of 4 tokens into a copy of the whole buffer).
    """

    is_recurrent = False
    is_per_token = True  # what it keeps of a text is what it keeps of each token, so it can be cut and joined

    def __init__(self, num_kv_heads: int, head_dim: int, dtype: mx.Dtype, num_rows: int = 0) -> None:
        self.shape = (num_kv_heads, head_dim)
        self.dtype = dtype
        self.keys: list[mx.array] = [self._buffer(0) for _ in range(num_rows)]
        self.values: list[mx.array] = [self._buffer(0) for _ in range(num_rows)]

    def append(self, keys: mx.array, values: mx.array, places: Places) -> list[tuple[mx.array, mx.array]]:
        """Write keys, values (N, Hkv, D) at `places`. Return for each row views (1, Hkv, length + width, D), without meaning for a
        row of width 0. Where lengths are only bounds, `places.masks` says which tokens of a view a query sees."""
        views, rows = [], places.rows
        for r, (length, width) in enumerate(zip(places.lengths, rows.widths, strict=True)):
            end = length + width
            if width == 0:
                views.append((self.keys[r], self.values[r]))
                continue
            self._reserve(r, length, end)
            for buffers, new in ((self.keys, keys), (self.values, values)):
                new = new if rows.num_rows == 1 else new[rows.starts[r] : rows.starts[r + 1]]
                new = new.reshape(1, -1, 1, new.shape[2]) if width == 1 else new.swapaxes(0, 1)[None]
                if places.starts is None:
                    buffers[r][:, :, length:end] = new
                else:
                    buffers[r] = mx.slice_update(buffers[r], new, places.starts[r], axes=(2,))
            views.append((self.keys[r][:, :, :end], self.values[r][:, :, :end]))
        return views

    def view(self, row: int, length: int) -> tuple[mx.array, mx.array]:
        """Keys and values of the first `length` tokens, (1, Hkv, length, D) each. Drop them before the next append."""
        return self.keys[row][:, :, :length], self.values[row][:, :, :length]

    def fork(self) -> AttentionLayerCache:
        """The same buffers under another owner. The last writer owns what lies beyond the committed length."""
        twin = object.__new__(AttentionLayerCache)
        twin.shape, twin.dtype, twin.keys, twin.values = self.shape, self.dtype, self.keys, self.values
        return twin

    def join(self, other: AttentionLayerCache) -> None:
        """Take over the rows of `other`, behind our own. No copying."""
        self.keys += other.keys
        self.values += other.values

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.keys[:] = [self.keys[r] for r in rows]
        self.values[:] = [self.values[r] for r in rows]

    def snapshot(self, row: int, length: int, start: int = 0) -> KV:
        """Copies of the committed part from `start` on, (1, Hkv, length - start, D) each."""
        return copied(self.keys[row][:, :, start:length]), copied(self.values[row][:, :, start:length])

    def restore(self, *pieces: KV) -> None:
        """Become one row that holds these pieces in order. Their arrays stay usable for others."""
        room = self._buffer(_STEP)
        self.keys = [mx.concatenate([*(p[0] for p in pieces), room], axis=2)]
        self.values = [mx.concatenate([*(p[1] for p in pieces), room], axis=2)]

    @property
    def arrays(self) -> list[mx.array]:
        return self.keys + self.values

    def bytes_for(self, length: int, widest: int) -> int:
        """Upper bound of the bytes of a row of `length` tokens, however it grew. widest: tokens of the widest forward."""
        return self._bytes_of(length + max(_STEP, length // 8))

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of a snapshot for each token."""
        num_heads, head_dim = self.shape
        return 2 * num_heads * head_dim * self.dtype.size

    def _bytes_of(self, capacity: int) -> int:
        """Bytes of one row's buffers, in whole steps."""
        num_heads, head_dim = self.shape
        return 2 * (-(-capacity // _STEP) * _STEP) * num_heads * head_dim * self.dtype.size

    def _reserve(self, row: int, length: int, end: int) -> None:
        capacity = self.keys[row].shape[2]
        if end <= capacity:
            return
        grown = max(end, capacity + max(_STEP, capacity // 8))
        extra = -(-grown // _STEP) * _STEP - length
        for buffers in (self.keys, self.values):
            buffers[row] = mx.concatenate([buffers[row][:, :, :length], self._buffer(extra)], axis=2)

    def _buffer(self, capacity: int) -> mx.array:
        return mx.zeros((1, self.shape[0], capacity, self.shape[1]), self.dtype)


def copied(x: mx.array) -> mx.array:
    """A copy in memory of its own. `mx.contiguous` returns an array that is contiguous already, and a reference to a live buffer would turn
    the next write into a copy of the whole buffer."""
    return mx.concatenate([x, x[:0]])
