"""Layers of mlx-lm's code, cut at their attention: what is before it and what is behind it are pieces of segments (segments.py), although
the code knows nothing of cuts.

A layer is called twice. `before` ends the first call where the layer calls attention, and returns what attention was given. `behind` calls
the layer again and returns a given result where it calls attention. MLX is lazy: what the second call builds up to there is never computed.
Knows layers as mlx-lm calls them; knows no rows' lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from mlxspec.models.seams import Held, SeamError, StandInCache
from mlxspec.models.segments import LayerPiece


class AttentionInputs(NamedTuple):
    """The inputs of a layer's attention: queries (N, Hq, 1, D); keys and values (N, Hkv, 1, ·), None where the layer uses those of another
    layer; sinks (Hq,) or None."""

    queries: mx.array
    keys: mx.array | None = None
    values: mx.array | None = None
    sinks: mx.array | None = None


class _Reached(Exception):
    """An exception that ends a layer's call at its attention and carries the attention's inputs."""

    def __init__(self, queries: mx.array, scale: float, sinks: mx.array | None) -> None:
        self.queries, self.scale, self.sinks = queries, scale, sinks


class Cut(StandInCache):
    """A placeholder for a layer's cache that cuts the layer's call at its attention. attended (N, Hq, 1, Dv): the result that the attention
    returns; None: the call ends where attention is called. held: the placeholder for keys and values, also for those of another layer.
    kept: the layer's own keys and values, once it has written them."""

    def __init__(self, offset: mx.array, attended: mx.array | None, dtype: mx.Dtype) -> None:
        self.offset, self.held = offset, Held(self._attend, dtype)
        self.kept: tuple[mx.array, mx.array] | None = None
        self._attended, self._has_answered = attended, False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Held, Held]:
        self.kept = keys, values
        return self.keys_and_values()

    def _attend(self, queries: mx.array, scale: float, _: Any, sinks: mx.array | None) -> mx.array:
        if self._attended is None:
            raise _Reached(queries, scale, sinks)
        if self._has_answered:
            raise SeamError("one of its layers attends twice")
        self._has_answered = True
        return self._attended


# of (layer, x (N, 1, H), cut, arrays of the layer's own), gives x; equal ones give layers of one form one graph
Call = Callable[..., mx.array]


def before(call: Call, layer: Any, x: mx.array, offset: mx.array) -> AttentionInputs:
    """Call a layer up to its attention, and return the attention's inputs. x (N, 1, H): the layer's input. offset (N,): positions. Raises
    SeamError where the layer does not call attention."""
    return _before(call, layer, x, offset)[0]


def scale_of(call: Call, layer: Any, x: mx.array, offset: mx.array) -> float:
    """Return the factor of the attention scores of a layer that has its own keys. Raises SeamError where the layer has none, or returns
    more than its output."""
    asked, scale = _before(call, layer, x, offset)
    if asked.keys is None or asked.values is None:
        raise SeamError("one of its layers has no keys of its own")
    attended = mx.zeros((*asked.queries.shape[:3], asked.values.shape[3]), asked.queries.dtype)
    out: Any = behind(call, layer, x, attended, offset)
    if not isinstance(out, mx.array) or out.shape != x.shape:
        raise SeamError("one of its layers gives more than its output")
    return scale


def _before(call: Call, layer: Any, x: mx.array, offset: mx.array) -> tuple[AttentionInputs, float]:
    cut = Cut(offset, None, x.dtype)
    try:
        call(layer, x, cut)
    except _Reached as reached:
        keys, values = cut.kept or (None, None)
        return AttentionInputs(reached.queries, keys, values, reached.sinks), reached.scale
    raise SeamError("one of its layers does not attend")


def behind(
    call: Call, layer: Any, x: mx.array, attended: mx.array, offset: mx.array, *more: mx.array | None
) -> mx.array:
    """Call a layer with `attended` as the result of its attention, and return the layer's output (N, 1, H). call: calls the layer as
    mlx-lm does. x (N, 1, H): the layer's input. offset (N,): positions. more: further inputs of the layer."""
    return call(layer, x, Cut(offset, attended, x.dtype), *more)


def piece_before(call: Call) -> LayerPiece:
    """Return the piece of a layer up to its attention. The piece takes x and offset, and returns x and the attention's inputs."""
    return LayerPiece(("before", call), lambda layer, x, offset: (x, before(call, layer, x, offset)))


def piece_behind(call: Call) -> LayerPiece:
    """Return the piece of a layer from its attention on. The piece takes x, the attention's result, offset and further inputs of the layer,
    and returns the layer's output."""
    return LayerPiece(("behind", call), lambda layer, x, *given: (behind(call, layer, x, *given), None))
