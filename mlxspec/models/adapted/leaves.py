"""mlx-lm's prompt caches of one row: the objects in them, what is known of such an object by its kind, and all of it as arrays.

A prompt cache is a list with an object for each layer. Objects that hold arrays are *leaves* here; a CacheList only groups them. Knows
cache objects; knows no models, no rows and no transactions.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList, KVCache

from mlxspec.cache.attention import copied
from mlxspec.errors import CacheError
from mlxspec.platform.host import numbers


def leaves_of(caches: Sequence[Any]) -> list[Any]:
    """Return the leaves of a prompt cache, each once, in order: the cache objects that hold arrays. A CacheList only groups leaves."""
    found: dict[int, Any] = {}
    for cache in caches:
        inner = leaves_of(cache.caches) if isinstance(cache, CacheList) else [cache]
        found |= {id(leaf): leaf for leaf in inner if leaf is not None}
    return list(found.values())


def replaced(caches: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return a prompt cache that is nested as `caches`, with `others` in the place of its leaves. others: in the order of `leaves_of`."""
    return _replaced(caches, dict(zip(map(id, leaves_of(caches)), others, strict=True)))


def _replaced(caches: Sequence[Any], others: dict[int, Any]) -> list[Any]:
    return [
        CacheList(*_replaced(cache.caches, others)) if isinstance(cache, CacheList) else others.get(id(cache))
        for cache in caches
    ]


def is_cuttable(leaf: Any) -> bool:
    """Return whether any number of the newest tokens can be trimmed from this leaf at any length. leaf: an empty leaf."""
    has_bound = getattr(leaf, "max_size", None) is not None
    says_so = getattr(leaf, "is_trimmable", None)
    return not has_bound and says_so is not None and says_so() and type(getattr(leaf, "offset", None)) is int


def keeps_tokens(leaf: Any) -> bool:
    """Return whether this leaf stores keys and values of every token in order, and nothing else."""
    return type(leaf) is KVCache


def reserve(leaf: Any, num: int) -> None:
    """Make room for `num` more tokens in a leaf that stores every token. Without this, mlx-lm's code would grow the buffers of all layers
    within one forward, where the copies of all layers are in memory at once; here each layer's old buffers are released before the next
    layer's grow."""
    if leaf.keys is None or leaf.offset + num <= leaf.keys.shape[2]:
        return
    room = roomy(leaf.offset + num, leaf.step) - leaf.offset
    leaf.keys, leaf.values = (
        mx.concatenate(
            [x[..., : leaf.offset, :], mx.zeros((*x.shape[:2], room, x.shape[3]), x.dtype)], axis=2
        )
        for x in (leaf.keys, leaf.values)
    )


def roomy(length: int, step: int) -> int:
    """Return for how many tokens a buffer has room after it has grown to hold `length` tokens: an eighth more, rounded up to a multiple of
    `step`."""
    return -(-(length + length // 8) // step) * step


def cut(leaf: Any, num: int) -> None:
    """Remove the newest `num` tokens from a leaf. Raises CacheError where the leaf's trim method removes another number."""
    if leaf.trim(num) != num:
        raise CacheError(f"{type(leaf).__name__} of mlx-lm did not trim {num} tokens.")


def twin(leaf: Any) -> Any:
    """Return another leaf that shares the memory of this leaf's arrays; nothing is copied. Each array gets a Python object of its own, as a
    forward may write into an array by `x[...] = y`."""
    found = copy.copy(leaf)
    _become(found, mapped(vars(leaf), copy.copy))
    return found


def copied_leaf(leaf: Any) -> Any:
    """Return another leaf of the same state, with copies of all arrays."""
    found = copy.copy(leaf)
    _become(found, mapped(vars(leaf), _copied))
    return found


def _copied(x: mx.array) -> mx.array:
    return copied(x) if x.ndim else x + 0


def _become(leaf: Any, state: dict[str, Any]) -> None:
    vars(leaf).clear()
    vars(leaf).update(state)


def mapped(value: Any, function: Callable[[mx.array], Any]) -> Any:
    """Return nested lists, tuples and dicts like `value`, in which each array is replaced by `function` of the array."""
    if isinstance(value, mx.array):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(x, function) for x in value])
    if isinstance(value, dict):
        return {key: mapped(x, function) for key, x in value.items()}
    return value


def arrays_of(leaf: Any) -> list[mx.array]:
    """Return every array that this leaf holds."""
    found: list[mx.array] = []
    mapped(vars(leaf), found.append)
    return found


def packed(leaf: Any) -> tuple[mx.array, ...]:
    """Return the state of a leaf as arrays. The first is a skeleton, JSON as bytes, in which numbers represent arrays; copies of these
    arrays follow. Raises CacheError where the leaf holds a value that JSON cannot represent."""
    arrays = arrays_of(leaf)
    num = iter(range(len(arrays)))
    skeleton = mapped(vars(leaf), lambda _: {"array": next(num)})
    try:
        told = json.dumps(skeleton, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise CacheError(f"{type(leaf).__name__} of mlx-lm cannot be kept: {error}.") from error
    return mx.array(np.frombuffer(told, np.uint8)), *map(_copied, arrays)


def unpack(leaf: Any, parts: Sequence[mx.array]) -> None:
    """Set the state of a leaf to the state that `packed` returned as `parts`."""
    skeleton, *arrays = parts

    def filled(value: Any) -> Any:
        if isinstance(value, dict) and set(value) == {"array"}:
            return copy.copy(arrays[value["array"]])
        if isinstance(value, dict):
            return {key: filled(x) for key, x in value.items()}
        return [filled(x) for x in value] if isinstance(value, list) else value

    _become(leaf, filled(json.loads(bytes(numbers(skeleton)))))
