"""Pictures that the demo learns to read: they follow from a seed, fit their canvas, and show what they say."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from PIL import Image
from training.demo import pictures
from training.demo.pictures import FONTS, QUESTIONS, picture


def test_a_seed_makes_a_picture() -> None:
    one, same, other = (picture(random.Random(seed)) for seed in (3, 3, 4))
    assert one.text == same.text
    assert np.array_equal(one.image, same.image)
    assert one.text != other.text


@pytest.mark.parametrize("kind", QUESTIONS)
def test_what_pictures_say(kind: str) -> None:
    said = [picture(random.Random(seed), kind).text for seed in range(40)]
    forms = {
        "number": r"\d{2,10}",
        "date": r"\d{4}-\d\d-\d\d|\d\d\.\d\d\.\d{4}|\d\d?/\d\d?/\d{4}|\d\d? [A-Z][a-z]{2} \d{4}",
        "code": r"[\w =+\[\]>:()]+",
    }
    assert all(re.fullmatch(forms[kind], text) for text in said)
    assert len(set(said)) > 30


def test_fonts_and_canvases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight fonts draw eight pictures of one text. No ink touches the border: nothing is cut off."""
    assert len(FONTS) >= 6
    monkeypatch.setattr(pictures, "_with_noise", lambda rng, image: image)
    seen = set()
    for font in FONTS:
        for seed in range(6):
            drawn = picture(random.Random(seed), "number", font, canvas=(200, 48))
            assert drawn.image.size == (200, 48)
            pixels = np.asarray(drawn.image).astype(int)
            edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
            assert np.abs(edge - edge[0]).max() < 12
            assert np.abs(pixels - edge[0]).max() > 40
        seen.add(drawn.image.tobytes())
    assert len(seen) == len(FONTS)


def test_a_picture_that_does_not_fit_is_drawn_anew() -> None:
    drawn = picture(random.Random(0), canvas=(64, 32))
    assert isinstance(drawn.image, Image.Image)
    assert drawn.image.size == (64, 32)
