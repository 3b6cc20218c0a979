"""Bytes of an image file to pixels: PNG, JPEG, WebP, and the first frame of a GIF.

The bytes come from anyone, so a helper process decodes them (pixels.py), which bounds time and memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from mlxspec.errors import ConfigError, HelperError, ImageError
from mlxspec.platform import helper

FIRST_FRAME = "the image is animated, and only its first frame is read"
_ANIMATED = "mlxspec-animated"  # in the `info` of a Pillow image
_SECONDS, _MEMORY = 5.0, 1536 << 20  # 50 million pixels with transparency take 1 s and 1 GiB


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
    program = helper.Program(
        file=Path(__file__).with_name("pixels.py"),
        what="Decoding the image",
        seconds=_SECONDS,
        memory=_MEMORY,
        most=3 * limits.max_pixels,
    )
    try:
        said, pixels = helper.run(program, {"most": limits.max_pixels}, data)
    except HelperError as error:
        raise ImageError(str(error)) from error
    if "refused" in said:
        raise ImageError(str(said["refused"]))
    match said.get("size"):
        case [int(width), int(height)] if width > 0 < height and 3 * width * height == len(pixels):
            image = Image.frombuffer("RGB", (width, height), pixels, "raw", "RGB", 0, 1)
        case _:
            raise ImageError("The image is damaged or incomplete.")
    image.info[_ANIMATED] = said.get("is_animated") is True
    return image


def is_animated(image: Image.Image) -> bool:
    """Whether the file that `decode_image` has read holds more than one frame."""
    return image.info.get(_ANIMATED) is True
