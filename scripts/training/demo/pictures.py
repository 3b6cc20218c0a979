"""Pictures of numbers, dates and short lines of code, with what they say: the data of the demo that reads images.

Drawn with Pillow: its default font, and others that matplotlib brings. Everything follows from the random generator that is passed in.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

DEFAULT = "default"  # Pillow's own
FONTS = (
    DEFAULT, "DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSerif", "DejaVuSans-Oblique", "STIXGeneral", "cmss10",
)  # fmt: skip
QUESTIONS = {"number": "Read the number.", "date": "Read the date.", "code": "Read the code."}
SIZES = (14, 26)  # of letters, in pixels
_MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
_NAMES = "x y i n key item name total count index value data line node path".split()
_CONTRAST = 90  # of brightness, from 0 to 255


@dataclass(frozen=True)
class Picture:
    """image: mode RGB. text: what it says. kind: a key of QUESTIONS. font: one of FONTS. edges: where each character begins, from the left,
    and where the last one ends; top, bottom: of the letters. All in pixels."""

    image: Image.Image
    text: str
    kind: str
    font: str
    edges: tuple[float, ...]
    top: int
    bottom: int

    @property
    def question(self) -> str:
        return QUESTIONS[self.kind]


def picture(
    rng: random.Random,
    kind: str | None = None,
    font: str | None = None,
    canvas: tuple[int, int] | None = None,
) -> Picture:
    """One picture. kind, font: of any where they are None; half of all are numbers. canvas: (width, height) of the picture, which must have
    room for two digits; None for what the text needs and some margins."""
    while True:
        chosen, letters = kind or rng.choice(("number", "number", "date", "code")), font or rng.choice(FONTS)
        text = {"number": _number, "date": _date, "code": _code}[chosen](rng)
        drawn = _draw(rng, text, letters, canvas)
        if drawn is not None:
            image, edges, top, bottom = drawn
            return Picture(image, text, chosen, letters, edges, top, bottom)


def _number(rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") for _ in range(rng.randint(2, 10)))


def _date(rng: random.Random) -> str:
    year, month, day = rng.randint(1900, 2099), rng.randint(1, 12), rng.randint(1, 28)
    forms = (
        f"{year}-{month:02}-{day:02}",
        f"{day:02}.{month:02}.{year}",
        f"{month}/{day}/{year}",
        f"{day} {_MONTHS[month - 1]} {year}",
    )
    return rng.choice(forms)


def _code(rng: random.Random) -> str:
    a, b, n = rng.choice(_NAMES), rng.choice(_NAMES), rng.randint(0, 99)
    forms = (
        f"{a} = {b} + {n}",
        f"{a} = {n}",
        f"{a}[{n}] = {b}",
        f"return {a}",
        f"if {a} > {n}:",
        f"for {a} in {b}:",
        f"print({a})",
        f"def {a}({b}):",
    )
    return rng.choice(forms)


@cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    if name == DEFAULT:
        return ImageFont.load_default(size)
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf" / f"{name}.ttf", size)


def _draw(
    rng: random.Random, text: str, font: str, canvas: tuple[int, int] | None
) -> tuple[Image.Image, tuple[float, ...], int, int] | None:
    """(image, edges, top, bottom), None where the text does not fit."""
    letters = _font(font, rng.randint(*SIZES))
    left, top, right, bottom = ImageDraw.Draw(Image.new("RGB", (1, 1))).textbbox((0, 0), text, letters)
    width, height = int(right - left), int(bottom - top)
    if canvas is None:
        canvas = (width + rng.randint(6, 32), height + rng.randint(6, 32))
    if width + 6 > canvas[0] or height + 6 > canvas[1]:
        return None
    x, y = rng.randint(3, canvas[0] - width - 3), rng.randint(3, canvas[1] - height - 3)
    ink, paper = _colours(rng)
    image = Image.new("RGB", canvas, paper)
    ImageDraw.Draw(image).text((x - left, y - top), text, ink, letters)
    if rng.random() < 0.3:  # softer letters
        scale = rng.uniform(0.75, 1.5)
        other = image.resize([max(8, round(n * scale)) for n in canvas], Image.Resampling.BICUBIC)
        image = other.resize(canvas, Image.Resampling.BICUBIC)
    edges = tuple(x - left + letters.getlength(text[:i]) for i in range(len(text) + 1))
    return _with_noise(rng, image), edges, y, y + height


def _colours(rng: random.Random) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Of letters and of the ground: black on white, or any two of enough contrast."""
    if rng.random() < 0.4:
        return (0, 0, 0), (255, 255, 255)
    while True:
        ink, paper = (tuple(rng.randint(0, 255) for _ in range(3)) for _ in range(2))
        if abs(_brightness(ink) - _brightness(paper)) >= _CONTRAST:
            return ink, paper  # type: ignore[return-value]


def _brightness(colour: tuple[int, ...]) -> float:
    red, green, blue = colour
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _with_noise(rng: random.Random, image: Image.Image) -> Image.Image:
    if rng.random() < 0.5:
        return image
    shape = image.height, image.width, 3
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, rng.uniform(2, 14), shape)
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))
