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
    """`owner[name]` is the child; hidden (1, n, H): what it gave."""

    owner: Any
    name: str
    hidden: mx.array


class _Unseen:
    """Stands for tokens where nobody may look at them; their number is no secret."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.ndim = shape, len(shape)


class _Hidden(Exception):
    """Ends a call of the module when the trunk has answered."""

    def __init__(self, hidden: mx.array) -> None:
        self.hidden = hidden


class _Entered(Exception):
    """Ends a call of the module when the first layer is reached."""

    def __init__(self, given: mx.array) -> None:
        self.given = given


def find_trunk(module: nn.Module, new_caches: Callable[[], list[Any]]) -> Trunk | None:
    """None where there is no such child."""
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
    """Whether the module gives logits from the child's output alone."""
    try:
        with standing_in([(owner, name)], lambda *_, **__: hidden):
            again = module(_Unseen(hidden.shape[:-1]), cache=object())
    except Exception:  # whatever the module's code does with what is neither tokens nor caches
        return False
    return isinstance(again, mx.array) and again.shape == logits.shape


def run_trunk(module: Any, trunk: Trunk, tokens: mx.array, caches: list[Any]) -> mx.array:
    """(1, n) -> (1, n, H). Nothing behind the trunk is built."""

    def answer(_: int, child: Any, *args: Any, **kwargs: Any) -> Any:
        raise _Hidden(child(*args, **kwargs))

    try:
        with standing_in([(trunk.owner, trunk.name)], answer):
            module(tokens, cache=caches)
    except _Hidden as found:
        return found.hidden
    raise RuntimeError("the trunk was not called")  # it was when it was found


def run_head(module: Any, trunk: Trunk, hidden: mx.array) -> mx.array:
    """(1, n, H) -> (1, n, V)"""
    with standing_in([(trunk.owner, trunk.name)], lambda *_, **__: hidden):
        logits: mx.array = module(_Unseen(hidden.shape[:-1]), cache=object())
    return logits


def find_layers(trunk: Any) -> list[Any]:
    """The longest list of modules in a trunk, which is the one of its decoder layers; empty where there is none."""
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
    """The array that `run` gives the first of these layers; nothing behind that is built."""

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
    """Keep, while it is open, the residual stream after these layers, by their numbers."""
    found = dict[int, mx.array]()

    def answer(i: int, layer: Any, *args: Any, **kwargs: Any) -> Any:
        out = layer(*args, **kwargs)
        found[taps[i]] = out[0] if isinstance(out, tuple) else out
        return out

    with standing_in([(layers, i) for i in taps], answer):
        yield found


class Product(NamedTuple):
    """The product that makes logits of the trunk's output: `owner[name]`, a linear module or an embedding that is the head as well."""

    owner: Any
    name: str

    @property
    def module(self) -> nn.Module:
        found: nn.Module = self.owner[self.name]
        return found


class _Raw:
    """A placeholder for the module of a head's product: gives `raw` for the trunk's output, and is the module in all else."""

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
    """The one with `num_rows` rows, without a bias; None where there is none of which rows can be taken."""
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
    """Logits (n, R) of the product's outputs (n, R), of all its rows or some: scaled and capped as the module does."""
    hidden = mx.zeros((1, raw.shape[0], trunk.hidden.shape[-1]), trunk.hidden.dtype)
    own = product.module
    product.owner[product.name] = _Raw(own, hidden, raw[None])
    try:
        return run_head(module, trunk, hidden)[0]
    finally:
        product.owner[product.name] = own
