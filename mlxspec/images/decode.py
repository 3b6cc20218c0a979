"""Bytes of an image file to pixels: PNG, JPEG, WebP, and the first frame of a GIF.

The bytes come from anyone. The format is told by the first bytes, and the size is checked before a pixel is decoded.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import GifImagePlugin, Image, ImageOps, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from mlxspec.errors import ConfigError, ImageError

FORMATS = "PNG, JPEG, WebP or GIF"
FIRST_FRAME = "the image is animated, and only its first frame is read"


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """max_bytes: of a file. max_pixels: width times height of the decoded image, before any resizing."""

    max_bytes: int = 32 << 20
    max_pixels: int = 50_000_000

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_pixels"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}.")


def decode_image(data: bytes, limits: ImageLimits) -> Image.Image:
    """The image in a file's bytes, in mode RGB with 8 bits a channel.

    Rotated as its EXIF data says; EXIF data that cannot be read counts as absent. Transparent pixels are blended with white. Of 16 bits a
    channel the upper 8 are kept. Colour profiles are not applied. Raises ImageError.
    """
    if len(data) > limits.max_bytes:
        raise ImageError(f"The image has {len(data)} bytes, and at most {limits.max_bytes} are accepted.")
    found = _open(data)
    width, height = found.size
    if width * height > limits.max_pixels:
        raise ImageError(
            f"The image has {width} x {height} pixels, and at most {limits.max_pixels} pixels are accepted."
        )
    try:
        found.load()
        return to_rgb(_upright(found))
    except MemoryError as error:
        raise ImageError(f"The image of {width} x {height} pixels does not fit into memory.") from error
    except Exception as error:  # what a decoder raises for damaged data depends on where the damage is
        raise ImageError("The image is damaged or incomplete.") from error


def is_animated(data: bytes) -> bool:
    """Whether a file that can be decoded holds more than one frame."""
    try:
        return bool(getattr(_open(data), "is_animated", False))
    except Exception:  # what is behind the first frame may be damaged in any way, and nobody reads it
        return False


def to_rgb(image: Image.Image) -> Image.Image:
    """An image of any mode of Pillow's in mode RGB. Transparent pixels are blended with white."""
    if image.mode.startswith(("I", "F")):
        return _from_deep(image)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _open(data: bytes) -> Image.Image:
    """The opened file, whose pixels are not decoded yet.

    Pillow's `Image.open` is not used: above a global limit it warns or raises, and all formats that it knows would be tried.
    """
    file = io.BytesIO(data)
    try:
        if data.startswith(b"\x89PNG\r\n\x1a\n"):
            return PngImagePlugin.PngImageFile(file)
        if data.startswith(b"\xff\xd8\xff"):
            return JpegImagePlugin.JpegImageFile(file)
        if data.startswith((b"GIF87a", b"GIF89a")):
            return GifImagePlugin.GifImageFile(file)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return WebPImagePlugin.WebPImageFile(file)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError("The image has more pixels than are accepted.") from error
    except Exception as error:  # see above
        raise ImageError("The image is damaged or incomplete.") from error
    if not data:
        raise ImageError("The image is empty.")
    if b"<svg" in data[:1024].lower():
        raise ImageError(f"SVG images are not supported; send the image as {FORMATS}.")
    raise ImageError(f"The data is no image in a supported format; send the image as {FORMATS}.")


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except MemoryError:
        raise
    except Exception:  # damaged EXIF data says nothing about the pixels
        return image


def _from_deep(image: Image.Image) -> Image.Image:
    """Of 16 bits a pixel, in any of Pillow's modes for it; `convert` would cut values off at 255."""
    values = np.asarray(image)
    white = image.info.get("transparency")
    shades = np.clip(values // 256, 0, 255).astype(np.uint8)
    if isinstance(white, int):
        shades = np.where(values == white, np.uint8(255), shades)
    return Image.fromarray(shades).convert("RGB")
