"""What preprocessing makes of an image, and the interface of the families' preprocessors."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from PIL import Image


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedImage:
    """An image as a vision tower reads it.

    pixels: float32; what its axes are, the family's preprocessor says. grid: patches (time, height, width), before merging. tokens: image
    tokens that it takes in a prompt, and rows that the tower returns. positions: (tokens, 3) int32, (time, height, width) of each token
    from the image's first position on, for models whose rotary positions have three axes; None for models in which an image token takes one
    position like any other. digest: 32 bytes, equal only for the same pixels that were prepared with the same settings.
    """

    pixels: np.ndarray
    grid: tuple[int, int, int]
    tokens: int
    positions: np.ndarray | None
    digest: bytes

    @property
    def nbytes(self) -> int:
        """Of the arrays, in bytes."""
        return int(self.pixels.nbytes) + (0 if self.positions is None else int(self.positions.nbytes))

    @cached_property
    def num_positions(self) -> int:
        """Positions that the image takes: the text behind it goes on at its first position plus this number."""
        return self.tokens if self.positions is None else int(self.positions.max()) + 1


class Preprocessor(Protocol):
    """A family's preprocessing with one model's settings. Pure: any number of threads may use it at once."""

    @property
    def max_tokens(self) -> int:
        """Image tokens of the largest image, without a max_pixels."""
        ...

    def tokens_of(self, height: int, width: int, *, max_pixels: int | None = None) -> int:
        """Image tokens of an image of that size, in pixels. Raises as `prepare` does."""
        ...

    def prepare(self, image: Image.Image, *, max_pixels: int | None = None) -> PreparedImage:
        """Resize, normalize and cut into patches.

        image: in mode RGB. max_pixels: bound on height times width after resizing, where it is lower than the model's own. Raises
        ImageError for an image or a bound that cannot be honoured.
        """
        ...


def digest_of(resized: np.ndarray, *settings: Any) -> bytes:
    """resized: (H, W, 3) uint8. settings: what else decides about the tower's input, with a `repr` that tells them apart."""
    made = hashlib.sha256(repr((resized.shape, *settings)).encode())
    made.update(np.ascontiguousarray(resized))
    return made.digest()
