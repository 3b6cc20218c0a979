"""Prepared images, the interface of the families' preprocessors, and what all of these do: resizing and cutting into patches. The order
of patches and of the numbers in a patch is the family's."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from PIL import Image


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedImage:
    """An image in the form that a vision tower reads.

    pixels: float32, with axes as the family's preprocessor describes them. grid: patches (time, height, width), before merging. tokens:
    image tokens in a prompt, and rows that the tower returns. positions: (tokens, 3) int32, (time, height, width) of each token counted
    from the image's first position, for models whose rotary positions have three axes; None for models in which an image token takes one
    position like any other token. digest: 32 bytes, equal only for the same pixels prepared with the same settings.
    """

    pixels: np.ndarray
    grid: tuple[int, int, int]
    tokens: int
    positions: np.ndarray | None
    digest: bytes

    @property
    def nbytes(self) -> int:
        """Return the bytes of the arrays."""
        return int(self.pixels.nbytes) + (0 if self.positions is None else int(self.positions.nbytes))

    @cached_property
    def num_positions(self) -> int:
        """Return the number of positions that the image takes: the text after the image begins at the image's first position plus this
        number."""
        return self.tokens if self.positions is None else int(self.positions.max()) + 1


class Preprocessor(Protocol):
    """The interface of a family's image preprocessing with one model's settings. It has no state, so any number of threads may use it at
    once."""

    @property
    def max_tokens(self) -> int:
        """Return the number of image tokens of the largest image, without max_pixels."""
        ...

    def tokens_of(self, height: int, width: int, *, max_pixels: int | None = None) -> int:
        """Return the number of image tokens of an image of this size in pixels. max_pixels, errors: as in `prepare`."""
        ...

    def prepare(self, image: Image.Image, *, max_pixels: int | None = None) -> PreparedImage:
        """Resize and normalize an image, cut it into patches, and return it for the vision tower.

        image: in mode RGB. max_pixels: bound on height times width after resizing, where it is lower than the model's own. Raises
        ImageError for an image that cannot be prepared and a bound that cannot be met.
        """
        ...


def digest_of(resized: np.ndarray, *settings: Any) -> bytes:
    """Return a digest of 32 bytes of an image after resizing. resized: (H, W, 3) uint8. settings: all other values that change the tower's
    input, with a `repr` that tells them apart."""
    made = hashlib.sha256(repr((resized.shape, *settings)).encode())
    made.update(np.ascontiguousarray(resized))
    return made.digest()


def resized(image: Image.Image, height: int, width: int, resample: Image.Resampling) -> np.ndarray:
    """Resize an image in mode RGB, and return its pixels (height, width, 3) uint8. resample: Pillow's filter."""
    return np.asarray(image.resize((width, height), resample))


def levels(scale: float, mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    """Return the table (3, 256) float32 of normalized values: (value * scale - mean) / std for each of the 256 values of each channel.

    The product is rounded to float32 once, and the rest is computed in float32: transformers' processors do the same, to the last bit.
    """
    values = (np.arange(256, dtype=np.float64) * scale).astype(np.float32)
    return (values - np.array(mean, np.float32)[:, None]) / np.array(std, np.float32)[:, None]


def patched(
    pixels: np.ndarray, table: np.ndarray, patch: int, merge: int = 1, *, channels_last: bool = False
) -> np.ndarray:
    """Return the patches (patches, 3 * patch * patch) float32 of pixels (H, W, 3) uint8. table (3, 256): the normalized values from
    `levels`.

    Patches of a block of merge x merge follow each other; blocks, and patches in a block, are in row order. A patch's numbers are in the
    order (channel, row, column), with channels_last in the order (row, column, channel).
    """
    height, width, _ = pixels.shape
    step = merge * patch
    grid = pixels.reshape(height // step, merge, patch, width // step, merge, patch, 3)
    # (block row, block column, patch row, patch column, row, column, channel)
    blocks = grid.transpose(0, 3, 1, 4, 2, 5, 6)
    blocks = np.stack([table[c][blocks[..., c]] for c in range(3)], axis=-1 if channels_last else -3)
    return blocks.reshape(-1, 3 * patch * patch)
