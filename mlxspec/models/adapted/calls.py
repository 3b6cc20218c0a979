"""Finds how a module of mlx-lm calls its decoder layers, so that they can be cut at their attention (cut_layers.py).

The calls are recorded in a lazy forward, whatever the architecture. Layers can be cut where each is called once, in order, with the output
of the one before and a cache of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from mlxspec.models.adapted.stand_in import standing_in
from mlxspec.models.cut_layers import scale_of
from mlxspec.models.seams import SeamError, Seen, attending_by_row, blank_layers

_CACHE, _MASK = object(), Seen(None)  # they mark where a call takes its cache and its mask
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True)
class LayerCall:
    """A call of one decoder layer. Calls that build the same graph are equal. args, kwargs: the layer's arguments in addition to its input.
    place: the number of the layer's cache among the module's caches. scale: the factor of the attention scores."""

    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    place: int = field(compare=False)
    scale: float = field(compare=False, default=1.0)

    def __call__(self, layer: Any, x: mx.array, cut: Any) -> mx.array:
        args = (cut if value is _CACHE else value for value in self.args)
        kwargs = {name: cut if value is _CACHE else value for name, value in self.kwargs}
        out: mx.array = layer(x, *args, **kwargs)
        return out


def find_calls(layers: list[Any], num_caches: int, run: Callable[[list[Any]], Any]) -> list[LayerCall]:
    """Return the call of each decoder layer, recorded in one lazy run. run: runs the module over a few tokens with the given caches. Raises
    SeamError where the layers are not called one after the other, each with one cache of its own."""
    caches, newest, found = blank_layers(num_caches), list[Any](), list[LayerCall]()

    def plain(value: Any) -> Any:
        if isinstance(value, Seen):
            return _MASK
        if isinstance(value, _PLAIN):
            return value
        if any(value is cache for cache in caches):
            return _CACHE
        raise SeamError("its layers are given more than their input, a mask and a cache")

    def answer(i: int, own: Any, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        if i != len(found) or not isinstance(x, mx.array) or (newest and newest[-1] is not x):
            raise SeamError("its layers are not called one after the other")
        given = *args, *kwargs.values()
        places = [place for place, cache in enumerate(caches) if any(value is cache for value in given)]
        if len(places) != 1:
            raise SeamError("not every layer has a cache of its own")
        named = tuple((name, plain(value)) for name, value in kwargs.items())
        call = LayerCall(args=tuple(map(plain, args)), kwargs=named, place=places[0])
        found.append(replace(call, scale=scale_of(call, own, x, caches[0].offset)))
        newest[:] = [own(x, *args, **kwargs)]
        return newest[-1]

    with attending_by_row(), standing_in([(layers, i) for i in range(len(layers))], answer):
        run(caches)
    if len(found) != len(layers):
        raise SeamError("not all of its layers are called")
    return found
