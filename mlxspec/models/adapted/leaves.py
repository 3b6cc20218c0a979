"""Removes rejected tokens from mlx-lm's prompt caches, by the kind of each cache object.

A prompt cache is a list with an object for each layer. Objects that hold arrays are *leaves* here; a CacheList only groups them. How a leaf
goes back follows from the object, not from the model:

    cuttable   its newest tokens can be trimmed at any length (KVCache and others without a bound)
    window     a RotatingKVCache. Behind a forward of several tokens it lies in order with all that is needed, so its end can be cut off.
    others     go back to what they were before the forward: states of recurrent layers, and whatever else there is

Knows cache objects; knows no models, no rows and no transactions.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from mlxspec.cache.attention import copied
from mlxspec.errors import CacheError
from mlxspec.platform.host import numbers


def leaves_of(caches: Sequence[Any]) -> list[Any]:
    """The objects that hold arrays, each once, in order."""
    found: dict[int, Any] = {}
    for cache in caches:
        inner = leaves_of(cache.caches) if isinstance(cache, CacheList) else [cache]
        found |= {id(leaf): leaf for leaf in inner if leaf is not None}
    return list(found.values())


def is_window(leaf: Any) -> bool:
    """Whether its end can be cut off behind a forward of several tokens, however many it has forgotten."""
    return type(leaf) is RotatingKVCache


def is_cuttable(leaf: Any) -> bool:
    """Whether any number of its newest tokens can be trimmed at any length, by what a fresh one says."""
    has_bound = getattr(leaf, "max_size", None) is not None
    says_so = getattr(leaf, "is_trimmable", None)
    return not has_bound and says_so is not None and says_so() and type(getattr(leaf, "offset", None)) is int


def keeps_tokens(leaf: Any) -> bool:
    """Whether it is keys and values of every token in order, and nothing else."""
    return type(leaf) is KVCache


def cut(leaf: Any, num: int) -> None:
    """Take away its newest tokens. Raises CacheError where the leaf does not do what it says.

    Of a window the arrays are cut. `trim` would leave the stale tokens behind the end, and the next step may drop as many from the front.
    """
    if num <= 0:
        return
    if is_window(leaf):
        size = leaf.keys.shape[2] - num
        leaf.keys, leaf.values = leaf.keys[..., :size, :], leaf.values[..., :size, :]
        leaf.offset, leaf._idx = leaf.offset - num, size
    elif leaf.trim(num) != num:
        raise CacheError(f"{type(leaf).__name__} of mlx-lm did not trim {num} tokens.")


def held(leaf: Any) -> dict[str, Any]:
    """What it is, by reference: nothing is copied. A forward may write into an array of the same Python object (`x[...] = y`), so
    each gets a Python object of its own."""
    found: dict[str, Any] = mapped(vars(leaf), copy.copy)
    return found


def put_back(leaf: Any, state: dict[str, Any]) -> None:
    """Make a leaf what it was when it was `held`. Only once for each."""
    vars(leaf).clear()
    vars(leaf).update(state)


def forked(caches: Sequence[Any], is_shared: Callable[[Any], bool]) -> list[Any]:
    """The same caches for a reader that runs ahead: leaves that are shared are the same objects, the others hold the same arrays."""
    made: dict[int, Any] = {}

    def twin(cache: Any) -> Any:
        if id(cache) not in made:
            new = cache
            if isinstance(cache, CacheList):
                new = copy.copy(cache)
                new.caches = tuple(map(twin, cache.caches))
            elif cache is not None and not is_shared(cache):
                new = copy.copy(cache)
                put_back(new, held(cache))
            made[id(cache)] = new
        return made[id(cache)]

    return list(map(twin, caches))


def mapped(value: Any, function: Callable[[mx.array], Any]) -> Any:
    """The same with `function` of every array in it."""
    if isinstance(value, mx.array):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(x, function) for x in value])
    if isinstance(value, dict):
        return {key: mapped(x, function) for key, x in value.items()}
    return value


def arrays_of(leaf: Any) -> list[mx.array]:
    """Every array that it holds."""
    found: list[mx.array] = []
    mapped(vars(leaf), found.append)
    return found


def packed(leaf: Any) -> tuple[mx.array, ...]:
    """All of it as arrays: first a skeleton, JSON as bytes, in which numbers stand for arrays; behind it those arrays, copied. Raises
    CacheError where it holds what is no JSON."""
    arrays = arrays_of(leaf)
    num = iter(range(len(arrays)))
    skeleton = mapped(vars(leaf), lambda _: {"array": next(num)})
    try:
        told = json.dumps(skeleton, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise CacheError(f"{type(leaf).__name__} of mlx-lm cannot be kept: {error}.") from error
    return mx.array(np.frombuffer(told, np.uint8)), *(copied(x) if x.ndim else x + 0 for x in arrays)


def unpack(leaf: Any, parts: Sequence[mx.array]) -> None:
    """Make a leaf what `packed` was given."""
    skeleton, *arrays = parts

    def filled(value: Any) -> Any:
        if isinstance(value, dict) and set(value) == {"array"}:
            return copy.copy(arrays[value["array"]])
        if isinstance(value, dict):
            return {key: filled(x) for key, x in value.items()}
        return [filled(x) for x in value] if isinstance(value, list) else value

    put_back(leaf, filled(json.loads(bytes(numbers(skeleton)))))
