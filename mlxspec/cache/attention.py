"""Keys and values of one attention layer, each row in a growing buffer of its own.

The cache keeps no lengths: at every append the caller says where a row's committed tokens end. What lies beyond that length is scratch.
So rollback needs no work here, and a fork may write there.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import mlx.core as mx

from mlxspec.cache.places import Places, seen_behind
from mlxspec.errors import CacheError
from mlxspec.kernels.quantized_kv import Stored

KV = tuple[
    mx.array, ...
]  # of n tokens: keys and values (1, Hkv, n, D), or what a cache stores in their place, in the order of its parts
_STEP = 256  # buffers grow in these many tokens, or an eighth, whichever is more
# bytes of a row's keys: below them copying keys and values takes a GPU less than the six launches more of attention with a tail
_WORTH_A_TAIL = 1 << 20


class Tailed(NamedTuple):
    """The keys and values of one row in two parts: a beginning (1, Hkv, L, D) that is only read, and a tail (1, Hkv, n, D). The queries are
    the last tokens of the tail. mask (w, L + n) bool: which keys each of the w queries sees; None: every query sees all keys."""

    keys: Stored
    values: Stored
    tail_keys: Stored
    tail_values: Stored
    mask: mx.array | None


View: TypeAlias = tuple[Stored, Stored] | Tailed


class AttentionLayerCache:
    """The keys and values of one attention layer, in a buffer (1, Hkv, capacity, ·) for each row and each part. The parts are keys and
    values; a subclass may have others.

    The lists in `parts` are shared with forks on purpose. MLX updates an array in place only where nothing else refers to the array: a
    second reference would turn a write of 4 tokens into a copy of the whole buffer.
    """

    is_recurrent = False
    is_per_token = True  # what it keeps of a text is what it keeps of each token, so it can be cut and joined

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        dtype: mx.Dtype,
        num_rows: int = 0,
        value_dim: int | None = None,
    ) -> None:
        """Make empty buffers for `num_rows` rows. head_dim: size of a key of one head; value_dim: size of a value of one head, None where
        it equals head_dim."""
        self.shape = (num_kv_heads, head_dim)
        self.value_dim = head_dim if value_dim is None else value_dim
        self.dtype = dtype
        self.parts: tuple[list[mx.array], ...] = tuple(
            [self._buffer(form, 0) for _ in range(num_rows)] for form in self._forms
        )
        self._tails: dict[int, _Tail] | None = None  # of a fork that writes no buffers, by row

    @property
    def keys(self) -> list[mx.array]:
        """Return the key buffers (1, Hkv, capacity, ·), one for each row. A quantized cache returns the packed codes without scales and
        biases."""
        return self.parts[0]

    @property
    def values(self) -> list[mx.array]:
        """Return the value buffers (1, Hkv, capacity, ·), one for each row. A quantized cache returns the packed codes without scales and
        biases."""
        return self.parts[1]

    # --- what a subclass may store otherwise

    @property
    def _forms(self) -> tuple[Form, ...]:
        """Return the form (size and dtype) of each part, in the order of `parts`, in which keys and values alternate."""
        return Form(self.shape[1], self.dtype), Form(self.value_dim, self.dtype)

    def _stored(self, keys: mx.array, values: mx.array) -> KV:
        """Convert keys and values (1, N, Hkv, D) to the arrays that the parts store, (1, N, Hkv, ·) each, in the order of `parts`. Here
        they are stored unchanged."""
        return keys, values

    def _view(self, arrays: Sequence[mx.array], length: int) -> tuple[Stored, Stored]:
        """Return keys and values of the first `length` tokens of one row. arrays: the row's buffers, one for each part, in the order of
        `parts`."""
        keys, values = arrays
        return keys[:, :, :length], values[:, :, :length]

    # --- rows

    def append(self, keys: mx.array, values: mx.array, places: Places) -> Sequence[View]:
        """Write keys and values, (1, N, Hkv, D) or (N, Hkv, D), at `places`. Return for each row a view of its keys and values (1, Hkv,
        length + width, D); the view of a row of width 0 has no meaning. Where the lengths in `places` are only upper bounds, `places.masks`
        gives the tokens of a view that a query sees; a Tailed view has its own mask."""
        keys, values = (x if x.ndim == 4 else x[None] for x in (keys, values))
        stored = self._stored(keys, values)
        if self._tails is not None:
            return self._append_to_tails(self._tails, stored, places)
        views: list[View] = []
        rows = places.rows
        for r, (length, width) in enumerate(zip(places.lengths, rows.widths, strict=True)):
            end = length + width
            if width == 0:
                views.append(self.view(r, 0))
                continue
            self._reserve(r, length, end)
            begin = self._place(r, length)
            for buffers, new in zip(self.parts, stored, strict=True):
                new = new if rows.num_rows == 1 else new[:, rows.starts[r] : rows.starts[r + 1]]
                new = new.reshape(1, -1, 1, new.shape[3]) if width == 1 else new.swapaxes(1, 2)
                if places.starts is None:
                    buffers[r][:, :, begin : begin + width] = new
                else:
                    buffers[r] = mx.slice_update(buffers[r], new, places.starts[r], axes=(2,))
            views.append(self.view(r, end, length))
        return views

    def view(self, row: int, length: int, least: int | None = None) -> tuple[Stored, Stored]:
        """Return keys and values of the first `length` tokens of a row, (1, Hkv, length, D) each. A sliding-window cache leaves out those
        that no token from number `least` on sees. The caller must drop the views before the next append, which would otherwise copy the
        buffers."""
        return self._view([buffers[row] for buffers in self.parts], length)

    def _append_to_tails(self, tails: dict[int, _Tail], stored: KV, places: Places) -> list[View]:
        views: list[View] = []
        rows = places.rows
        for r, (length, width) in enumerate(zip(places.lengths, rows.widths, strict=True)):
            if width == 0:
                views.append(self.view(r, 0))
                continue
            new = tuple(x[:, rows.starts[r] : rows.starts[r + 1]].swapaxes(1, 2) for x in stored)
            tail = tails.get(r)
            if tail is None:
                start = None if places.starts is None else places.starts[r]
                tail = _Tail(length, start, new)
            else:
                tail = tail._replace(
                    parts=tuple(mx.concatenate(pair, axis=2) for pair in zip(tail.parts, new, strict=True))
                )
            tails[r] = tail
            num_behind = tail.parts[0].shape[2]
            mask = seen_behind(tail.begin, tail.start, width, num_behind)
            views.append(Tailed(*self.view(r, tail.begin), *self._view(tail.parts, num_behind), mask))
        return views

    def fork(self, *, tails: bool = False) -> AttentionLayerCache:
        """Return a cache that shares this cache's buffers. Where both write after the committed length, the last writer's tokens are the
        valid ones.

        tails: where the keys of a row have 1 MiB or more, the fork only reads the buffers and keeps appended tokens in separate arrays. A
        GPU updates a buffer in place only when every operation that read it has finished. The forwards of a fork follow each other too fast
        for an update in place, so each of them would copy the whole buffer. Raises CacheError on a fork that has such separate arrays.
        """
        if self._tails is not None:
            raise CacheError("A fork that writes no buffers cannot be forked.")
        twin = copy.copy(self)
        keys = zip(*self.parts[::2], strict=True)
        is_worth_it = any(sum(x.nbytes for x in row) >= _WORTH_A_TAIL for row in keys)
        twin._tails = {} if tails and is_worth_it else None
        return twin

    def join(self, other: AttentionLayerCache) -> None:
        """Append the rows of `other` after the rows of this cache. No array is copied."""
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine += theirs

    def select(self, rows: Sequence[int]) -> None:
        """Keep the rows with these indices, in this order, and drop the others."""
        for buffers in self.parts:
            buffers[:] = [buffers[r] for r in rows]

    def snapshot(self, row: int, length: int, start: int = 0) -> KV:
        """Return copies of a row's tokens from number `start` up to `length`: for each part an array (1, Hkv, length - start, ·)."""
        return tuple(copied(buffers[row][:, :, start:length]) for buffers in self.parts)

    def restore(self, *pieces: KV) -> None:
        """Replace all rows by one row that holds the tokens of these snapshots in order. The snapshots' arrays are copied, so other caches
        may use them too."""
        rooms = [self._buffer(form, _STEP) for form in self._forms]
        joined = zip(*pieces, rooms, strict=True)
        self.parts = tuple([mx.concatenate(arrays, axis=2)] for arrays in joined)

    @property
    def arrays(self) -> list[mx.array]:
        return [x for buffers in self.parts for x in buffers]

    def bytes_for(self, length: int, widest: int) -> int:
        """Return an upper bound of the bytes of a row of `length` tokens, for any sequence of appends that led to this length. widest:
        tokens of the widest forward, which has no effect here."""
        return self._bytes_of(length + max(_STEP, length // 8))

    @property
    def snapshot_bytes(self) -> int:
        """Return the bytes that a snapshot takes for each token."""
        return self.shape[0] * sum(form.size * form.dtype.size for form in self._forms)

    def _bytes_of(self, capacity: int) -> int:
        """Return the bytes of one row's buffers for `capacity` tokens, rounded up to whole growth steps of 256 tokens."""
        per_token = self.shape[0] * sum(form.size * form.dtype.size for form in self._forms)
        return -(-capacity // _STEP) * _STEP * per_token

    def _place(self, row: int, length: int) -> int:
        """Return the index in a row's buffers at which token number `length` of the row is stored."""
        return length

    def _reserve(self, row: int, length: int, end: int) -> None:
        """Make the buffers of a row large enough to write the tokens from number `length` up to `end`. The first `length` tokens stay."""
        capacity = self.keys[row].shape[2]
        if end <= capacity:
            return
        grown = max(end, capacity + max(_STEP, capacity // 8))
        extra = -(-grown // _STEP) * _STEP - length
        for buffers, form in zip(self.parts, self._forms, strict=True):
            buffers[row] = mx.concatenate([buffers[row][:, :, :length], self._buffer(form, extra)], axis=2)

    def _buffer(self, form: Form, capacity: int) -> mx.array:
        return mx.zeros((1, self.shape[0], capacity, form.size), form.dtype)


class Form(NamedTuple):
    """The form in which a part stores one head of one token: the number of stored values and their dtype."""

    size: int
    dtype: mx.Dtype


class _Tail(NamedTuple):
    """The tokens that a fork has appended to a row whose buffers hold up to `begin` tokens. start (1,) int32: how many of those `begin`
    tokens are valid, where only the device knows that number; None where all are. parts: the appended arrays, each (1, Hkv, n, ·)."""

    begin: int
    start: mx.array | None
    parts: KV


def copied(x: mx.array) -> mx.array:
    """Return a copy of `x` in memory of its own. `mx.contiguous` would return a contiguous `x` itself, and a second reference to a live
    buffer turns the next write into a copy of the whole buffer."""
    return mx.concatenate([x, x[:0]])
