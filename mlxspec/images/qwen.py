"""Preprocessing of Qwen3.5, 3.6 and 3.8: any size, in steps of two patches, within bounds on the area."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from mlxspec.errors import ImageError
from mlxspec.images.prepared import PreparedImage, digest_of, levels, patched, resized

_NARROWEST = 200  # longer side by shorter side


@dataclass(frozen=True, kw_only=True)
class QwenImages:
    """The preprocessor of Qwen's vision models. `PreparedImage.pixels` is (patches, 3 * patch_size^2), the patches of a merge block after
    one another, numbers in the order (channel, row, column). The tower's time axis is left out, as it would repeat every number
    temporal_patch_size times.

    patch_size: pixels of a patch's side. merge_size: patches of a block's side; a block becomes one token. min_pixels, max_pixels: bounds
    of the resized image. scale, mean, std: a value from 0 to 255 becomes (value * scale - mean) / std.
    """

    patch_size: int = 16
    merge_size: int = 2
    min_pixels: int = 65_536
    max_pixels: int = 16_777_216
    scale: float = 1 / 255
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @property
    def side(self) -> int:
        """Return the side of a merge block in pixels."""
        return self.patch_size * self.merge_size

    @property
    def max_tokens(self) -> int:
        return self.max_pixels // self.side**2

    def size(self, height: int, width: int, max_pixels: int | None = None) -> tuple[int, int]:
        """Return (height, width) after resizing. Raises ImageError."""
        most = self.max_pixels if max_pixels is None else min(max_pixels, self.max_pixels)
        if most < self.side**2:
            raise ImageError(
                f"max_pixels is {most}, and this model needs at least {self.side**2} pixels an image."
            )
        if max(height, width) > _NARROWEST * min(height, width):
            raise ImageError(
                f"The image has {width} x {height} pixels; this model reads no image with a side more than {_NARROWEST} times the other."
            )
        least = min(self.min_pixels, most)
        step = self.side
        tall, wide = (round(n / step) * step for n in (height, width))  # a half goes to the even multiple
        if tall * wide > most:
            shrink = math.sqrt(height * width / most)
            tall, wide = (max(step, math.floor(n / shrink / step) * step) for n in (height, width))
        elif tall * wide < least:
            grow = math.sqrt(least / (height * width))
            tall, wide = (math.ceil(n * grow / step) * step for n in (height, width))
        return tall, wide

    def tokens_of(self, height: int, width: int, *, max_pixels: int | None = None) -> int:
        tall, wide = self.size(height, width, max_pixels)
        return tall * wide // self.side**2

    def prepare(self, image: Image.Image, *, max_pixels: int | None = None) -> PreparedImage:
        """Prepare an image as `Preprocessor.prepare` describes, and return it. The pixels of an image far from square may exceed
        max_pixels, as its shorter side needs at least one block."""
        height, width = self.size(image.height, image.width, max_pixels)
        pixels = resized(image, height, width, Image.Resampling.BICUBIC)
        rows, columns = height // self.side, width // self.side
        places = np.indices((1, rows, columns), np.int32).reshape(3, -1).T
        return PreparedImage(
            pixels=patched(pixels, levels(self.scale, self.mean, self.std), self.patch_size, self.merge_size),
            grid=(1, rows * self.merge_size, columns * self.merge_size),
            tokens=rows * columns,
            positions=np.ascontiguousarray(places),
            digest=digest_of(pixels, self.patch_size, self.merge_size, self.scale, self.mean, self.std),
        )
