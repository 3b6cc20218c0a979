"""Measures how many bytes mlx-lm's caches of a row take, from the shapes of a row that is never computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxspec.models.adapted import leaves

_FIRST, _MORE = 5, 64  # tokens of the row's two forwards
_LONG = 8192  # tokens of which a state that grows in an unknown way is kept


@dataclass(frozen=True, kw_only=True)
class LeafForm:
    """The form of one leaf. title: its class. is_cuttable: whether its newest tokens can be trimmed. is_per_token: whether its snapshots
    can be cut and joined by token. each: bytes that a token adds; base: bytes in addition. most: the most tokens that it keeps, None for
    all. step: tokens by which its buffers grow. shapes: of its arrays after two short forwards."""

    title: str
    is_cuttable: bool
    is_per_token: bool
    each: int
    base: int
    most: int | None
    step: int
    shapes: tuple[tuple[int, ...], ...]

    def bytes_for(self, length: int, width: int) -> int:
        """Return an upper bound of the leaf's bytes for a row of `length` tokens with forwards of `width` tokens."""
        if self.is_per_token:
            kept = leaves.roomy(length, self.step)
        else:
            kept = length + self.step if self.most is None else min(length, self.most) + width + self.step
        return self.base + self.each * kept

    @property
    def is_state(self) -> bool:
        """Return whether the leaf has the same size at every length."""
        return not self.each

    @property
    def snapshot_bytes(self) -> int:
        """Return the bytes of a snapshot: for each token where the leaf stores every token, else of the whole leaf."""
        if self.is_per_token:
            return self.each
        return self.base + self.each * (_LONG if self.most is None else self.most)


def measured(
    new_caches: Callable[[], list[Any]], run: Callable[[mx.array, list[Any]], Any]
) -> list[LeafForm]:
    """Return the form of every leaf of a prompt cache, in the order of `leaves_of`. run: runs the module lazily over tokens (1, n) and
    caches."""
    caches = new_caches()
    fresh = leaves.leaves_of(new_caches())
    run(mx.ones((1, _FIRST), mx.int32), caches)
    before = [sum(x.nbytes for x in leaves.arrays_of(leaf)) for leaf in leaves.leaves_of(caches)]
    offsets = [getattr(leaf, "offset", None) for leaf in leaves.leaves_of(caches)]
    run(mx.ones((1, _MORE), mx.int32), caches)
    return [
        _form(empty, leaf, nbytes, is_whole=offset == _FIRST)
        for empty, leaf, nbytes, offset in zip(fresh, leaves.leaves_of(caches), before, offsets, strict=True)
    ]


def _form(fresh: Any, leaf: Any, before: int, *, is_whole: bool) -> LeafForm:
    """Return the form of a leaf. fresh: an empty leaf. leaf: the same leaf after both forwards. before: bytes of its arrays after the first
    forward. is_whole: whether its length was the row's length then."""
    arrays = leaves.arrays_of(leaf)
    nbytes, num = sum(x.nbytes for x in arrays), _num_places(leaf)
    per_token = leaves.keeps_tokens(fresh) and is_whole and leaf.offset == _FIRST + _MORE and num is not None
    grown = max(0, -(-(nbytes - before) // _MORE))
    most = getattr(fresh, "max_size", None) or getattr(fresh, "chunk_size", None)
    return LeafForm(
        title=type(fresh).__name__,
        is_cuttable=leaves.is_cuttable(fresh),
        is_per_token=per_token,
        each=grown if num is None else -(-nbytes // num),
        base=nbytes if num is None else 0,
        most=most if isinstance(most, int) and num is not None else None,
        step=getattr(fresh, "step", 0) if num is not None else 0,
        shapes=tuple(tuple(x.shape) for x in arrays),
    )


def _num_places(leaf: Any) -> int | None:
    """Return for how many tokens the leaf's buffers of keys and values have room; None where it has none."""
    keys: Sequence[mx.array] | mx.array | None = getattr(leaf, "keys", None)
    first = keys if keys is None or isinstance(keys, mx.array) else keys[0]
    return first.shape[2] if first is not None and first.ndim == 4 else None
