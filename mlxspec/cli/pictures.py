"""Shows an image in a terminal: as itself where the terminal has a protocol for it, else in half blocks of colour, else not at all.

Knows files and escape sequences; knows no engine.
"""

from __future__ import annotations

import base64
import io
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlxspec.cli import terminal

if TYPE_CHECKING:
    from PIL.Image import Image

_WIDEST = 96  # columns
_KITTY_PART = 4096  # characters of base64 in one sequence
_UPPER_HALF = "\u2580"


def show(path: Path) -> None:
    """The image to stdout, where stdout is a terminal with colours."""
    draw = _way()
    if draw is None:
        return
    from PIL import Image

    with Image.open(path) as opened:
        terminal.say(draw(opened.convert("RGB")), raw=True)


def _way() -> Callable[[Image], str] | None:
    """How this terminal shows images."""
    if not terminal.use_colour(sys.stdout):
        return None
    program, kind = os.environ.get("TERM_PROGRAM", ""), os.environ.get("TERM", "")
    if os.environ.get("TMUX") or kind.startswith(("screen", "tmux")):
        return in_half_blocks  # which hands no image on
    if os.environ.get("KITTY_WINDOW_ID") or kind in ("xterm-kitty", "xterm-ghostty") or program == "ghostty":
        return for_kitty
    if program in ("iTerm.app", "WezTerm"):
        return for_iterm
    return in_half_blocks


def for_kitty(image: Image) -> str:
    """Of the protocol of kitty and Ghostty."""
    data = base64.b64encode(_png(image)).decode("ascii")
    parts = [data[i : i + _KITTY_PART] for i in range(0, len(data), _KITTY_PART)]
    written = []
    for i, part in enumerate(parts):
        head = "a=T,f=100," if i == 0 else ""
        written.append(f"\x1b_G{head}m={int(i + 1 < len(parts))};{part}\x1b\\")
    return "".join(written) + "\n"


def for_iterm(image: Image) -> str:
    """Of the protocol of iTerm2 and WezTerm."""
    data = _png(image)
    return f"\x1b]1337;File=inline=1;size={len(data)}:{base64.b64encode(data).decode('ascii')}\x07\n"


def in_half_blocks(image: Image) -> str:
    """Two pixels a character, above each other, in 24-bit colours where the terminal says that it has them, else in 256."""
    columns = min(_WIDEST, max(8, shutil.get_terminal_size().columns - 1), image.width)
    import numpy as np

    height = max(2, round(image.height * columns / image.width / 2) * 2)
    small = np.asarray(image.resize((columns, height))).tolist()
    has_all = os.environ.get("COLORTERM", "") in ("truecolor", "24bit")
    colour = _in_24_bits if has_all else _in_256
    lines = []
    for y in range(0, height, 2):
        cells = []
        for x in range(columns):
            upper, lower = small[y][x], small[y + 1][x]
            cells.append(f"\x1b[38;{colour(upper)};48;{colour(lower)}m{_UPPER_HALF}")
        lines.append("".join(cells) + "\x1b[0m\n")
    return "".join(lines)


def _in_24_bits(pixel: Sequence[int]) -> str:
    return "2;{};{};{}".format(*pixel)


def _in_256(pixel: Sequence[int]) -> str:
    """The nearest colour of the cube of 6 x 6 x 6."""
    red, green, blue = (round(v * 5 / 255) for v in pixel)
    return f"5;{16 + 36 * red + 6 * green + blue}"


def _png(image: Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
