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
    """B rows of a model's caches.

    lengths: committed tokens a row. shifts: by row, the difference between the rotary position of the next token, if that is text, and
    its index: not 0 only after images, and set by whoever knows of those (`shift`). scales: by row, how much each of the model's adapters
    counts, none where none does; set by whoever made the row. A forward is either of certain tokens (prefill) or
    of drafts (any prefix of each row may be accepted). `num_committed` counts tokens of the forward: a row's last known token, which
    every verify runs, and its accepted drafts.
    exact: (B,) int32, the lengths where only the device knows them; `lengths` are upper bounds then, and `least`, where it is
    given, lower ones. None where `lengths` are exact.
    deferred: the committed part of the last forward that recurrent layers have not applied yet; None when there is none.

    defers: whether a forward applies the committed tokens of the one before it in passing, at no cost; else `flush` after each commit, so
    that a forward's shape is its own and not that of a pair of forwards.
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
        """Raises CacheError where the layer is recurrent."""
        found = self.layers[layer]
        if not isinstance(found, AttentionLayerCache):
            raise CacheError(f"Layer {layer} has no keys and values: it is recurrent.")
        return found

    def recurrent(self, layer: int) -> RecurrentLayerCache:
        """Raises CacheError where the layer is attention."""
        found = self.layers[layer]
        if not isinstance(found, RecurrentLayerCache):
            raise CacheError(f"Layer {layer} has no recurrent state: it is attention.")
        return found

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def needs_lengths(self) -> bool:
        """Whether a layer must know on the host where its rows end."""
        return any(isinstance(layer, WindowedLayerCache) for layer in self.layers)

    @property
    def has_recurrent(self) -> bool:
        return any(layer.is_recurrent for layer in self.layers)

    def begin(self, rows: FlatRows, *, certain: bool = False) -> Places:
        """Open a transaction in which each row gets `rows.widths` tokens, and return their positions. Raises CacheError if one is open."""
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
        """Give this row's text, from the next forward on, rotary positions that are its indices plus `num`."""
        self.shifts[row] = num

    def commit(self, num_committed: Sequence[int] | None = None) -> None:
        """End the transaction and keep the first num_committed[r] tokens of each row; None keeps all. Raises CacheError when nothing is
        pending, before the last commit is settled, on a count outside 0..width, and on a partial commit of certain tokens. The
        transaction stays open then.
        """
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
        """End the transaction. committed: what recurrent layers defer; most: the tokens that each row gets at most."""
        for layer in self.layers:
            if isinstance(layer, StateLayerCache):
                layer.commit()
        self.deferred = committed
        self.lengths = [n + k for n, k in zip(self.lengths, most, strict=True)]
        self.pending = None

    def abort(self) -> None:
        """Forget the open transaction, if there is one. The commit before it stays."""
        for layer in self.layers:
            if isinstance(layer, StateLayerCache):
                layer.abort()
        self.pending = None

    def fork(self, *, tails: bool = False) -> Self:
        """A cache that runs ahead from here without changing this one. It ends when this cache begins a forward or forks again. tails:
        forwards on it write no long keys and values in place, see AttentionLayerCache.fork; such a fork cannot be forked."""
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
        """Bring recurrent states up to date by applying the accepted tokens that they have deferred."""
        self._require_idle("flush")
        if self.deferred is not None:
            for layer in self.layers:
                if isinstance(layer, RecurrentLayerCache):
                    layer.flush(self.deferred)
        self.deferred = None

    def join(self, other: ModelCache) -> None:
        """Append the rows of `other` to our own. `other` must not be used again."""
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
        """Keep these rows, in this order; the others leave."""
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
        """A copy of one row's committed state. Of keys and values only those from token `start` on."""
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
        """Become one row with the state of `snapshot`. Only on a fresh cache of one row, and from a snapshot of all tokens."""
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
        """Every array held. Evaluate these to run a forward whose logits are not read."""
        return [x for layer in self.layers for x in layer.arrays]

    @property
    def states(self) -> list[mx.array]:
        """Every array held by recurrent layers."""
        return [x for layer in self.layers if layer.is_recurrent for x in layer.arrays]

    @property
    def nbytes(self) -> int:
        """Bytes of all live copies. A fork counts its own recurrent state only: its buffers are the parent's."""
        layers = [x for x in self.layers if x.is_recurrent] if self._is_fork else self.layers
        return sum({id(x): x.nbytes for layer in layers for x in layer.arrays}.values())

    def bytes_for(self, length: int, *, prefill: int, verify: int) -> int:
        """Upper bound of the bytes of a row of `length` tokens, with prompt chunks of `prefill` tokens and verifies of `verify` tokens. A
        cache without rows can tell."""
        return sum(
            layer.bytes_for(length, verify if layer.is_recurrent else prefill) for layer in self.layers
        )

    def snapshot_bytes(self) -> tuple[int, int]:
        """Bytes that a snapshot takes for each token, and at most for the states of all other layers. A cache without rows can tell."""
        per_token = sum(layer.snapshot_bytes for layer in self.layers if layer.is_per_token)
        return per_token, sum(layer.snapshot_bytes for layer in self.layers if not layer.is_per_token)

    def _require_idle(self, what: str) -> None:
        if self.pending is not None:
            raise CacheError(f"Cannot {what} in the middle of a forward: commit or abort first.")
        if self.exact is not None:
            raise CacheError(f"Cannot {what} while only the device knows what was committed: settle first.")

    def _require_alive(self) -> None:
        """Raise CacheError in a dead fork, whose tokens have been written over."""
        if self._is_fork and self._family["writer"] != id(self):
            raise CacheError("This fork is dead: its parent or a younger fork has written since.")

    def require_own(self, what: str) -> None:
        """Raise CacheError where a forward is open, lengths are not settled, or this is a fork."""
        self._require_idle(what)
        if self._is_fork:
            raise CacheError(f"Cannot {what} a fork: it borrows its parent's buffers.")


def checked(num_committed: Sequence[int], rows: FlatRows) -> list[int]:
    """Raises CacheError on a count outside 0..width."""
    counts = list(num_committed)
    if len(counts) != rows.num_rows or any(not 0 <= n <= w for n, w in zip(counts, rows.widths, strict=True)):
        raise CacheError(f"Cannot keep {counts} tokens of a forward of widths {list(rows.widths)}.")
    return counts
