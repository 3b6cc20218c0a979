"""All layers' caches of B rows, and the one transaction over them: begin, appends, then commit or abort.

Knows committed lengths and which part of the last forward stands; knows no tokens and no model.

Invariant (a property test holds it): after any sequence of begin/append, commit, abort and fork, the next forward sees exactly what
it would see had only the committed tokens ever been appended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlxspec.cache.attention import AttentionLayerCache
from mlxspec.cache.recurrent import RecurrentLayerCache
from mlxspec.errors import CacheError
from mlxspec.kernels.flat import FlatRows

LayerCache = AttentionLayerCache | RecurrentLayerCache


class Snapshot(NamedTuple):
    """One row's committed state; arrays are copies, so it outlives the cache. length in tokens."""

    length: int
    layers: list[Any]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for layer in self.layers for x in layer)


class ModelCache:
    """B rows of a model's caches.

    lengths: committed tokens a row. A forward is either of facts (prefill: every token will stand) or of drafts (any prefix of each
    row may stand). `kept` counts tokens of the forward, so the verified last token is one of them.
    """

    def __init__(self, layers: Sequence[LayerCache], num_rows: int) -> None:
        self.layers = list(layers)
        self.lengths = [0] * num_rows
        self.pending: FlatRows | None = None
        self.pending_facts = False
        self.tape_rows: FlatRows | None = None  # layout of the tapes the recurrent layers hold, if they do
        self.kept: mx.array | None = None  # (B,) int32: how much of those tapes stands
        self.longest_kept = 0  # no entry of kept is above this; a power of two, so that shapes repeat
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
    def has_recurrent(self) -> bool:
        return any(layer.is_recurrent for layer in self.layers)

    def begin(self, rows: FlatRows, *, facts: bool = False) -> None:
        """Open a transaction in which every row gets `rows.widths` tokens. Raises CacheError if one is open."""
        if self.pending is not None:
            raise CacheError("A forward was begun before the last one was committed or aborted.")
        if rows.num_rows != self.num_rows:
            raise CacheError(f"The forward has {rows.num_rows} rows, the cache has {self.num_rows}.")
        self._require_alive()
        self._family["writer"] = id(self)
        self.pending, self.pending_facts = rows, facts

    def commit(self, kept: Sequence[int] | None = None) -> None:
        """Let the first kept[r] tokens of each row's last forward stand; None lets all stand.

        Raises CacheError when nothing is pending, on a count outside 0..width, and on a partial commit of facts.
        """
        rows = self.pending
        if rows is None:
            raise CacheError("There is nothing to commit.")
        kept = list(rows.widths) if kept is None else list(kept)
        if len(kept) != rows.num_rows or any(not 0 <= k <= w for k, w in zip(kept, rows.widths, strict=True)):
            raise CacheError(f"Cannot keep {kept} tokens of a forward of widths {list(rows.widths)}.")
        if self.pending_facts and kept != list(rows.widths):
            raise CacheError("A forward of facts is committed whole.")
        for layer in self.layers:
            if isinstance(layer, RecurrentLayerCache):
                layer.commit()
        facts = self.pending_facts
        self.tape_rows = None if facts else rows
        self.kept = None if facts else mx.array(np.asarray(kept, np.int32))
        self.longest_kept = 0 if facts else 1 << max(0, max(kept) - 1).bit_length()
        self.lengths = [n + k for n, k in zip(self.lengths, kept, strict=True)]
        self.pending = None

    def abort(self) -> None:
        """Forget the open transaction, if there is one."""
        for layer in self.layers:
            if isinstance(layer, RecurrentLayerCache):
                layer.abort()
        self.pending = None

    def fork(self) -> ModelCache:
        """A cache that may run on from here without our knowing; it dies when we begin a forward, or fork again."""
        self._require_idle("fork")
        self._require_alive()
        twin = ModelCache([layer.fork() for layer in self.layers], 0)
        twin.lengths, twin.tape_rows, twin.kept = list(self.lengths), self.tape_rows, self.kept
        twin.longest_kept = self.longest_kept
        twin._family, twin._is_fork = self._family, True
        self._family["writer"] = id(twin)
        return twin

    def flush(self) -> None:
        """Apply what recurrent layers have deferred."""
        self._require_idle("flush")
        if self.tape_rows is not None and self.kept is not None:
            for layer in self.layers:
                if isinstance(layer, RecurrentLayerCache):
                    layer.flush(self.kept, self.tape_rows)
        self.tape_rows = self.kept = None
        self.longest_kept = 0

    def join(self, other: ModelCache) -> None:
        """Take over the rows of `other` behind our own; `other` must not be used again."""
        for cache in (self, other):
            cache._require_own("join")
            cache.flush()
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.join(theirs)  # type: ignore[arg-type]
        self.lengths += other.lengths
        self._family["writer"] = id(self)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order: how rows leave."""
        self._require_own("select")
        if list(rows) == list(range(self.num_rows)):
            return
        self.flush()
        for layer in self.layers:
            layer.select(rows)
        self.lengths = [self.lengths[r] for r in rows]
        self._family["writer"] = id(self)

    def truncate(self, row: int, length: int) -> None:
        """Cut one row's committed tokens. Raises CacheError on a recurrent layer, which cannot go back."""
        self._require_own("truncate")
        if not 0 <= length <= self.lengths[row]:
            raise CacheError(f"Cannot cut a row of {self.lengths[row]} tokens to {length}.")
        if length != self.lengths[row] and self.has_recurrent:
            raise CacheError("A recurrent state cannot be cut back; restore a snapshot instead.")
        self.lengths[row] = length

    def snapshot(self, row: int) -> Snapshot:
        """A copy of one row's committed state."""
        self._require_idle("snapshot")
        self._require_alive()
        self.flush()
        return Snapshot(self.lengths[row], [layer.snapshot(row, self.lengths[row]) for layer in self.layers])

    def restore(self, snapshot: Snapshot) -> None:
        """Become one row that stands where `snapshot` was taken. Only on a fresh cache of one row."""
        if self.lengths != [0] or self.pending is not None:
            raise CacheError("A snapshot is restored into a fresh cache of one row.")
        for layer, state in zip(self.layers, snapshot.layers, strict=True):
            layer.restore(state)
        self.lengths = [snapshot.length]

    @property
    def arrays(self) -> list[mx.array]:
        """Every array held; evaluate these to have a forward done whose logits nobody reads."""
        return [x for layer in self.layers for x in layer.arrays]

    @property
    def nbytes(self) -> int:
        """Bytes of all live copies. A fork counts its own recurrent state only: its buffers are the parent's."""
        layers = [x for x in self.layers if x.is_recurrent] if self._is_fork else self.layers
        return sum(x.nbytes for layer in layers for x in layer.arrays)

    def _require_idle(self, what: str) -> None:
        if self.pending is not None:
            raise CacheError(f"Cannot {what} in the middle of a forward: commit or abort first.")

    def _require_alive(self) -> None:
        """A dead fork's tokens behind its parent's have been written over."""
        if self._is_fork and self._family["writer"] != id(self):
            raise CacheError("This fork is dead: its parent or a younger fork has written since.")

    def _require_own(self, what: str) -> None:
        self._require_idle(what)
        if self._is_fork:
            raise CacheError(f"Cannot {what} a fork: it borrows its parent's buffers.")
