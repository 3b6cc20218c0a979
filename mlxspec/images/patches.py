"""Resizing and cutting into patches, as every family does them; the order of patches and of the numbers in a patch is the family's."""

from __future__ import annotations

import numpy as np
from PIL import Image


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
