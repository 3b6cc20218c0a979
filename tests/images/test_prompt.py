"""Placeholders to image tokens."""

from __future__ import annotations

import pytest

from mlxspec.errors import ImageError
from mlxspec.images.prompt import ImagePrompt

pytestmark = pytest.mark.smoke

QWEN = ImagePrompt(placeholder=90, image=90, lookup=90)
GEMMA = ImagePrompt(placeholder=80, image=90, before=(80,), behind=(81,), lookup=0, frame=("\n\n", "\n\n"))


def test_each_placeholder_becomes_its_image_tokens() -> None:
    expanded = QWEN.expand([1, 90, 2, 90, 90], [3, 1, 2])
    assert expanded.tokens == [1, 90, 90, 90, 2, 90, 90, 90]
    assert expanded.spans == (range(1, 4), range(5, 6), range(6, 8))


def test_tokens_around_an_image_are_not_in_its_span() -> None:
    expanded = GEMMA.expand([1, 80, 2], [2])
    assert expanded.tokens == [1, 80, 90, 90, 81, 2]
    assert expanded.spans == (range(2, 4),)


def test_text_without_images_stays() -> None:
    assert QWEN.expand([1, 2], []).tokens == [1, 2]


@pytest.mark.parametrize("sizes", [[], [1], [1, 1, 1]])
def test_every_image_needs_one_place(sizes: list[int]) -> None:
    with pytest.raises(ImageError, match=f"2 places for images, but {len(sizes)} images"):
        QWEN.expand([90, 1, 90], sizes)


def test_frames_are_written_around_placeholders() -> None:
    assert GEMMA.framed("a<img>b<img>", "<img>") == "a\n\n<img>\n\nb\n\n<img>\n\n"
    assert QWEN.framed("a<img>b", "<img>") == "a<img>b"
