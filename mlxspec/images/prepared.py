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
        """Bytes of the arrays."""
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


def resized(image: Image.Image, height: int, width: int, resample: Image.Resampling) -> np.ndarray:
    """(height, width, 3) uint8 of an image in mode RGB."""
    return np.asarray(image.resize((width, height), resample))


def levels(scale: float, mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    """(3, 256) float32: what each of the 256 values of a channel becomes, (value * scale - mean) / std.

    The product is rounded to float32 once, and the rest is computed in float32: Transformers' processors do the same, to the last bit.
    """
    values = (np.arange(256, dtype=np.float64) * scale).astype(np.float32)
    return (values - np.array(mean, np.float32)[:, None]) / np.array(std, np.float32)[:, None]


def patched(
    pixels: np.ndarray, table: np.ndarray, patch: int, merge: int = 1, *, channels_last: bool = False
) -> np.ndarray:
    """(H, W, 3) uint8 to (patches, 3 * patch * patch) float32, with values from `table` (3, 256) of `levels`.

    Patches of a block of merge x merge follow each other, blocks and patches row by row. A patch's numbers lie in the order (channel,
    row, column), with channels_last in the order (row, column, channel).
    """
    height, width, _ = pixels.shape
    step = merge * patch
    grid = pixels.reshape(height // step, merge, patch, width // step, merge, patch, 3)
    # (block row, block column, patch row, patch column, row, column, channel)
    blocks = grid.transpose(0, 3, 1, 4, 2, 5, 6)
    blocks = np.stack([table[c][blocks[..., c]] for c in range(3)], axis=-1 if channels_last else -3)
    return blocks.reshape(-1, 3 * patch * patch)
