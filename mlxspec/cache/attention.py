"""Keys and values of one attention layer, each row in a growing buffer of its own.

The cache keeps no lengths: at every append the caller says where a row's committed tokens end. What lies beyond that length is scratch.
So rollback needs no work here, and a fork may write there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlxspec.cache.places import Places, seen_behind
from mlxspec.errors import CacheError

KV = tuple[mx.array, mx.array]  # keys and values (1, Hkv, n, D)
_STEP = 256  # buffers grow in these many tokens, or an eighth, whichever is more
# bytes of a row's keys: below them copying keys and values takes a GPU less than the six launches more of attention with a tail
_WORTH_A_TAIL = 1 << 20


class Tailed(NamedTuple):
    """A row's keys and values in two parts: a beginning that is only read, and a tail. (1, Hkv, L, D) and (1, Hkv, n, D); the queries stand
    at the end of the tail. mask (w, L + n) bool: what each of w queries sees; None: everything."""

    keys: mx.array
    values: mx.array
    tail_keys: mx.array
    tail_values: mx.array
    mask: mx.array | None


View = KV | Tailed


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
        self._tails: dict[int, _Tail] | None = None  # of a fork that writes no buffers, by row

    def append(self, keys: mx.array, values: mx.array, places: Places) -> Sequence[View]:
        """Write keys, values (1, N, Hkv, D) or (N, Hkv, D) at `places`. Return for each row views (1, Hkv, length + width, D), without
        meaning for a row of width 0. Where lengths are only bounds, `places.masks` says which tokens of a view a query sees, unless the
        view is Tailed."""
        keys, values = (x if x.ndim == 4 else x[None] for x in (keys, values))
        if self._tails is not None:
            return self._append_to_tails(self._tails, keys, values, places)
        views: list[View] = []
        rows = places.rows
        for r, (length, width) in enumerate(zip(places.lengths, rows.widths, strict=True)):
            end = length + width
            if width == 0:
                views.append((self.keys[r], self.values[r]))
                continue
            self._reserve(r, length, end)
            for buffers, new in ((self.keys, keys), (self.values, values)):
                new = new if rows.num_rows == 1 else new[:, rows.starts[r] : rows.starts[r + 1]]
                new = new.reshape(1, -1, 1, new.shape[3]) if width == 1 else new.swapaxes(1, 2)
                if places.starts is None:
                    buffers[r][:, :, length:end] = new
                else:
                    buffers[r] = mx.slice_update(buffers[r], new, places.starts[r], axes=(2,))
            views.append((self.keys[r][:, :, :end], self.values[r][:, :, :end]))
        return views

    def view(self, row: int, length: int) -> tuple[mx.array, mx.array]:
        """Keys and values of the first `length` tokens, (1, Hkv, length, D) each. Drop them before the next append."""
        return self.keys[row][:, :, :length], self.values[row][:, :, :length]

    def _append_to_tails(
        self, tails: dict[int, _Tail], keys: mx.array, values: mx.array, places: Places
    ) -> list[View]:
        views: list[View] = []
        rows = places.rows
        for r, (length, width) in enumerate(zip(places.lengths, rows.widths, strict=True)):
            if width == 0:
                views.append((self.keys[r], self.values[r]))
                continue
            k, v = (x[:, rows.starts[r] : rows.starts[r + 1]].swapaxes(1, 2) for x in (keys, values))
            tail = tails.get(r)
            if tail is None:
                start = None if places.starts is None else places.starts[r]
                tail = _Tail(length, start, k, v)
            else:
                k, v = (mx.concatenate(pair, axis=2) for pair in ((tail.keys, k), (tail.values, v)))
                tail = tail._replace(keys=k, values=v)
            tails[r] = tail
            mask = seen_behind(tail.begin, tail.start, width, tail.keys.shape[2])
            begin = self.keys[r][:, :, : tail.begin], self.values[r][:, :, : tail.begin]
            views.append(Tailed(*begin, tail.keys, tail.values, mask))
        return views

    def fork(self, *, tails: bool = False) -> AttentionLayerCache:
        """The same buffers under another owner. The last writer owns what lies beyond the committed length.

        tails: the fork reads the buffers and writes what is appended elsewhere. A GPU updates a buffer in place only when everything that
        read it has run; forwards on a fork follow each other too fast for that, so each would copy the whole buffer.
        """
        if self._tails is not None:
            raise CacheError("A fork that writes no buffers cannot be forked.")
        twin = object.__new__(AttentionLayerCache)
        twin.shape, twin.dtype, twin.keys, twin.values = self.shape, self.dtype, self.keys, self.values
        twin._tails = {} if tails and any(k.nbytes >= _WORTH_A_TAIL for k in self.keys) else None
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


class _Tail(NamedTuple):
    """What a row has behind its first `begin` tokens, of which only the first start (1,) int32 count where that is known to the device
    only: keys, values (1, Hkv, n, D)."""

    begin: int
    start: mx.array | None
    keys: mx.array
    values: mx.array


def copied(x: mx.array) -> mx.array:
    """A copy in memory of its own. `mx.contiguous` returns an array that is contiguous already, and a reference to a live buffer would turn
    the next write into a copy of the whole buffer."""
    return mx.concatenate([x, x[:0]])
