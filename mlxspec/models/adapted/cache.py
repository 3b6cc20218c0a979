"""B rows of mlx-lm's prompt caches behind the transaction of a model cache, an object of mlx-lm's for each layer and row.

A forward advances *twins* of each row's objects, and a commit puts them in their place. So there is nothing to undo where a forward is
aborted or fails, and a fork is the same objects. A twin shares the Python objects of arrays that grow, as mlx-lm's code writes behind a
row's end in place; of arrays of all other objects it has Python objects of its own.

Rejected tokens. Objects whose end can be cut off lose it. States go back to what they were before the verify, and the parts of the module
that keep them (parts.py) run once more on the accepted tokens' inputs; no other part does. This is ModelCache's deferred commit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

import mlx.core as mx

from mlxspec.cache.attention import KV, copied
from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.places import Places
from mlxspec.cache.recurrent import StateLayerCache
from mlxspec.errors import CacheError
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.adapted import leaves
from mlxspec.models.adapted.parts import RowsForward
from mlxspec.models.adapted.sizes import LeafForm
from mlxspec.platform.host import numbers


class LeafLayerCache(StateLayerCache[list[Any]]):
    """One of mlx-lm's cache objects (a leaf) for each row, all at the same place in their rows' prompt caches. current: the committed
    leaves, by row; before: the leaves as they were before the last forward, kept until that forward is flushed."""

    is_foreign = True

    def __init__(self, form: LeafForm, current: list[Any]) -> None:
        super().__init__(current)
        self.form = form
        self.is_per_token, self.is_recurrent = form.is_per_token, not form.is_cuttable
        self.before: list[Any] = []

    def open(self, widths: Sequence[int]) -> list[Any]:
        """Stage a twin of every row's leaf for the next forward, and return the twins by row. widths: the tokens that the forward adds to
        each row."""
        if self.is_per_token:
            for leaf, width in zip(self.current, widths, strict=True):
                leaves.reserve(leaf, width)
        self.append([self.twin(leaf) for leaf in self.current])
        return self.staged or []

    def twin(self, leaf: Any) -> Any:
        """Return a copy of `leaf` that a forward may advance while `leaf` stays unchanged."""
        return copy.copy(leaf) if self.form.is_cuttable else leaves.twin(leaf)

    def commit(self) -> None:
        if self.staged is not None:
            self.before = self.current
        super().commit()

    def release_inputs(self) -> None:
        """Copy the leaves whose size does not grow, after a chunk of a prompt. mlx-lm's code keeps the last inputs of a convolution as a
        view of the chunk's inputs, which would keep all of them in memory."""
        if self.form.is_state:
            self.current = [leaves.copied_leaf(leaf) for leaf in self.current]

    def join(self, other: LeafLayerCache) -> None:
        self.current = [*self.current, *other.current]

    def select(self, rows: Sequence[int]) -> None:
        self.current = [self.current[r] for r in rows]

    @property
    def arrays(self) -> list[mx.array]:
        found = [x for leaf in (*self.current, *(self.staged or ())) for x in leaves.arrays_of(leaf)]
        return list({id(x): x for x in found}.values())

    def bytes_for(self, length: int, width: int) -> int:
        """Return an upper bound of the bytes of a row of `length` tokens with forwards of `width` tokens. Twice the leaf's bytes where a
        forward works on a copy of the leaf's arrays."""
        return (1 if self.form.is_cuttable else 2) * self.form.bytes_for(length, width)

    @property
    def snapshot_bytes(self) -> int:
        return self.form.snapshot_bytes

    @property
    def described(self) -> list[Any]:
        """Return the leaf's class name and the shapes of its arrays. Leaves of different forms have different descriptions."""
        return [self.form.title, *self.form.shapes]

    def snapshot(self, row: int, length: int, start: int = 0) -> tuple[mx.array, ...]:
        """Return copies of a row's keys and values from token `start` up to `length`, (1, H, length - start, D) each, where the leaf stores
        every token. Else return the whole leaf as arrays, see `leaves.packed`."""
        leaf = self.current[row]
        if not self.is_per_token:
            return leaves.packed(leaf)
        if leaf.keys is None:
            return tuple(mx.zeros((*shape[:2], 0, shape[3])) for shape in self.form.shapes)
        return tuple(copied(x[..., start:length, :]) for x in (leaf.keys, leaf.values))

    def restore(self, *pieces: KV) -> None:
        """Put the state of these snapshots, in order, into the leaf of the one row."""
        (leaf,) = self.current
        if self.is_per_token:
            leaf.keys, leaf.values = (mx.concatenate(list(x), axis=2) for x in zip(*pieces, strict=True))
            leaf.offset = leaf.keys.shape[2]
        else:
            leaves.unpack(leaf, pieces[0])


