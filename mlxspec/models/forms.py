"""Compiles one function for all layers that differ in their weights only, by passing the weights as arguments.

Tracing and compiling a forward of a new shape takes as long as several forwards; of one layer instead of all it is lost among them.
Knows modules and their parameters; knows no shapes, and not what a layer does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import is_dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxspec.platform.host import numbers


class Forms:
    """Forms of these layers, as they are at the first question: after loading and fusing, that is. A form is named by its first layer.

    Arrays that are no parameters (their names begin with an underscore) have the same values in layers of a form.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._first: list[int] = []
        self._named: list[list[tuple[str, mx.array]]] = []
        self._weights: list[list[mx.array]] = []

    def form(self, i: int) -> int:
        """The first layer that layer i is like."""
        if not self._first:
            marks = [_form(layer) for layer in self._layers]
            self._first = [marks.index(mark) for mark in marks]
            self._named = [tree_flatten(layer.parameters()) for layer in self._layers]
            self._weights = [[array for _, array in named] for named in self._named]
        return self._first[i]

    def weights(self, i: int) -> list[mx.array]:
        """Return the weights that `on` takes for layer i."""
        self.form(i)
        return self._weights[i]

    def on(self, i: int, run: Callable[..., Any]) -> Callable[..., Any]:
        """run(layer, *arrays) for any layer that is like layer i, as a function of weights and arrays. For tracing: it puts the weights
        into the layer and takes them out again."""
        layer, named = self._layers[self.form(i)], self._named[self.form(i)]

        def call(weights: Sequence[mx.array], *arrays: Any) -> Any:
            names = [name for name, _ in named]
            layer.update(tree_unflatten(list(zip(names, weights, strict=True))))
            try:
                return run(layer, *arrays)
            finally:
                layer.update(tree_unflatten(list(named)))

        return call


def _form(layer: nn.Module) -> Hashable:
    """Equal for layers in which only parameters differ."""
    return tuple(
        (
            name,
            type(module),
            tuple(sorted((k, _marked(k, v)) for k, v in (vars(module) | dict(module)).items())),
        )
        for name, module in layer.named_modules()
    )


def _marked(name: str, value: object) -> str:
    is_constant = name.startswith("_") and isinstance(value, mx.array)
    return f"{_mark(value)} {numbers(value).tobytes().hex()}" if is_constant else _mark(value)


def _mark(value: object) -> str:
    if isinstance(value, mx.array):
        return f"{value.shape} {value.dtype}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, dict):
        return str({k: _mark(v) for k, v in value.items()})
    if isinstance(value, (list, tuple)):
        return str([_mark(v) for v in value])
    if isinstance(value, (set, frozenset)):
        return str(sorted(_mark(v) for v in value))
    if isinstance(value, (bool, int, float, str, type(None))) or is_dataclass(value):
        return repr(value)
    return f"{type(value)} {id(value)}"
