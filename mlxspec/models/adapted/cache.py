"""B rows of mlx-lm's prompt caches behind our contract of a model cache: one transaction over all layers, accepted tokens stay.

Rejected tokens. Where every leaf of a row can lose its end (leaves.py), the end is cut off. Else the row goes back to what it was before
the verify, and *owes* itself the accepted tokens: they stand in front of the next forward's tokens, so that weights are read once for both.
Where more than OWED_AT_MOST come together they run at once.

References to arrays are held only while a verify of several tokens is open, and never to buffers that grow: a write into a buffer that
somebody else holds copies all of it. So a plain forward that fails may leave a row of which nothing is known: the cache is dead then, and
says so.

A fork shares the leaves that can be trimmed and holds the others. When its parent is used next, what the fork appended is trimmed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import mlx.core as mx

from mlxspec.cache.attention import KV, copied
from mlxspec.cache.model_cache import ModelCache, checked
from mlxspec.cache.places import Places
from mlxspec.errors import CacheError
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.adapted import leaves
from mlxspec.models.adapted.sizes import LeafForm

OWED_AT_MOST = 16  # tokens: a forward of so many more takes hardly longer on a GPU


class RowRunner(Protocol):
    """What a cache needs of its model. forms: of the leaves of a row. cuts: whether rejected tokens may be cut off where leaves say they
    can be."""

    cuts: bool

    @property
    def forms(self) -> Sequence[LeafForm]: ...
    def new_caches(self) -> list[Any]: ...
    def body(self, tokens: mx.array, caches: list[Any]) -> mx.array: ...
    def together(self, tokens: mx.array, widths: Sequence[int], caches: Sequence[list[Any]]) -> mx.array: ...


class AdaptedLayer:
    """One leaf of every row, as ModelCache has layers. rows: by row, all leaves."""

    is_recurrent, is_foreign = False, True

    def __init__(self, rows: list[_Row], place: int, form: LeafForm) -> None:
        self._rows, self._place, self.form = rows, place, form
        self.is_per_token = form.is_per_token

    @property
    def arrays(self) -> list[mx.array]:
        return [x for row in self._rows for x in leaves.arrays_of(row.leaves[self._place])]

    def bytes_for(self, length: int, width: int) -> int:
        return self.form.bytes_for(length, width)

    @property
    def snapshot_bytes(self) -> int:
        return self.form.snapshot_bytes

    @property
    def described(self) -> list[Any]:
        """What tells states of one form from those of another."""
        return [self.form.title, *self.form.shapes]

    def snapshot(self, row: int, length: int, start: int) -> tuple[mx.array, ...]:
        """Keys and values (1, H, length - start, D) where the leaf keeps those of every token; else all of it."""
        leaf = self._rows[row].leaves[self._place]
        if not self.is_per_token:
            return leaves.packed(leaf)
        if leaf.keys is None:
            return tuple(mx.zeros((*shape[:2], 0, shape[3])) for shape in self.form.shapes)
        return tuple(copied(x[..., start:length, :]) for x in (leaf.keys, leaf.values))

    def restore(self, *pieces: KV) -> None:
        """Of the only row."""
        leaf = self._rows[0].leaves[self._place]
        if self.is_per_token:
            leaf.keys, leaf.values = (mx.concatenate(list(x), axis=2) for x in zip(*pieces, strict=True))
            leaf.offset = leaf.keys.shape[2]
        else:
            leaves.unpack(leaf, pieces[0])


@dataclass(kw_only=True, eq=False)
class _Row:
    """caches: what the module is called with. owed (n,) int32: accepted tokens that are not in the caches yet. newest (n,): those of the
    open forward, None before it has run. before: by leaf, where an open forward goes back to: a length, a state, or None for nothing."""

    caches: list[Any]
    leaves: list[Any]
    owed: mx.array | None = None
    newest: mx.array | None = None
    before: Sequence[Any] = ()


class AdaptedCache(ModelCache):
    """See the module."""

    def __init__(self, model: RowRunner, num_rows: int) -> None:
        self._model = model
        self._rows: list[_Row] = []
        for _ in range(num_rows):
            self._add(model.new_caches())
        layers: list[Any] = [AdaptedLayer(self._rows, i, form) for i, form in enumerate(model.forms)]
        super().__init__(layers, num_rows, defers=True)
        self._cuts = model.cuts and all(form.is_cuttable or form.is_window for form in model.forms)
        self._ahead: list[tuple[Any, int]] = []  # leaves that a fork shares, and how long they are without it
        self._is_dead = False

    @property
    def takes_unread(self) -> bool:
        return False

    def _add(self, caches: list[Any]) -> None:
        self._rows.append(_Row(caches=caches, leaves=leaves.leaves_of(caches)))

    # --- the transaction

    def begin(self, rows: FlatRows, *, certain: bool = False) -> Places:
        if self._is_dead:
            raise CacheError("A forward on this cache failed, and mlx-lm's caches could not be put back.")
        if self.pending is None:
            self._recall()
        return super().begin(rows, certain=certain)

    def run(self, tokens: mx.array, *, together: bool) -> mx.array:
        """Hiddens (N, H) of tokens (N,) int32 of the open forward, whose rows share it or run one after another."""
        rows = self.pending
        if rows is None:
            raise CacheError("No forward was begun.")
        pieces = [(self._rows[r], tokens[rows.starts[r] : rows.starts[r + 1]]) for r in rows.active]
        given = [self._opened(row, piece) for row, piece in pieces]
        caches, widths = [row.caches for row, _ in pieces], [x.shape[0] for x in given]
        if together and len(given) > 1:
            hidden = self._model.together(mx.concatenate(given), widths, caches)
            if hidden.shape[0] == tokens.shape[0]:
                return hidden
            found = mx.split(hidden, [*accumulate(widths)][:-1])
        else:
            found = [self._model.body(x, own) for x, own in zip(given, caches, strict=True)]
        outs = [x[x.shape[0] - piece.shape[0] :] for x, (_, piece) in zip(found, pieces, strict=True)]
        return outs[0] if len(outs) == 1 else mx.concatenate(outs)

    def _opened(self, row: _Row, tokens: mx.array) -> mx.array:
        """The tokens that a row is given in the open forward: those it owes itself in front."""
        may_lose = tokens.shape[0] > 1 and not self.pending_certain
        row.before = [
            leaf.offset if self._trims(form) else leaves.held(leaf) if may_lose else None
            for leaf, form in zip(row.leaves, self._model.forms, strict=True)
        ]
        row.newest = tokens
        return _joined(row.owed, tokens)

    def commit(self, num_committed: Sequence[int] | mx.array | None = None) -> None:
        """As ModelCache's, by numbers only."""
        rows = self.pending
        if rows is None:
            raise CacheError("There is nothing to commit.")
        if isinstance(num_committed, mx.array):
            raise CacheError("mlx-lm's caches must know where their rows end: commit by numbers.")
        counts = checked(rows.widths if num_committed is None else num_committed, rows)
        if self.pending_certain and counts != list(rows.widths):
            raise CacheError("A forward of certain tokens is committed whole.")
        self._is_dead = True  # unless all of it comes to its end
        for row, width, count in zip(self._rows, rows.widths, counts, strict=True):
            self._keep(row, width, count)
        self._is_dead = False
        self.lengths = [n + k for n, k in zip(self.lengths, counts, strict=True)]
        self.pending = None

    def _keep(self, row: _Row, width: int, count: int) -> None:
        newest, lost = row.newest, width - count
        if newest is None:
            return
        if not lost:
            row.owed = None
        elif count and self._cuts:
            for leaf in row.leaves:
                leaves.cut(leaf, lost)
            row.owed = None
        else:
            if not self._go_back(row):
                raise CacheError(
                    "mlx-lm's caches were not held before this forward, so nothing of it can be taken back."
                )
            if count:
                row.owed = _joined(row.owed, newest[:count])
        row.newest, row.before = None, ()
        if row.owed is not None and row.owed.shape[0] > OWED_AT_MOST:
            self._catch_up(row)

    def _go_back(self, row: _Row) -> bool:
        """To before the open forward; whether every leaf could."""
        for leaf, before in zip(row.leaves, row.before, strict=True):
            if before is None:
                continue
            if isinstance(before, int):
                leaves.cut(leaf, leaf.offset - before)
            else:
                leaves.put_back(leaf, before)
        is_whole = all(before is not None for before in row.before)
        row.newest, row.before = None, ()
        return is_whole

    def _catch_up(self, row: _Row) -> None:
        if row.owed is not None:
            mx.async_eval(self._model.body(row.owed, row.caches))
            row.owed = None

    def abort(self) -> None:
        for row in self._rows if self.pending is not None else ():
            if row.newest is not None and not self._go_back(row):
                self._is_dead = True
        self.pending = None

    def _trims(self, form: LeafForm) -> bool:
        return form.is_cuttable and self._model.cuts

    # --- rows

    def fork(self, *, tails: bool = False) -> AdaptedCache:
        self.flush()
        self._require_alive()
        twin = AdaptedCache(self._model, 0)
        for row in self._rows:
            shared = [
                leaf for leaf, form in zip(row.leaves, self._model.forms, strict=True) if self._trims(form)
            ]
            self._ahead += [(leaf, leaf.offset) for leaf in shared]
            names = {id(leaf) for leaf in shared}
            twin._add(leaves.forked(row.caches, lambda leaf, names=names: id(leaf) in names))  # type: ignore[misc]
        twin.lengths, twin.shifts = list(self.lengths), list(self.shifts)
        twin._family, twin._is_fork = self._family, True
        self._family["writer"] = id(twin)
        return twin

    def _recall(self) -> None:
        """End a fork: take what it appended out of the leaves that it shares."""
        ahead, self._ahead = self._ahead, []
        for leaf, length in ahead:
            leaves.cut(leaf, leaf.offset - length)
        if ahead:
            self._family["writer"] = id(self)

    def flush(self) -> None:
        """Run what rows owe themselves."""
        self._require_idle("flush")
        self._recall()
        for row in self._rows:
            self._catch_up(row)

    def join(self, other: ModelCache) -> None:
        if not isinstance(other, AdaptedCache) or other._model is not self._model:
            raise CacheError("These rows are of another model's cache.")
        for cache in (self, other):
            cache._require_own("join")
            cache._recall()
        self._rows += other._rows
        self.lengths += other.lengths
        self.shifts += other.shifts

    def select(self, rows: Sequence[int]) -> None:
        self._require_own("select")
        self._recall()
        self._rows[:] = [self._rows[r] for r in rows]
        self.lengths = [self.lengths[r] for r in rows]
        self.shifts = [self.shifts[r] for r in rows]

    def truncate(self, row: int, length: int) -> None:
        """Raises CacheError, and changes nothing, unless every leaf can be trimmed at any length."""
        self._require_own("truncate")
        self._recall()
        lost = self.lengths[row] - length
        if not 0 <= lost <= self.lengths[row]:
            raise CacheError(f"Cannot cut a row of {self.lengths[row]} tokens to {length}.")
        if lost and not all(self._trims(form) for form in self._model.forms):
            raise CacheError("This cache cannot be cut back; restore a snapshot instead.")
        for leaf in self._rows[row].leaves:
            leaves.cut(leaf, lost)
        self.lengths[row] = length

    @property
    def nbytes(self) -> int:
        """Of all leaves; those that a fork shares are its parent's."""
        own = {id(x): x.nbytes for layer in self.layers for x in layer.arrays}
        return 0 if self._is_fork else sum(own.values())


def _joined(owed: mx.array | None, tokens: mx.array) -> mx.array:
    return tokens if owed is None else mx.concatenate([owed, tokens])
