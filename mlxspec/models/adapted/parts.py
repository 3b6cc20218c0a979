"""One forward for all rows where only some parts of a module know rows: those that are given a cache run row by row, over mlx-lm's own
caches, and everything between them (embeddings, norms, MLPs, experts) once for all tokens.

Which parts those are is seen in a lazy forward, not known by name: the innermost modules that are called with a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList

from mlxspec.kernels.flat import FlatRows
from mlxspec.models.adapted import leaves
from mlxspec.models.adapted.stand_in import Place, standing_in
from mlxspec.models.adapted.stepwise import by_steps
from mlxspec.models.seams import SeamError


class RowsForward:
    """A forward over the tokens (1, N) of several rows. own: the leaves of each row's caches. calls: the recorded calls of parts, one for
    each row, kept where tokens may be rejected. The owner of the forward clears them, as they refer to the forward."""

    def __init__(self, rows: FlatRows, own: Sequence[Sequence[Any]], *, may_lose: bool = False) -> None:
        self.rows, self.own, self._may_lose = rows, own, may_lose
        self.calls: list[PartCall] = []

    def stand_ins(self, nest: Sequence[Any]) -> list[Any]:
        """Return the caches to call the module with: the row's own caches where one row is active and keeps all its tokens, else
        placeholders for all rows. nest: a prompt cache that is nested in the same way."""
        active = self.rows.active
        if len(active) == 1 and not self._may_lose:
            return leaves.replaced(nest, self.own[active[0]])
        return leaves.replaced(nest, [RowLeaf(place, self) for place in range(len(self.own[0]))])

    def answer(self, _: int, part: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a part for all rows and return its output: row by row where its arguments hold a cache, else once."""
        places = {leaf.place for leaf in _row_leaves((*args, *kwargs.values()))}
        if not places:
            return part(*args, **kwargs)
        outs = []
        for row in self.rows.active:
            call = PartCall(part, args, kwargs, self.rows, row, places)
            outs.append(call.run(self.own[row], self.rows.widths[row]))
            if self._may_lose:
                self.calls.append(call)
        return self.joined(outs)

    def joined(self, outs: list[Any]) -> Any:
        """Return one value from the values of the active rows: arrays of tokens are concatenated, tuples joined item by item, and other
        values kept in an `Each`."""
        if len({type(out) for out in outs}) == 1 and isinstance(outs[0], tuple):
            return tuple(self.joined(list(values)) for values in zip(*outs, strict=True))
        widths = [self.rows.widths[r] for r in self.rows.active]
        if all(
            isinstance(x, mx.array) and x.ndim > 1 and x.shape[:2] == (1, w)
            for x, w in zip(outs, widths, strict=True)
        ):
            return outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=1)
        return (
            None if all(out is None for out in outs) else Each(dict(zip(self.rows.active, outs, strict=True)))
        )


class RowLeaf:
    """A placeholder for the leaves of number `place` in all rows' caches."""

    def __init__(self, place: int, forward: RowsForward) -> None:
        self.place, self.forward = place, forward

    @property
    def by_row(self) -> dict[int, Any]:
        """Return, by active row, the leaf number `place` of that row's prompt cache. A leaf is a cache object that holds arrays."""
        return {r: self.forward.own[r][self.place] for r in self.forward.rows.active}

    def make_mask(self, _: int, **how: Any) -> Masks | None:
        """Return the masks that each row's leaf makes now; None where no row needs a mask. how: the arguments of the leaf's method."""
        widths = self.forward.rows.widths
        masks = {r: leaf.make_mask(widths[r], **how) for r, leaf in self.by_row.items()}
        return None if all(mask is None for mask in masks.values()) else Masks(masks, self.place, how)

    def __getitem__(self, _: Any) -> Any:
        raise SeamError("it reads states outside of the parts that keep them")

    def __getattr__(self, name: str) -> Any:
        """Return this attribute of all rows' leaves. Where it is a method, return a function that calls it for each row."""
        found = {r: getattr(leaf, name) for r, leaf in self.by_row.items()}
        if all(map(callable, found.values())):
            return lambda *args, **kwargs: self.forward.joined(
                [call(*args, **kwargs) for call in found.values()]
            )
        return Each(found)


class Each:
    """A placeholder for a value that differs between rows: a number, or an additional output of a part."""

    def __init__(self, values: Mapping[int, Any]) -> None:
        self.values = values

    def __getattr__(self, name: str) -> Any:
        raise SeamError(f"it computes with what belongs to single rows ({name})")


