"""All layers' caches of B rows, and the one transaction over them: begin, appends, then commit or abort.

It keeps the committed lengths and how many tokens of the last forward are accepted.

Invariant (a property test guards it): after any sequence of begin/append, commit, abort and fork, the next forward sees exactly what
it would have seen if only the committed tokens had ever been appended.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx

from mlxspec.cache.attention import KV, AttentionLayerCache
from mlxspec.cache.places import Places
from mlxspec.cache.recurrent import RecurrentLayerCache, StateLayerCache
from mlxspec.cache.rollback import Committed
from mlxspec.cache.snapshot import Snapshot
from mlxspec.cache.windowed import WindowedLayerCache
from mlxspec.errors import CacheError
from mlxspec.kernels.flat import FlatRows

LayerCache = AttentionLayerCache | RecurrentLayerCache


class ModelCache:
    """The caches of all layers for B rows, with one transaction over them: begin a forward, append to the layers, then commit or abort.

    A forward has either certain tokens (prefill) or drafts, of which any prefix of each row may be accepted. `num_committed` counts, for
    each row, the tokens of a forward that are kept: the row's last known token, which every verify runs, and its accepted drafts.

    lengths: committed tokens of each row. exact: (B,) int32, the lengths where only the device knows them; None where `lengths` are exact.
    Where `exact` is given, `lengths` are upper bounds, and `least` has lower bounds or is None. shifts: for each row the rotary position of
    its next text token minus the index of that token: not 0 only after images, and set by `shift`. scales: for each row the factors of the
    model's adapters, () where none is used; the creator of the row sets them. deferred: the committed part of the last forward that
    recurrent layers have not applied yet; None where there is none. defers: whether a forward applies the committed tokens of the one
    before it at no extra cost. Where it does not, `flush` is called after each commit, so that the shape of a forward does not depend on
    the forward before it.
    """

    def __init__(self, layers: Sequence[LayerCache], num_rows: int, *, defers: bool = False) -> None:
        self.layers = list(layers)
        self.defers = defers
        self.lengths = [0] * num_rows
        self.least: list[int] | None = None
        self.shifts = [0] * num_rows
        self.scales: list[tuple[float, ...]] = [()] * num_rows
        self.exact: mx.array | None = None
        self.pending: FlatRows | None = None
        self.pending_certain = False
        self.deferred: Committed | None = None
        self._family: dict[str, int] = {"writer": id(self)}
        self._is_fork = False

    def attention(self, layer: int) -> AttentionLayerCache:
        """Return the cache of layer number `layer`. Raises CacheError where the layer is recurrent."""
        found = self.layers[layer]
        if not isinstance(found, AttentionLayerCache):
            raise CacheError(f"Layer {layer} has no keys and values: it is recurrent.")
        return found

    def recurrent(self, layer: int) -> RecurrentLayerCache:
        """Return the cache of layer number `layer`. Raises CacheError where the layer is an attention layer."""
        found = self.layers[layer]
        if not isinstance(found, RecurrentLayerCache):
            raise CacheError(f"Layer {layer} has no recurrent state: it is attention.")
        return found

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def needs_lengths(self) -> bool:
        """Return whether a layer needs the exact lengths of its rows on the host: a sliding-window layer does."""
        return any(isinstance(layer, WindowedLayerCache) for layer in self.layers)

    @property
    def has_recurrent(self) -> bool:
        return any(layer.is_recurrent for layer in self.layers)

    def begin(self, rows: FlatRows, *, certain: bool = False) -> Places:
        """Open a transaction in which row r gets `rows.widths[r]` tokens, and return the places of these tokens. certain: the tokens are
        known text, not drafts. Raises CacheError where a transaction is open, where the number of rows differs, where a layer needs lengths
        that only the device knows, and in a fork that has ended."""
        if self.pending is not None:
            raise CacheError("A forward was begun before the last one was committed or aborted.")
        if rows.num_rows != self.num_rows:
            raise CacheError(f"The forward has {rows.num_rows} rows, the cache has {self.num_rows}.")
        if self.exact is not None and self.needs_lengths:
            raise CacheError("A sliding window must know where its rows end: settle the last commit first.")
        self._require_alive()
        self._family["writer"] = id(self)
        self.pending, self.pending_certain = rows, certain
        return Places(rows, self.lengths, self.exact, self.shifts)

    def shift(self, row: int, num: int) -> None:
        """Record that from the next forward on the rotary position of this row's tokens is their index plus `num`."""
        self.shifts[row] = num

    def commit(self, num_committed: Sequence[int] | None = None) -> None:
        """End the transaction and keep the first num_committed[r] tokens of each row r; None keeps all tokens. Raises CacheError where no
        transaction is open, where the commit before has not been settled, on a count outside 0..width, and where certain tokens are kept
        only in part. The transaction stays open on an error."""
        rows = self.pending
        if rows is None:
            raise CacheError("There is nothing to commit.")
        if self.exact is not None and not self._is_fork:
            raise CacheError("The last commit has not been settled.")
        num_committed = checked(rows.widths if num_committed is None else num_committed, rows)
        if self.pending_certain and num_committed != list(rows.widths):
            raise CacheError("A forward of certain tokens is committed whole.")
        self.close(None if self.pending_certain else Committed.of(rows, num_committed), num_committed)
        if self.exact is not None:
            self.exact = self.exact + mx.array(num_committed, mx.int32)

    def close(self, committed: Committed | None, most: Sequence[int]) -> None:
        """End the transaction without checks. committed: the commit that recurrent layers defer, None after certain tokens. most: by how
        many tokens the length of each row grows, at most where only the device knows the number."""
        for layer in self.layers:
            if isinstance(layer, StateLayerCache):
                layer.commit()
        self.deferred = committed
        self.lengths = [n + k for n, k in zip(self.lengths, most, strict=True)]
        self.pending = None

    def abort(self) -> None:
        """Drop the open transaction, if there is one. Earlier commits stay."""
        for layer in self.layers:
            if isinstance(layer, StateLayerCache):
                layer.abort()
        self.pending = None

    def fork(self, *, tails: bool = False) -> Self:
        """Return a cache that continues from the committed state without changing this cache. The fork becomes invalid when this cache
        begins a forward or is forked again. tails: forwards on the fork keep appended tokens in separate arrays where buffers are large,
        see AttentionLayerCache.fork; such a fork cannot be forked."""
        if self.pending is not None:
            raise CacheError("Cannot fork in the middle of a forward: commit or abort first.")
        self._require_alive()
        twin = copy.copy(self)
        twin.layers = [layer.fork(tails=tails) for layer in self.layers]
        twin.lengths, twin.shifts, twin.scales = list(self.lengths), list(self.shifts), list(self.scales)
        twin.least, twin._is_fork = None, True
        self._family["writer"] = id(twin)
        return twin

    def flush(self) -> None:
        """Apply the accepted tokens that recurrent layers have deferred to their states."""
        self._require_idle("flush")
        if self.deferred is not None:
            for layer in self.layers:
                if isinstance(layer, RecurrentLayerCache):
                    layer.flush(self.deferred)
        self.deferred = None

    def join(self, other: ModelCache) -> None:
        """Append the rows of `other` after the rows of this cache. `other` must not be used again."""
        for cache in (self, other):
            cache.require_own("join")
            cache.flush()
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.join(theirs)  # type: ignore[arg-type]
        self.lengths += other.lengths
        self.shifts += other.shifts
        self.scales += other.scales
        self._family["writer"] = id(self)

    def select(self, rows: Sequence[int]) -> None:
        """Keep the rows with these indices, in this order, and drop the others."""
        self.require_own("select")
        if list(rows) == list(range(self.num_rows)):
            return
        self.flush()
        for layer in self.layers:
            layer.select(rows)
        self.lengths = [self.lengths[r] for r in rows]
        self.shifts = [self.shifts[r] for r in rows]
        self.scales = [self.scales[r] for r in rows]
        self._family["writer"] = id(self)

    def snapshot(self, row: int, start: int = 0) -> Snapshot:
        """Return a copy of one row's committed state. start: the snapshot leaves out the keys and values of earlier tokens, in layers that
        store every token."""
        self._require_idle("snapshot")
        self._require_alive()
        self.flush()
        length = self.lengths[row]
        if not 0 <= start <= length:
            raise CacheError(f"Cannot take a snapshot from token {start} of a row of {length}.")
        tokens: list[KV] = []
        point: list[tuple[mx.array, ...]] = []
        for layer in self.layers:
            found: Any = layer.snapshot(row, length, start)
            (tokens if layer.is_per_token else point).append(found)
        return Snapshot(length, [tokens], point, start)

    def restore(self, snapshot: Snapshot) -> None:
        """Put the state of `snapshot` into the one row of this new cache. Raises CacheError where this cache is not new or does not have
        one row, and where the snapshot does not start with token 0."""
        if self.lengths != [0] or self.pending is not None:
            raise CacheError("A snapshot is restored into a fresh cache of one row.")
        if snapshot.start:
            raise CacheError(f"This snapshot lacks the tokens before {snapshot.start}.")
        pieces = zip(*snapshot.segments, strict=True)
        states = iter(snapshot.point)
        for layer in self.layers:
            if layer.is_per_token:
                layer.restore(*next(pieces))
            else:
                layer.restore(next(states))  # type: ignore[arg-type]
        self.lengths = [snapshot.length]

    @property
    def arrays(self) -> list[mx.array]:
        """Return every array of all layers. Evaluating them runs a forward whose logits are not needed."""
        return [x for layer in self.layers for x in layer.arrays]

    @property
    def states(self) -> list[mx.array]:
        """Return every array of the recurrent layers."""
        return [x for layer in self.layers if layer.is_recurrent for x in layer.arrays]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the cache's arrays, each counted once; of a fork only its recurrent states: buffers are the parent's."""
        layers = [x for x in self.layers if x.is_recurrent] if self._is_fork else self.layers
        return sum({id(x): x.nbytes for layer in layers for x in layer.arrays}.values())

    def bytes_for(self, length: int, *, prefill: int, verify: int) -> int:
        """Return an upper bound of the bytes of a row of `length` tokens. prefill: tokens of the largest chunk of a prompt; verify: tokens
        of the widest verify. A cache without rows gives the same answer."""
        return sum(
            layer.bytes_for(length, verify if layer.is_recurrent else prefill) for layer in self.layers
        )

    def snapshot_bytes(self) -> tuple[int, int]:
        """Return the bytes that a snapshot takes for each token, and the upper bound of the bytes that it takes for the layers whose state
        does not grow with each token. A cache without rows gives the same answer."""
        per_token = sum(layer.snapshot_bytes for layer in self.layers if layer.is_per_token)
        return per_token, sum(layer.snapshot_bytes for layer in self.layers if not layer.is_per_token)

    def _require_idle(self, what: str) -> None:
        if self.pending is not None:
            raise CacheError(f"Cannot {what} in the middle of a forward: commit or abort first.")
        if self.exact is not None:
            raise CacheError(f"Cannot {what} while only the device knows what was committed: settle first.")

    def _require_alive(self) -> None:
        """Raise CacheError where this is a fork whose buffers the parent or a younger fork may have overwritten."""
        if self._is_fork and self._family["writer"] != id(self):
            raise CacheError("This fork is dead: its parent or a younger fork has written since.")

    def require_own(self, what: str) -> None:
        """Raise CacheError where a forward is open, where only the device knows the lengths, or where this cache is a fork. what: the
        operation that the message names, such as "join"."""
        self._require_idle(what)
        if self._is_fork:
            raise CacheError(f"Cannot {what} a fork: it borrows its parent's buffers.")


def checked(num_committed: Sequence[int], rows: FlatRows) -> list[int]:
    """Return num_committed as a list. Raises CacheError where there is not one count for each row, and on a count outside 0..width."""
    counts = list(num_committed)
    if len(counts) != rows.num_rows or any(not 0 <= n <= w for n, w in zip(counts, rows.widths, strict=True)):
        raise CacheError(f"Cannot keep {counts} tokens of a forward of widths {list(rows.widths)}.")
    return counts
