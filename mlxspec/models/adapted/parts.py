"""One forward for all rows where only some parts of a module know rows: those that are given a cache run row by row, over mlx-lm's own
caches, and everything between them (embeddings, norms, MLPs, experts) once for all tokens.

Which parts those are is seen in a lazy forward, not known by name: the innermost modules that are called with a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList

from mlxspec.models.adapted.leaves import leaves_of
from mlxspec.models.adapted.stand_in import Place, standing_in
from mlxspec.models.seams import SeamError


class RowCaches:
    """In the place of a cache in a forward over the tokens (1, N) of several rows: by row, the cache and how many tokens it is given."""

    def __init__(self, caches: Sequence[Any], widths: Sequence[int]) -> None:
        self.caches, self.widths = list(caches), list(widths)

    def make_mask(self, _: int, **how: Any) -> Each | None:
        """Masks, as each row's cache makes them now."""
        masks = [cache.make_mask(width, **how) for cache, width in zip(self.caches, self.widths, strict=True)]
        return None if all(mask is None for mask in masks) else Each(masks)

    def __getitem__(self, place: int) -> RowCaches:
        if not all(isinstance(cache, CacheList) for cache in self.caches):
            raise SeamError("it reads states outside of the parts that keep them")
        return RowCaches([cache[place] for cache in self.caches], self.widths)

    def __getattr__(self, name: str) -> Any:
        """What each row's cache has of that name; of a method, what calls it for each."""
        found = Each([getattr(cache, name) for cache in self.caches])
        if all(map(callable, found.values)):
            return lambda *args, **kwargs: _joined(
                [call(*args, **kwargs) for call in found.values], self.widths
            )
        return found


class Each:
    """In the place of a value that each row has for itself: a mask, or what a part gave beside its output."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = list(values)

    def __getattr__(self, name: str) -> Any:
        raise SeamError(f"it computes with what belongs to single rows ({name})")


class ByRows(nn.Module):
    """In the place of a part that is given a cache."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self["part"] = part

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if "part" not in self:  # a copy that is being made
            raise AttributeError(name)
        return getattr(self["part"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, RowCaches)), None)
        if given is None:
            return self.part(*args, **kwargs)
        starts = [0, *accumulate(given.widths)]
        outs = []
        for row, width in enumerate(given.widths):

            def own(value: Any, row: int = row, width: int = width) -> Any:
                if isinstance(value, RowCaches):
                    return value.caches[row]
                if isinstance(value, Each):
                    return value.values[row]
                if isinstance(value, mx.array) and value.ndim > 1 and value.shape[:2] == (1, starts[-1]):
                    return value[:, starts[row] : starts[row] + width]
                return value

            outs.append(self.part(*map(own, args), **{name: own(value) for name, value in kwargs.items()}))
        return _joined(outs, given.widths)


def _joined(outs: list[Any], widths: Sequence[int]) -> Any:
    """One value in the place of each row's: tokens behind one another, tuples place by place, others side by side."""
    if len({type(out) for out in outs}) == 1 and isinstance(outs[0], tuple):
        return tuple(_joined(list(values), widths) for values in zip(*outs, strict=True))
    if all(
        isinstance(x, mx.array) and x.ndim > 1 and x.shape[:2] == (1, w)
        for x, w in zip(outs, widths, strict=True)
    ):
        return outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=1)
    return None if all(out is None for out in outs) else Each(outs)


def split_parts(
    module: nn.Module, new_caches: Callable[[], list[Any]], run: Callable[[mx.array, list[Any]], Any]
) -> Callable[[], None]:
    """Put `ByRows` in front of the parts, and return what takes it away again. run: the module over tokens (1, n) and caches, lazily.
    Raises SeamError, and leaves the module as it was, where all rows cannot be run so."""
    caches = new_caches()
    named = {id(x) for cache in caches for x in (cache, *leaves_of([cache])) if x is not None}
    for owner, name in _places(module):
        if isinstance(owner[name], ByRows):  # of a model that was made of this module before
            owner[name] = owner[name].part
    places = list(_places(module))
    found: list[Place] = []
    with _watched(places, named, found):
        run(mx.zeros((1, 2), mx.int32), caches)
    if not found:
        raise SeamError("no part of it is given a cache")
    own = list({(id(owner), name): (owner, name, owner[name]) for owner, name in found}.values())
    for owner, name, part in own:
        owner[name] = ByRows(part)

    def undo() -> None:
        for owner, name, part in own:
            owner[name] = part

    try:
        rows = [new_caches() for _ in range(2)]
        run(mx.zeros((1, 4), mx.int32), [RowCaches(each, (3, 1)) for each in zip(*rows, strict=True)])
    except Exception as error:  # whatever the module's code does with what is no cache
        undo()
        raise (
            error if isinstance(error, SeamError) else SeamError("its parts do not take rows apart")
        ) from error
    return undo


def _places(module: nn.Module) -> Iterator[Place]:
    """Places of modules in others."""
    for part in module.modules():
        for name, child in part.items():
            if isinstance(child, nn.Module):
                yield part, name
            elif isinstance(child, list):
                yield from ((child, i) for i, x in enumerate(child) if isinstance(x, nn.Module))


@contextmanager
def _watched(places: Sequence[Place], named: set[int], found: list[Place]) -> Iterator[None]:
    """While it is open, `found` is told of the innermost modules that are called with one of these objects."""
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
