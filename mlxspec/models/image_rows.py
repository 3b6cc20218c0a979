"""Image tokens of a row: what identifies them, where they stand, and what a forward takes at them.

A prompt with images is a list of integers like any other. An image token is written as its key, a negative number made of the image's
digest and of the token's index in the image. So whatever compares texts by their tokens (the prefix stores in memory and on disk) tells
two images apart, finds the same image again, and needs to know nothing of images. A key never reaches a model: `RowImages.ids` puts the
family's id in its place, and `ImageInput` gives the forward the rows of the vision tower.

Invariants:
- Keys are negative, ids are not. Equal keys mean equal digests and equal indices, but for a chance of 2**-63 a token.
- Tokens behind the prompt are text: drafted and sampled tokens are never keys.
- A text token at index i of its row has the rotary position i + shift on every axis, where the shift depends on the images before it
  only. Shifts are 0 in families whose image tokens take one position each.
- A row without images has no RowImages, and its forwards get no ImageInput.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from mlxspec.images.prepared import PreparedImage
from mlxspec.images.prompt import ImagePrompt
from mlxspec.models.vision.base import Bidirectional

_KEY_BYTES = 8


class RowSource(Protocol):
    """A function that returns the vision tower's rows (tokens, H) of an image."""

    def __call__(self, prepared: PreparedImage) -> mx.array: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageInput:
    """The inputs of a forward, in addition to its tokens, where some of them are image tokens. rows: pairs of a place on the flat token
    axis and the tower's rows (n, H) that replace the embeddings from there on. positions: (N, 3) int32, the rotary position (time, height,
    width) of every token; None where it is the token's index in its row. blocks: for each row of the forward the ranges of its new tokens
    that belong to one image each. bidirectional: in which layers the tokens of a block see each other."""

    rows: tuple[tuple[int, mx.array], ...] = ()
    positions: np.ndarray | None = None
    blocks: tuple[tuple[range, ...], ...] = ()
    bidirectional: Bidirectional = "none"

    def blocks_in(self, *, is_windowed: bool) -> tuple[tuple[range, ...], ...]:
        """Return for each row the blocks whose tokens see each other in layers with a window, or in layers without one; empty where there
        are none."""
        if self.bidirectional == "all" or (self.bidirectional == "windowed" and is_windowed):
            return self.blocks
        return ()

    def placed(self, embedded: mx.array) -> mx.array:
        """Return the embeddings (N, H) of the forward's tokens, in which the tower's rows replace those of image tokens. `embedded` is
        written in place, so nothing else may use it."""
        for place, rows in self.rows:
            embedded[place : place + len(rows)] = rows.astype(embedded.dtype)
        return embedded


class ImageSpan(NamedTuple):
    """One image of a prompt: the indices of its tokens, and the prepared image that the vision tower reads."""

    places: range
    prepared: PreparedImage


class RowImages:
    """The images of one prompt. The object never changes.

    spans: the images in order, which do not overlap. bidirectional: as in `Vision`. Where it is not "none", a chunk of the prompt must not
    end within an image.
    """

    def __init__(
        self,
        spans: Sequence[ImageSpan],
        num_prompt: int,
        prompt: ImagePrompt,
        bidirectional: Bidirectional = "none",
    ) -> None:
        """Record the images of a prompt. num_prompt: tokens of the whole prompt. prompt: the token ids that the model's family uses for
        images."""
        self.spans = tuple(spans)
        self.num_prompt, self.bidirectional = num_prompt, bidirectional
        self._prompt = prompt
        self._starts = [s.places.start for s in self.spans]

    @property
    def num_tokens(self) -> int:
        """Return the number of image tokens of the prompt."""
        return sum(len(s.places) for s in self.spans)

    @cached_property
    def nbytes(self) -> int:
        """Return the bytes of the prepared images, each different image counted once."""
        return sum(p.nbytes for p in {s.prepared.digest: s.prepared for s in self.spans}.values())

    def keyed(self, tokens: Sequence[int]) -> list[int]:
        """Return the prompt's tokens with keys in the place of image tokens. A key is a negative number made of the image's digest and the
        token's index in the image."""
        found = list(tokens)
        for places, prepared in self.spans:
            found[places.start : places.stop] = image_keys(prepared.digest, len(places))
        return found

    def ids(self, tokens: Sequence[int]) -> list[int]:
        """Return the row's tokens with each key replaced by the id that the embedding looks up."""
        return [t if t >= 0 else self._prompt.lookup for t in tokens]

    def shown(self, tokens: Sequence[int]) -> list[int]:
        """Return the row's tokens with each key replaced by the vocabulary's image token."""
        return [t if t >= 0 else self._prompt.image for t in tokens]

    def within(self, start: int, end: int) -> tuple[ImageSpan, ...]:
        """Return the images that have a token from number `start` up to `end`."""
        if start >= end:
            return ()
        first = max(0, bisect_right(self._starts, start) - 1)
        return tuple(s for s in self.spans[first:] if s.places.start < end and s.places.stop > start)

    def edge(self, start: int, end: int) -> int:
        """Return where a chunk of the prompt that begins at `start` ends: at `end`, or before an image that must not be divided. Where the
        chunk begins with such an image, it ends after the image, which may be beyond `end`. `start` must not be within such an image."""
        if self.bidirectional == "none":
            return end
        for places, _ in self.within(start, end):
            if places.stop > end:
                return places.start if places.start > start else places.stop
        return end

    def edges(self, places: Sequence[int]) -> tuple[int, ...]:
        """Return those of these indices at which a chunk of the prompt may end."""
        if self.bidirectional == "none":
            return tuple(places)
        return tuple(
            p for p in places if all(p >= s.stop or p <= s.start for s, _ in self.within(p - 1, p + 1))
        )

    @cached_property
    def _shifts(self) -> list[int]:
        """Return, for each image, the difference between rotary position and index of the text tokens after it."""
        found, shift = [], 0
        for places, prepared in self.spans:
            shift += prepared.num_positions - len(places)
            found.append(shift)
        return found

    def shift(self, length: int) -> int:
        """Return the difference between rotary position and index of a text token that follows the first `length` tokens."""
        num = bisect_right([s.places.stop for s in self.spans], length)
        return self._shifts[num - 1] if num else 0

    @property
    def has_axes(self) -> bool:
        """Return whether an image gives its tokens positions on three axes."""
        return any(s.prepared.positions is not None for s in self.spans)

    def positions(self, start: int, end: int) -> np.ndarray:
        """Return the rotary positions (end - start, 3) int32 of the tokens from number `start` up to `end`, which may be after the
        prompt."""
        index = np.arange(start, end, dtype=np.int32)[:, None]
        found = np.repeat(index, 3, axis=1)
        before = 0
        for (places, prepared), shift in zip(self.spans, self._shifts, strict=True):
            low, high, behind = max(start, places.start), min(end, places.stop), max(0, places.stop - start)
            if low < high:
                own = _axes(prepared)[low - places.start : high - places.start]
                found[low - start : high - start] = own + (places.start + before)
            found[behind:] = index[behind:] + shift
            before = shift
        return found