class Masks(Each):
    """The masks that the rows' leaves of number `place` have made with the arguments `how`."""

    def __init__(self, values: Mapping[int, Any], place: int, how: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.place, self.how = place, how


class PartCall(NamedTuple):
    """A call of a part for one row. args, kwargs: as the module gave them for all rows. places: numbers of the leaves among them."""

    part: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: FlatRows
    row: int
    places: set[int]

    def run(self, own: Sequence[Any], num: int, before: Sequence[Any] = ()) -> Any:
        """Call the part for the row's first `num` tokens, and return its output. own: the row's leaves. before: the row's leaves at the
        beginning of the forward, from which masks of `num` tokens are made; empty: the masks stay as given."""
        given = own, num, before
        named = {name: self._mine(value, *given) for name, value in self.kwargs.items()}
        with by_steps():
            return self.part(*(self._mine(value, *given) for value in self.args), **named)

    def _mine(self, value: Any, own: Sequence[Any], num: int, before: Sequence[Any]) -> Any:
        """Return what this row gets of an argument: its first `num` tokens of an array of all tokens, its own leaf or mask, else the
        argument."""
        if isinstance(value, mx.array):
            if value.ndim < 2 or value.shape[:2] != (1, self.rows.num_tokens):
                return value
            start = self.rows.starts[self.row]
            return value[:, start : start + num]
        if isinstance(value, RowLeaf):
            return own[value.place]
        if isinstance(value, Masks) and before:
            return before[value.place].make_mask(num, **value.how)
        if isinstance(value, Each):
            return value.values[self.row]
        if isinstance(value, CacheList):
            return CacheList(*(self._mine(x, own, num, before) for x in value.caches))
        if isinstance(value, (list, tuple)):
            return type(value)(self._mine(x, own, num, before) for x in value)
        return value


def _row_leaves(values: Sequence[Any]) -> Iterator[RowLeaf]:
    for value in values:
        if isinstance(value, RowLeaf):
            yield value
        elif isinstance(value, (list, tuple, CacheList)):
            yield from _row_leaves(value.caches if isinstance(value, CacheList) else value)


def find_parts(
    module: nn.Module, new_caches: Callable[[], list[Any]], run: Callable[[mx.array, list[Any]], Any]
) -> list[Place]:
    """Return the places of the parts that must run row by row: the innermost submodules that are called with a cache. run: runs the module
    lazily over tokens (1, n) and caches. Raises SeamError where the rest of the module cannot run once for all rows."""
    caches = new_caches()
    named = {id(x) for cache in caches for x in (cache, *leaves.leaves_of([cache])) if x is not None}
    places, found = list(_places(module)), list[Place]()
    with _watched(places, named, found):
        run(mx.zeros((1, 2), mx.int32), caches)
    if not found:
        raise SeamError("no part of it is given a cache")
    parts = list({(id(owner), name): (owner, name) for owner, name in found}.values())
    own = [leaves.leaves_of(new_caches()) for _ in range(2)]
    forward = RowsForward(FlatRows((3, 1)), own)
    try:
        with standing_in(parts, forward.answer):
            run(mx.zeros((1, 4), mx.int32), forward.stand_ins(caches))
    except SeamError:
        raise
    except Exception as error:  # whatever the module's code does with what is no cache
        raise SeamError("its parts do not take rows apart") from error
    return parts


def _places(module: nn.Module) -> Iterator[Place]:
    """Yield the place of each submodule: its owner (a module or a list), and its name or number there."""
    for part in module.modules():
        for name, child in part.items():
            if isinstance(child, nn.Module):
                yield part, name
            elif isinstance(child, list):
                yield from ((child, i) for i, x in enumerate(child) if isinstance(x, nn.Module))


@contextmanager
def _watched(places: Sequence[Place], named: set[int], found: list[Place]) -> Iterator[None]:
    """Add to `found`, during the `with` block, the places of the innermost submodules that are called with a cache. named: ids of the
    caches."""
    depth = [0]  # how many calls with a cache have begun within the present one

    def answer(i: int, child: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(id(x) in named for x in (*args, *kwargs.values())):
            return child(*args, **kwargs)
        before, depth[0] = depth[0], 0
        out = child(*args, **kwargs)
        if not depth[0]:
            found.append(places[i])
        depth[0] += before + 1
        return out

    with standing_in(places, answer):
        yield
