"""Finds where a module of mlx-lm gets from hidden states to logits, and runs the two parts apart.

No architecture is known by name: stand-ins take children's places for a call. The trunk is the child that is called once, with whose
output alone the module gives logits: given tokens and caches that fail when they are looked at, everything behind the trunk still runs.
So what is found follows from the code and reads no weights. The head is the module's own call with the trunk's output in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlxspec.models.adapted.stand_in import standing_in


class Trunk(NamedTuple):
    """The submodule `owner[name]` of a module that turns tokens into hidden states. hidden (1, n, H): its output in the lazy run that found
    it."""

    owner: Any
    name: str
    hidden: mx.array


class _Unseen:
    """A placeholder for tokens where the module's code must not read them. It has a shape and no values."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.ndim = shape, len(shape)


class _Hidden(Exception):
    """An exception that ends a call of the module after the trunk and carries the trunk's output."""

    def __init__(self, hidden: mx.array) -> None:
        self.hidden = hidden


class _Entered(Exception):
    """An exception that ends a call of the module at the first layer and carries the layer's input."""

    def __init__(self, given: mx.array) -> None:
        self.given = given


def find_trunk(module: nn.Module, new_caches: Callable[[], list[Any]]) -> Trunk | None:
    """Return the submodule from whose output alone the module gives logits; None where there is none. new_caches: makes mlx-lm's prompt
    cache of one row."""
    tokens = mx.ones((1, 5), mx.int32)
    return _find(module, module, lambda: module(tokens, cache=new_caches()), tokens.shape)


def _find(module: Any, owner: Any, run: Callable[[], mx.array], shape: tuple[int, ...]) -> Trunk | None:
    for name, child in list(owner.children().items()):
        if not isinstance(child, nn.Module):
            continue
        given: list[Any] = []

        def answer(_: int, own: Any, *args: Any, given: list[Any] = given, **kwargs: Any) -> Any:
            given.append(own(*args, **kwargs))
            return given[-1]

        with standing_in([(owner, name)], answer):
            logits = run()
        if len(given) != 1 or not isinstance(given[0], mx.array) or given[0].shape[:-1] != shape:
            continue
        if given[0] is logits:
            found = _find(module, child, run, shape)
        else:
            found = (
                Trunk(owner, name, given[0]) if _is_enough(module, owner, name, given[0], logits) else None
            )
        if found is not None:
            return found
    return None


def _is_enough(module: Any, owner: Any, name: str, hidden: mx.array, logits: mx.array) -> bool:
    """Return whether the module gives logits from the output of the submodule `owner[name]` alone. hidden: this output; logits: those of
    the whole run."""
    try:
        with standing_in([(owner, name)], lambda *_, **__: hidden):
            again = module(_Unseen(hidden.shape[:-1]), cache=object())
    except Exception:  # whatever the module's code does with what is neither tokens nor caches
        return False
    return isinstance(again, mx.array) and again.shape == logits.shape


def run_trunk(module: Any, trunk: Trunk, tokens: mx.array, caches: list[Any]) -> mx.array:
    """Run tokens (B, n) through the trunk, and return its output (B, n, H). Nothing after the trunk is built."""

    def answer(_: int, child: Any, *args: Any, **kwargs: Any) -> Any:
        raise _Hidden(child(*args, **kwargs))

    try:
        with standing_in([(trunk.owner, trunk.name)], answer):
            module(tokens, cache=caches)
    except _Hidden as found:
        return found.hidden
    raise RuntimeError("the trunk was not called")  # it was when it was found


def run_head(module: Any, trunk: Trunk, hidden: mx.array) -> mx.array:
    """Run the rest of the module on the trunk's output (1, n, H), and return the logits (1, n, V)."""
    with standing_in([(trunk.owner, trunk.name)], lambda *_, **__: hidden):
        logits: mx.array = module(_Unseen(hidden.shape[:-1]), cache=object())
    return logits


def find_layers(trunk: Any) -> list[Any]:
    """Return the longest list of modules in a trunk, which is the list of its decoder layers; empty where there is none."""
    found: list[Any] = []
    for part in trunk.modules():
        for child in part.values():
            if (
                isinstance(child, list)
                and len(child) > len(found)
                and all(isinstance(x, nn.Module) for x in child)
            ):
                found = child
    return found


def first_input(layers: list[Any], run: Callable[[], Any]) -> mx.array:
    """Return the input of the first of these layers in a call of `run`. Nothing after it is built."""

    def answer(_: int, __: Any, x: mx.array, *___: Any, **____: Any) -> Any:
        raise _Entered(x)

    try:
        with standing_in([(layers, 0)], answer):
            run()
    except _Entered as found:
        return found.given
    raise RuntimeError("the first layer was not called")


@contextmanager
def tapped(layers: list[Any], taps: Sequence[int]) -> Iterator[dict[int, mx.array]]:
    """Record the residual stream after some layers during the `with` block. taps: numbers of these layers. Yields the dict that gets the
    streams by layer number."""
    found = dict[int, mx.array]()

    def answer(i: int, layer: Any, *args: Any, **kwargs: Any) -> Any:
        out = layer(*args, **kwargs)
        found[taps[i]] = out[0] if isinstance(out, tuple) else out
        return out

    with standing_in([(layers, i) for i in taps], answer):
        yield found


class Product(NamedTuple):
    """The product that turns the trunk's output into logits. `owner[name]` is its module: a linear layer, or an embedding that is also the
    language-model head."""

    owner: Any
    name: str

    @property
    def module(self) -> nn.Module:
        found: nn.Module = self.owner[self.name]
        return found


class _Raw:
    """A placeholder for the module of the language-model head. A call with the trunk's output returns `raw`; attributes are those of the
    module."""

    def __init__(self, child: Any, hidden: mx.array, raw: mx.array) -> None:
        self._child, self._hidden, self._raw = child, hidden, raw

    def __call__(self, x: mx.array) -> mx.array:
        if x is not self._hidden:
            raise RuntimeError("the head's product is of something else than the trunk's output")
        return self._raw

    as_linear = __call__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._child, name)


def find_product(module: Any, trunk: Trunk, num_rows: int) -> Product | None:
    """Return the product with `num_rows` rows and no bias whose outputs are the logits but for scaling and capping; None where the module
    has none that works with some of its rows alone."""
    kinds = nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding
    for owner in module.modules():
        for name, child in list(owner.items()):
            if isinstance(child, kinds) and child.weight.shape[0] == num_rows and "bias" not in child:
                found = Product(owner, name)
                try:
                    logits = behind_product(module, trunk, found, mx.zeros((2, 7), trunk.hidden.dtype))
                except Exception:  # whatever the head's code does with it
                    continue
                if logits.shape == (2, 7):
                    return found
    return None


def behind_product(module: Any, trunk: Trunk, product: Product, raw: mx.array) -> mx.array:
    """Return the module's logits (n, R) from outputs `raw` (n, R) of the head's product, for all of its rows or some: scaled and capped as
    the module does."""
    hidden = mx.zeros((1, raw.shape[0], trunk.hidden.shape[-1]), trunk.hidden.dtype)
    own = product.module
    product.owner[product.name] = _Raw(own, hidden, raw[None])
    try:
        return run_head(module, trunk, hidden)[0]
    finally:
        product.owner[product.name] = own
