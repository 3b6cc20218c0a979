"""Preprocessing of Gemma 3 (one size for all images) and of Gemma 4 (a budget of tokens, with the image's proportions)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from PIL import Image

from mlxspec.errors import ConfigError, ImageError
from mlxspec.images.prepared import PreparedImage, digest_of, levels, patched, resized

TOKEN_BUDGETS = (70, 140, 280, 560, 1120)  # that Gemma 4 was trained with


@dataclass(frozen=True, kw_only=True)
class Gemma3Images:
    """The preprocessor of Gemma 3, which resizes every image to one size. `PreparedImage.pixels` is (patches, 3 * patch_size^2), patches
    row by row, numbers in the order (channel, row, column).

    image_size, patch_size: pixels of a side. tokens: tokens of every image. scale, mean, std: as in QwenImages.
    """

    image_size: int = 896
    patch_size: int = 14
    tokens: int = 256
    scale: float = 1 / 255
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @property
    def max_tokens(self) -> int:
        return self.tokens

    def tokens_of(self, height: int, width: int, *, max_pixels: int | None = None) -> int:
        if max_pixels is not None and max_pixels < self.image_size**2:
            raise ImageError(
                f"max_pixels is {max_pixels}, and this model resizes every image to {self.image_size} x {self.image_size}, which is "
                f"{self.image_size**2} pixels."
            )
        return self.tokens

    def prepare(self, image: Image.Image, *, max_pixels: int | None = None) -> PreparedImage:
        tokens = self.tokens_of(image.height, image.width, max_pixels=max_pixels)
        pixels = resized(image, self.image_size, self.image_size, Image.Resampling.BILINEAR)
        side = self.image_size // self.patch_size
        return PreparedImage(
            pixels=patched(pixels, levels(self.scale, self.mean, self.std), self.patch_size),
            grid=(1, side, side),
            tokens=tokens,
            positions=None,
            digest=digest_of(pixels, self.patch_size, self.tokens, self.scale, self.mean, self.std),
        )


@dataclass(frozen=True, kw_only=True)
class Gemma4Images:
    """The preprocessor of Gemma 4: resizes an image to fit a budget of tokens, with about its proportions, and divides it into patches.

    `PreparedImage.pixels` is (patches, 3 * side^2) with values from 0 to 1, patches row by row, numbers in the order (row, column,
    channel). patch_size: pixels of a patch's side. pool: patches along a block's side; one block becomes one token. max_tokens: the most
    tokens of an image, one of TOKEN_BUDGETS. joins_blocks: a patch is a whole block, so its side is patch_size * pool pixels, as models
    without a vision tower take it.
    """

    patch_size: int = 16
    pool: int = 3
    max_tokens: int = 280
    scale: float = 1 / 255
    joins_blocks: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens not in TOKEN_BUDGETS:
            raise ConfigError(
                f"max_soft_tokens is {self.max_tokens}; Gemma 4 has {', '.join(map(str, TOKEN_BUDGETS))} only."
            )

    def size(self, height: int, width: int, max_pixels: int | None = None) -> tuple[int, int]:
        """Return (height, width) after resizing: the largest multiples of a block's side with about the image's proportions. Raises
        ImageError."""
        step = self.patch_size * self.pool
        most = self._budget(max_pixels)
        grow = math.sqrt(most * step**2 / (height * width))
        rows, columns = math.floor(grow * height / step), math.floor(grow * width / step)
        if rows == 0:
            rows, columns = 1, min(width // height, most)
        elif columns == 0:
            rows, columns = min(height // width, most), 1
        return rows * step, columns * step

    def tokens_of(self, height: int, width: int, *, max_pixels: int | None = None) -> int:
        tall, wide = self.size(height, width, max_pixels)
        return tall * wide // (self.patch_size * self.pool) ** 2

    def prepare(self, image: Image.Image, *, max_pixels: int | None = None) -> PreparedImage:
        height, width = self.size(image.height, image.width, max_pixels)
        pixels = resized(image, height, width, Image.Resampling.BICUBIC)
        block = self.patch_size * self.pool
        side = block if self.joins_blocks else self.patch_size
        table = levels(self.scale, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        return PreparedImage(
            pixels=patched(pixels, table, side, channels_last=True),
            grid=(1, height // side, width // side),
            tokens=(height // block) * (width // block),
            positions=None,
            digest=digest_of(pixels, side, block, self.scale),
        )

    def _budget(self, max_pixels: int | None) -> int:
        """Return the most tokens of an image: the largest of TOKEN_BUDGETS within the model's own and within max_pixels. Raises ImageError
        where max_pixels allows none."""
        if max_pixels is None:
            return self.max_tokens
        area = (self.patch_size * self.pool) ** 2
        fitting = [n for n in TOKEN_BUDGETS if n <= self.max_tokens and n * area <= max_pixels]
        if not fitting:
            raise ImageError(
                f"max_pixels is {max_pixels}, and this model needs at least {TOKEN_BUDGETS[0] * area} pixels an image."
            )
        return fitting[-1]