def _axes(prepared: PreparedImage) -> np.ndarray:
    """Return the positions (tokens, 3) int32 of an image's tokens, counted from the image's first position."""
    if prepared.positions is not None:
        return prepared.positions
    return np.repeat(np.arange(prepared.tokens, dtype=np.int32)[:, None], 3, axis=1)


class SeenImages(NamedTuple):
    """The images of a row with their source. tower: returns the vision tower's rows (tokens, H) of an image. has: whether the rows of an
    image are in memory. owner: the owner of the request."""

    images: RowImages
    tower: RowSource
    has: Callable[[PreparedImage], bool] = lambda prepared: True
    owner: str = ""


class RowPiece(NamedTuple):
    """The new tokens of one row in a forward. seen: the row's images, None for a row without. start: index of the first new token; width:
    number of new tokens."""

    seen: SeenImages | None
    start: int
    width: int


def image_input(pieces: Sequence[RowPiece], *, skips: int = 0, axes: bool = True) -> ImageInput | None:
    """Return the image inputs of one forward over pieces, one piece for each row; None where no image reaches into a piece. skips: for a
    drafter whose cell i in the cache takes token i + skips. `RowPiece.start` is then the index of a cell, image rows are those of the
    tokens that the cells take, and rotary positions are those of the tokens with the cells' own indices. axes: whether
    `ImageInput.positions` is set where the images need it."""
    rows: list[tuple[int, mx.array]] = []
    blocks: list[tuple[range, ...]] = []
    at, touches = 0, False
    for seen, start, width in pieces:
        own: list[range] = []
        if seen is not None:
            images, tower = seen.images, seen.tower
            first, last = start + skips, start + skips + width
            touches = touches or bool(images.within(start, last if width else start))
            for places, prepared in images.within(first, last):
                low, high = max(first, places.start), min(last, places.stop)
                found = tower(prepared)[low - places.start : high - places.start]
                rows.append((at + low - first, found))
                own.append(range(low - first, high - first))
        blocks.append(tuple(own))
        at += width
    if not touches:
        return None
    positions = None
    if axes and any(p.seen is not None and p.seen.images.has_axes for p in pieces):
        positions = np.concatenate([_positions(piece) for piece in pieces])
    kinds = [p.seen.images.bidirectional for p in pieces if p.seen is not None]
    return ImageInput(rows=tuple(rows), positions=positions, blocks=tuple(blocks), bidirectional=kinds[0])


def _positions(piece: RowPiece) -> np.ndarray:
    start, end = piece.start, piece.start + piece.width
    if piece.seen is not None:
        return piece.seen.images.positions(start, end)
    return np.repeat(np.arange(start, end, dtype=np.int32)[:, None], 3, axis=1)


def image_keys(digest: bytes, num: int) -> list[int]:
    """Return the keys of the first `num` tokens of an image: negative integers of at least -2**63. The key of an index does not depend on
    `num`."""
    numbers = np.frombuffer(hashlib.shake_256(digest).digest(num * _KEY_BYTES), "<u8")
    found: list[int] = (-1 - (numbers >> np.uint64(1)).astype(np.int64)).tolist()
    return found
