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
    """Groups of layers that differ in their parameters only. The layers are compared at the first call, after they have been loaded and
    fused. A group is named by the number of its first layer.

    Arrays that are no parameters (their names begin with an underscore) have the same values in all layers of a group.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._first: list[int] = []
        self._named: list[list[tuple[str, mx.array]]] = []
        self._weights: list[list[mx.array]] = []

    def form(self, i: int) -> int:
        """Return the number of the first layer that differs from layer i in its parameters only."""
        if not self._first:
            marks = [_form(layer) for layer in self._layers]
            self._first = [marks.index(mark) for mark in marks]
            self._named = [tree_flatten(layer.parameters()) for layer in self._layers]
            self._weights = [[array for _, array in named] for named in self._named]
        return self._first[i]

    def weights(self, i: int) -> list[mx.array]:
        """Return the parameters of layer i, as the function that `on` returns takes them."""
        self.form(i)
        return self._weights[i]

    def on(self, i: int, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of (weights, *arrays) that calls run(layer, *arrays) with these weights in the layer, for any layer of the
        group of layer i. The function is for tracing: it puts the layer's own weights back after the call."""
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
    """Return a value that is equal for layers in which only parameters differ."""
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
