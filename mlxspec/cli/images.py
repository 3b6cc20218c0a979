"""Reads image files that a user names on the command line or in a chat. The bytes are kept, so a conversation does not need the file again.

An image is decoded here only to check that it can be. Knows files; knows no preprocessing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mlxspec.errors import ConfigError, ImageError

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine

# A path as terminals paste it: in quotes, or with a backslash before each space.
_PASTED = re.compile(
    r"""(?P<quote>['"])(?P<quoted>[^'"\n]+?\.(?:png|jpe?g|webp|gif))(?P=quote)"""
    r"""|(?<!\S)(?P<bare>(?:\\.|[^\s\\'"])+?\.(?:png|jpe?g|webp|gif))(?!\S)""",
    re.IGNORECASE,
)


class Picture(NamedTuple):
    """An image file that the user named. path: its path; data: the bytes of the file."""

    path: str
    data: bytes


def read_picture(name: str, engine: Engine) -> Picture:
    """Read an image file and return it, after checking that it can be decoded. name: its path. Raises ConfigError where the engine's
    model reads no images, ImageError where the file cannot be read as an image."""
    from mlxspec.cli.terminal import note
    from mlxspec.engine.image_prompt import LIMITS
    from mlxspec.images.source import FIRST_FRAME, decode_image, is_animated, read_file

    if engine.vision is None:
        raise ConfigError(engine.no_images)
    path = Path(name).expanduser()
    data = read_file(path, LIMITS)
    try:
        image = decode_image(data, LIMITS)
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from error
    if is_animated(image):
        note(f"{name}: {FIRST_FRAME}.")
    return Picture(str(path), data)


def pasted(line: str) -> tuple[str, list[str]]:
    """Return a line without the paths of image files in it, and those paths. Paths of files that do not exist stay in the line."""
    found: list[str] = []

    def take(match: re.Match[str]) -> str:
        name = match["quoted"] or re.sub(r"\\(.)", r"\1", match["bare"])
        try:
            is_there = Path(name).expanduser().is_file()
        except (OSError, RuntimeError, ValueError):
            is_there = False
        if not is_there:
            return match.group()
        found.append(name)
        return ""

    text = _PASTED.sub(take, line)
    return (" ".join(text.split()) if found else line), found


def content(text: str, pictures: Sequence[Picture]) -> str | list[dict[str, Any]]:
    """Return the content of a message for a chat template: the images, then the text; the text alone where there are no images."""
    if not pictures:
        return text
    return [*({"type": "image", "image": p.data} for p in pictures), {"type": "text", "text": text}]
