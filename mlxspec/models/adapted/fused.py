"""Fewer launches for a module of mlx-lm: linear layers of one input become one product, and norms that add 1 to their weight add it once.

Which layers share an input is seen in a lazy forward, not known by name. What each layer gives stays as it is, to rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxspec.models.layers import project

_LINEAR = (nn.Linear, nn.QuantizedLinear)
_PARTS = ("weight", "scales", "biases", "bias")  # in which rows are outputs


class _Call(NamedTuple):
    layer: nn.Module
    given: mx.array


class Joined(nn.Module):
    """Several linear layers with the same input, computed as one product. This module replaces the first of them; an `_Other` replaces each
    of the rest.

    whole: the layer with the weights of all. The first call with an input computes all outputs, and each layer takes its share; a call with
    another input computes them again.
    """

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self._splits = np.cumsum([part.weight.shape[0] for part in parts])[:-1].tolist()
        self._newest: tuple[mx.array, list[mx.array]] | None = None  # an input, and all its outputs
        self.whole = parts[0]
        for name in _PARTS:
            if parts[0].get(name) is not None:
                self.whole[name] = mx.concatenate([part[name] for part in parts])

    def __call__(self, x: mx.array) -> mx.array:
        return self.share(x, 0)

    def share(self, x: mx.array, place: int) -> mx.array:
        """Return the outputs of joined layer number `place` for the input `x`. The first call with an `x` computes the outputs of all
        layers, and later calls slice them. The call for the last layer frees them."""
        if self._newest is None or self._newest[0] is not x:
            self._newest = x, mx.split(project(self.whole, x), self._splits, axis=-1)
        out = self._newest[1][place]
        if place == len(self._splits):  # the last of them: nothing is held beyond the layer
            self._newest = None
        return out


class _Other(nn.Module):
    """A placeholder for a linear layer whose weight is part of a `Joined`."""

    def __init__(self, joined: Joined, place: int) -> None:
        super().__init__()
        self._joined, self._place = (joined,), place  # in a tuple: its parameters are not ours

    def __call__(self, x: mx.array) -> mx.array:
        return self._joined[0].share(x, self._place)


def join_products(module: nn.Module, run: Callable[[], Any]) -> None:
    """Replace the linear layers of `module` that receive the same input by one product (`Joined`). Which layers these are is recorded in a
    lazy run. run: runs the module over some tokens with new caches."""
    with _recorded() as calls:
        run()
    times = Counter(id(call.layer) for call in calls)
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, child in part.items():
            if isinstance(child, _LINEAR):
                owners.setdefault(id(child), []).append((part, name))
    for _, group in groupby(calls, key=lambda call: (id(call.given), *_form(call.layer))):
        layers = [call.layer for call in group]
        if len(layers) > 1 and all(times[id(x)] == 1 == len(owners.get(id(x), ())) for x in layers):
            joined = Joined(layers)
            for i, layer in enumerate(layers):
                ((owner, name),) = owners[id(layer)]
                owner[name] = _Other(joined, i) if i else joined


def _form(layer: nn.Module) -> tuple[Any, ...]:
    """Return the class, dtype and quantization of a linear layer. Layers can be joined where these are equal."""
    packing = tuple(getattr(layer, name, None) for name in ("group_size", "bits", "mode"))
    return type(layer), layer.weight.dtype, packing, *(name in layer for name in (*_PARTS, "global_scale"))


@contextmanager
def _recorded() -> Iterator[list[_Call]]:
    """Record the calls of linear layers in the `with` block. Yields the list to which the calls are added in order."""
    calls: list[_Call] = []
    own = {kind: kind.__call__ for kind in _LINEAR}

    def recorder(right: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def call(self: nn.Module, x: mx.array) -> mx.array:
            if type(self) in _LINEAR:
                calls.append(_Call(self, x))
            return right(self, x)

        return call

    for kind, right in own.items():
        kind.__call__ = recorder(right)
    try:
        yield calls
    finally:
        for kind, right in own.items():
            kind.__call__ = right


def fold_norms(module: nn.Module) -> None:
    """Replace norms that multiply by 1 + weight by mlx.nn.RMSNorm with 1 added to the weight. Whether a class does so is found by calling
    one of its norms."""
    known: dict[type, bool] = {}
    for part in module.modules():
        for name, child in list(part.items()):
            if (
                not isinstance(child, nn.Module)
                or list(child.parameters()) != ["weight"]
                or child.weight.ndim != 1
            ):
                continue
            kind = type(child)
            if kind not in known:
                known[kind] = kind is not nn.RMSNorm and _adds_one(child)
            if known[kind]:
                norm = nn.RMSNorm(1, child.eps)
                norm.weight = 1.0 + child.weight
                part[name] = norm


def _adds_one(norm: Any) -> bool:
    """Return whether this norm gives what MLX's RMS norm gives with a weight that is larger by 1."""
    own, eps = norm.weight, getattr(norm, "eps", None)
    if not isinstance(eps, float):
        return False
    rng = np.random.default_rng(0)
    x, weight = (mx.array(rng.standard_normal((n, own.shape[0]), np.float32)) for n in (3, 1))
    try:
        norm.weight = weight[0]
        found = norm(x)
    except Exception:  # whatever a class does that is no such norm
        return False
    finally:
        norm.weight = own
    return bool(mx.array_equal(found, mx.fast.rms_norm(x, 1.0 + weight[0], eps)).item())
