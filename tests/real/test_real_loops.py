"""Greedy texts of Gemma 3 270M that go in circles are noticed within 300 tokens of the circle, and those that count are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxspec import SamplingParams, SpecConfig, load
from mlxspec.sampling.loops import EVERY, WINDOW, period_of

pytestmark = pytest.mark.slow

CIRCLES = (
    "The best way to learn a language is",
    "Once upon a time there was a king who",
    "Dear Sir or Madam,",
)
COUNTS = ("List of countries:\n1.", "| name | size |\n|---|---|\n")


def test_circles_are_noticed_and_counting_is_not(real_model: Path) -> None:
    params = SamplingParams(max_tokens=6 * EVERY, ignore_eos=True, loop_breaker="off")
    with load(str(real_model), draft="off") as engine:
        assert engine.tokenizer is not None
        prompts = [engine.tokenizer.encode(text) for text in (*CIRCLES, *COUNTS)]
        texts = [list(result.tokens) for result in engine.generate(prompts, params, spec=SpecConfig())]
    for text in texts[: len(CIRCLES)]:
        period = period_of(text)
        assert period is not None
        same = next(
            i for i in range(len(text) - 1, period - 2, -1) if i < period or text[i] != text[i - period]
        )
        begins = max(0, same - period + 1)
        noticed = next(n for n in range(EVERY, len(text) + 1, EVERY) if period_of(text[:n]) is not None)
        assert noticed - begins <= 300
    for text in texts[len(CIRCLES) :]:
        places = range(EVERY, len(text) + 1)
        assert [n for n in places if period_of(text[max(0, n - WINDOW) : n]) is not None] == []
