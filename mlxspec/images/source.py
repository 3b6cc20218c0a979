"""Reads images: from a data URL, base64, a file or a decoded image to pixels. PNG, JPEG, WebP, and the first frame of a GIF. Nothing is
fetched over a network.

The bytes come from anyone, so a helper process decodes them (pixels.py), which bounds time and memory.
"""

from __future__ import annotations

import base64
import binascii
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from mlxspec.errors import ConfigError, HelperError, ImageError
from mlxspec.images.pixels import to_rgb
from mlxspec.platform import helper

FIRST_FRAME = "the image is animated, and only its first frame is read"
_ANIMATED = "mlxspec-animated"  # in the `info` of a Pillow image
_SECONDS, _MEMORY = 5.0, 1536 << 20  # 50 million pixels with transparency take 1 s and 1 GiB
_SPACES = bytes.maketrans(b"-_", b"+/")  # the alphabet for URLs, as the usual one
_SHOWN = 60  # characters


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """The limits of images that are accepted. max_bytes: bytes of a file. max_pixels: width times height of the decoded image, before any
    resizing."""

    max_bytes: int = 32 << 20
    max_pixels: int = 50_000_000

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_pixels"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}.")


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageSource:
    """An image that has not been decoded. given: bytes of a file, a path, or a Pillow image. max_pixels: bound on the pixels after
    resizing, None for the model's own. where: the image's place in the request, for messages."""

    given: bytes | Path | Image.Image
    max_pixels: int | None = None
    where: str = ""

    def decoded(self, limits: ImageLimits) -> Image.Image:
        """Return the image in mode RGB. Raises ImageError."""
        if isinstance(self.given, Image.Image):
            return _checked(self.given, limits)
        data = read_file(self.given, limits) if isinstance(self.given, Path) else self.given
        return decode_image(data, limits)

    def notices(self, decoded: Image.Image) -> list[str]:
        """Return notices on parts of the image that the model does not see: the later frames of an animated image. decoded: as `decoded`
        returned it."""
        if not is_animated(decoded):
            return []
        return [f"{self.where}: {FIRST_FRAME}" if self.where else FIRST_FRAME]


def from_url(url: str, limits: ImageLimits) -> bytes:
    """Return the bytes in a data URL. Raises ImageError, also for URLs of any other kind."""
    scheme = url[: url.find(":")].lower() if ":" in url[:16] else ""
    if scheme in ("http", "https"):
        raise ImageError("Images are not fetched over the network; send the image itself, as a data: URL.")
    if scheme == "file":
        raise ImageError("Files of the server's machine are not read; send the image itself, as a data: URL.")
    if scheme != "data":
        raise ImageError("An image is given as a data: URL, such as data:image/png;base64,...")
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ImageError("The image's data: URL holds no base64 data.")
    return from_base64(body, limits)


def from_base64(text: str, limits: ImageLimits) -> bytes:
    """Return the bytes of a base64 text. Line breaks and missing padding are accepted. Raises ImageError."""
    if len(text) > 2 * limits.max_bytes:
        raise ImageError(f"The image has more than the {limits.max_bytes} bytes that are accepted.")
    try:
        data = b"".join(text.encode("ascii").split()).translate(_SPACES).rstrip(b"=")
        return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
    except (UnicodeEncodeError, binascii.Error, ValueError) as error:
        raise ImageError("The image is not valid base64.") from error


def source_of(part: Mapping[str, Any], limits: ImageLimits) -> ImageSource:
    """Return the image of a message's part {"type": "image", "image": X} or {"type": "image_url", "image_url": {"url": X}}. X: a path,
    bytes of a file, a Pillow image or a data URL. The part may hold "max_pixels", too. Raises ImageError."""
    given: Any = part.get("image", part.get("image_url", part.get("path")))
    if isinstance(given, Mapping):
        given = given.get("url")
    most = part.get("max_pixels")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ImageError("max_pixels of an image must be a whole number of at least 1.")
    if isinstance(given, str):
        begin = given[:16].lower()
        is_url = begin.startswith("data:") or "://" in begin
        given = from_url(given, limits) if is_url else Path(given).expanduser()
    if isinstance(given, (bytearray, memoryview)):
        given = bytes(given)
    if not isinstance(given, (bytes, Path, Image.Image)):
        raise ImageError(
            f"An image is given as a path, as bytes, as a Pillow image or as a data: URL, not as {type(given).__name__}."
        )
    return ImageSource(given=given, max_pixels=most)


def read_file(path: Path, limits: ImageLimits) -> bytes:
    """Return the bytes of an image file. Raises ImageError."""
    shown = str(path) if len(str(path)) <= _SHOWN else "..." + str(path)[-_SHOWN:]
    if path.parts[:1] in (("http:",), ("https:",)):
        raise ImageError(
            f"{shown} is on the web, and images are read from this machine alone; save it to a file first."
        )
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ImageError(f"{shown} is no file, so it is no image.")
        if found.st_size > limits.max_bytes:
            raise ImageError(
                f"{shown} has {found.st_size} bytes, and images of at most {limits.max_bytes} are accepted."
            )
        return path.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ImageError(f"The image {shown} cannot be read: {why}.") from error


def _checked(image: Image.Image, limits: ImageLimits) -> Image.Image:
    width, height = image.size
    if width * height > limits.max_pixels:
        raise ImageError(
            f"The image has {width} x {height} pixels, and at most {limits.max_pixels} pixels are accepted."
        )
    try:
        return to_rgb(image)
    except Exception as error:  # a lazily opened file may be damaged in any way
        raise ImageError("The image is damaged or incomplete.") from error


def decode_image(data: bytes, limits: ImageLimits) -> Image.Image:
    """Return the image in a file's bytes, in mode RGB with 8 bits a channel.

    The image is rotated as its EXIF data require; unreadable EXIF data count as absent. Transparent pixels are blended with white. Of 16
    bits a channel the upper 8 are kept. Colour profiles are not applied. Raises ImageError.
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
    """Return whether the file of an image that `decode_image` returned has more than one frame."""
    return image.info.get(_ANIMATED) is True
