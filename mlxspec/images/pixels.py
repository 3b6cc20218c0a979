"""Decodes the bytes of an image file. A helper process loads this file by itself (platform/helper.py), because the bytes come from anyone.

The format is told by the first bytes, and size and number of scans are checked before a pixel is decoded.
"""

from __future__ import annotations

import io
from typing import Any

from PIL import GifImagePlugin, Image, ImageOps, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

FORMATS = "PNG, JPEG, WebP or GIF"
MOST_SCANS = 100  # of a JPEG: encoders write about 10, and each one is a walk over all pixels


class _Refused(Exception):
    """An error whose text is a sentence for the sender of the image."""


def run(ask: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """Decode an image file. Return `size` (width, height) and `is_animated`, with the pixels in mode RGB; or {"refused": a sentence}. ask:
    `most`, the most pixels of an image."""
    try:
        image, is_animated = _decoded(data, ask["most"])
    except _Refused as error:
        return {"refused": str(error)}, b""
    return {"size": image.size, "is_animated": is_animated}, image.tobytes()


def _decoded(data: bytes, most: int) -> tuple[Image.Image, bool]:
    found = _open(data)
    width, height = found.size
    if width * height > most:
        raise _Refused(f"The image has {width} x {height} pixels, and at most {most} pixels are accepted.")
    if found.format == "JPEG" and data.count(b"\xff\xda") > MOST_SCANS:
        raise _Refused(f"The image has more than {MOST_SCANS} scans.")
    try:
        found.load()
        image = to_rgb(_upright(found))
    except MemoryError:
        raise
    except Exception as error:  # what a decoder raises for damaged data depends on where the damage is
        raise _Refused("The image is damaged or incomplete.") from error
    try:
        return image, bool(getattr(found, "is_animated", False))
    except MemoryError:
        raise
    except Exception:  # what is behind the first frame may be damaged in any way, and nobody reads it
        return image, False


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image of any of Pillow's modes in mode RGB. Transparent pixels are blended with white."""
    if image.mode.startswith(("I", "F")):
        return _from_deep(image)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _open(data: bytes) -> Image.Image:
    """Return the opened image, whose pixels are not decoded yet.

    Pillow's `Image.open` is not used: above a global limit it warns or raises, and it would try all formats that it knows.
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
        raise _Refused("The image has more pixels than are accepted.") from error
    except MemoryError:
        raise
    except Exception as error:  # see above
        raise _Refused("The image is damaged or incomplete.") from error
    if not data:
        raise _Refused("The image is empty.")
    if b"<svg" in data[:1024].lower():
        raise _Refused(f"SVG images are not supported; send the image as {FORMATS}.")
    raise _Refused(f"The data is no image in a supported format; send the image as {FORMATS}.")


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except MemoryError:
        raise
    except Exception:  # damaged EXIF data says nothing about the pixels
        return image


def _from_deep(image: Image.Image) -> Image.Image:
    """Return an image of 16 bits a channel, in any of Pillow's modes, in mode RGB with 8 bits. Pillow's `convert` would clip values at
    255."""
    import numpy as np  # few images need it

    values = np.asarray(image)
    white = image.info.get("transparency")
    shades = np.clip(values // 256, 0, 255).astype(np.uint8)
    if isinstance(white, int):
        shades = np.where(values == white, np.uint8(255), shades)
    return Image.fromarray(shades).convert("RGB")