class AdaptedCache(ModelCache):
    """The prompt caches that mlx-lm makes for B rows, with the transaction of ModelCache. A forward advances copies of the committed cache
    objects, and a commit puts the copies in their place."""

    def __init__(self, new_caches: Callable[[], list[Any]], forms: Sequence[LeafForm], num_rows: int) -> None:
        """Make empty caches for `num_rows` rows. new_caches: makes mlx-lm's empty prompt cache of one row. forms: the form of each leaf of
        such a prompt cache."""
        self.nest = new_caches()  # how a row's caches are nested; they stay empty
        rows = [leaves.leaves_of(new_caches()) for _ in range(num_rows)]
        layers: list[Any] = [LeafLayerCache(form, [row[i] for row in rows]) for i, form in enumerate(forms)]
        super().__init__(layers, num_rows)
        self._newest: RowsForward | None = None

    @property
    def _leaves(self) -> list[Any]:
        """Return all layers, each a LeafLayerCache."""
        return self.layers

    @property
    def needs_lengths(self) -> bool:
        return True

    def begin(self, rows: FlatRows, *, certain: bool = False) -> Places:
        self.flush()
        return super().begin(rows, certain=certain)

    def forward(self) -> RowsForward:
        """Return the forward for the transaction that `begin` opened, with new twins of all leaves. Raises CacheError where no transaction
        is open."""
        if self.pending is None:
            raise CacheError("No forward was begun.")
        may_lose = self.pending.max_width > 1 and not self.pending_certain
        twins = list(zip(*(layer.open(self.pending.widths) for layer in self._leaves), strict=True))
        self._newest = RowsForward(self.pending, twins, may_lose=may_lose)
        return self._newest

    def fork(self, *, tails: bool = False) -> Self:
        self.flush()
        return super().fork(tails=tails)

    def commit(self, num_committed: Sequence[int] | None = None) -> None:
        is_prompt = self.pending is not None and self.pending_certain and self.pending.max_width > 1
        super().commit(num_committed)
        if is_prompt:
            for layer in self._leaves:
                layer.release_inputs()
        if self.deferred is None:
            self.flush()  # nothing goes back, and a window that nothing else refers to is written in place

    def flush(self) -> None:
        """Remove the rejected tokens of the last commit from every row. Raises CacheError, and changes nothing, where a leaf does not trim
        the number of tokens that was requested."""
        self._require_idle("flush")
        if self.deferred is not None and self._newest is not None:
            kept, widths = numbers(self.deferred.num_committed).tolist(), self._newest.rows.widths
            rows = [
                self._kept(r, n, width - n, self._newest)
                for r, (n, width) in enumerate(zip(kept, widths, strict=True))
            ]
            for i, layer in enumerate(self._leaves):
                layer.current = [row[i] for row in rows]
        if self._newest is not None:
            self._newest.calls.clear()
        self.deferred = self._newest = None
        for layer in self._leaves:
            layer.before = []

    def _kept(self, row: int, kept: int, lost: int, forward: RowsForward) -> list[Any]:
        """Return a row's leaves with the first `kept` tokens of a forward and without the `lost` tokens after them."""
        layers = self._leaves
        if not lost:
            return [layer.current[row] for layer in layers]
        before = [layer.before[row] for layer in layers]
        if not kept:
            return before
        cuts = [layer.form.is_cuttable for layer in layers]
        calls = [c for c in forward.calls if c.row == row and not all(cuts[place] for place in c.places)]
        back = {place for c in calls for place in c.places}
        found = [layer.twin(before[i] if i in back else layer.current[row]) for i, layer in enumerate(layers)]
        for i, leaf in enumerate(found):
            if cuts[i] and i not in back:
                leaves.cut(leaf, lost)
        for call in calls:
            call.run(found, kept, before)
        if calls:  # now, so that the round which was rejected counts the time, and not the next one
            mx.eval([x for place in back for x in leaves.arrays_of(found[place])])
        return found
