"""Texts that loop are noticed, real texts are not, and the text does not depend on who drafted it."""

from __future__ import annotations

import json
import random
import sysconfig
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planting import catches

import mlxspec
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.base import Draft, Drafter
from mlxspec.engine.engine import Engine
from mlxspec.errors import ConfigError
from mlxspec.sampling import loops, thinking
from mlxspec.sampling.loops import EVERY, LEAST, LONGEST, WINDOW, period_of

LIB = Path(sysconfig.get_paths()["stdlib"])
PERIODS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 300, 377, 400)


def loop(period: int, seed: int, length: int, *, drifts: bool) -> list[int]:
    """A random beginning, then circles; with drift one token in each of them, or in twelve, is another one every time."""
    rng = np.random.default_rng(seed)
    circle = rng.integers(0, 3000, period).tolist()
    text = rng.integers(0, 3000, 100).tolist()
    for i in range(-(-length // period)):
        text += [9000 + i, *circle[1:]] if drifts and i % max(1, -(-12 // period)) == 0 else circle
    return text


@pytest.mark.parametrize("drifts", [False, True], ids=["", "drift"])
@pytest.mark.parametrize("period", PERIODS)
def test_loops_are_noticed(period: int, drifts: bool) -> None:
    text = loop(period, period, max(LEAST, 3 * period) + 2 * period + 2 * EVERY, drifts=drifts)
    noticed = [n for n in range(EVERY, len(text), EVERY) if period_of(text[:n]) is not None]
    assert noticed, "never"
    assert noticed[0] >= LEAST
    assert period_of(text) is not None


@cache
def real_texts() -> tuple[tuple[int, ...], ...]:
    """200 of code, tables, JSON and verse, as tokens of the demo's tokenizer."""
    tokenizer = mlxspec.load("demo", draft="off").tokenizer
    rng, texts = random.Random(3), []
    code = sorted(p for p in LIB.glob("*.py") if p.stat().st_size > 8000)
    texts += [p.read_text(errors="replace")[4000:9000] for p in rng.sample(code, 110)]
    words = (LIB / "textwrap.py").read_text().split()
    for i in range(30):  # tables
        names = rng.sample(words, 40)
        texts.append("\n".join(f"| {n[:12]} | {rng.randint(0, 999)} | {rng.random():.3f} |" for n in names))
        rows = [{"id": j, "name": rng.choice(words), "size": rng.randint(0, 9999)} for j in range(45)]
        texts.append(json.dumps(rows, indent=i % 3))
    for _ in range(30):  # verses with a refrain
        refrain = " ".join(rng.sample(words, 14))
        texts.append("\n".join(" ".join(rng.sample(words, 30)) + "\n" + refrain for _ in range(12)))
    assert len(texts) == 200
    return tuple(tuple(tokenizer.encode(t, special=False)) for t in texts)


def test_real_texts_are_no_loops() -> None:
    alarms = [
        (i, n)
        for i, text in enumerate(real_texts())
        for n in range(LEAST, len(text), EVERY)
        if period_of(text[:n]) is not None
    ]
    assert not alarms, alarms


@settings(max_examples=40, deadline=None)
@given(
    start=st.lists(st.integers(0, 9), max_size=30),
    circle=st.lists(st.integers(0, 9), min_size=1, max_size=150),
    times=st.integers(1, 8),
    wrong=st.lists(st.integers(0, 500), max_size=80),
)
def test_agrees_with_counting(start: list[int], circle: list[int], times: int, wrong: list[int]) -> None:
    text = start + circle * max(times, times * LEAST // (4 * len(circle)))
    for place in wrong:
        text[-1 - place % len(text)] = 99
    text = text[-WINDOW:]

    def loops(period: int) -> bool:
        length = max(LEAST, 3 * period)
        if length + period > len(text) or sum(text[-i] == text[-i - period] for i in (1, 2, 3)) < 2:
            return False
        differing = sum(text[-i] != text[-i - period] for i in range(1, length + 1))
        return 10 * differing <= length

    wanted = next((p for p in range(1, LONGEST + 1) if loops(p)), None)
    assert period_of(text) == wanted


class Echo(Drafter):
    """Drafts what comes, so that loops are met within verifies."""

    name = "echo"
    max_draft = 11

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}

    def propose(self, asks, sampler):  # type: ignore[no-untyped-def]
        return [Draft.of(list(ask.history[-7:] * 2)[: ask.limit]) for ask in asks]


@pytest.fixture(scope="module")
def demo() -> Engine:
    return mlxspec.load("demo", drafters=[Echo()], draft=["echo"], spec=SpecConfig(policy="fixed"))


def circling(period: int, tokens: list[int]):  # type: ignore[no-untyped-def]
    """A sampler's place is taken by a processor that makes the text a loop of these tokens."""
    import mlx.core as mx

    def processor(history, logits):  # type: ignore[no-untyped-def]
        wanted = tokens[int(history.shape[0]) % period]
        return mx.where(mx.arange(logits.shape[-1]) == wanted, logits + 1e4, logits)

    return processor


@catches(
    "nobody looks",
    "mlxspec.engine.request:period_of",
    lambda right: lambda tokens: None,
)
@catches(
    "nobody looks inside thinking",
    "mlxspec.sampling.thinking:period_of",
    lambda right: lambda tokens: None,
)
def test_thinking_is_closed_and_an_answer_ended_alike_with_and_without_drafts(
    demo: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = 80
    for module in (loops, thinking):
        monkeypatch.setattr(module, "LEAST", least)
    tokenizer = demo.tokenizer
    assert tokenizer is not None
    tokens = tokenizer.encode("one two three four five six seven", special=False)[:7]
    params = SamplingParams(
        max_tokens=600, ignore_eos=True, loop_breaker="all", logits_processors=[circling(7, tokens)]
    )
    prompt = tokenizer.encode("a question <think>\n", special=False)
    for names in ((), ("echo",)):
        result = demo.generate(prompt, params, spec=replace(demo.spec, drafters=names))
        if not names:
            plain = result
        assert result.tokens == plain.tokens
        assert result.finish_reason == "length"
        assert result.text.count("</think>") == 1
        assert result.stats.num_loops == 2
        said = " ".join(result.stats.notices)
        assert "thinking looped and was closed: it repeats every 7 tokens" in said
        assert "the answer looped and was ended: it repeats every 7 tokens" in said
    assert least < plain.stats.num_thinking < least + 2 * EVERY
    assert 2 * least < len(plain.tokens) < 2 * least + 5 * EVERY
    assert result.stats.num_accepted > 100
    off = demo.generate(prompt, replace(params, loop_breaker="off", max_tokens=200))
    assert len(off.tokens) == 200
    assert "</think>" not in off.text
    only = demo.generate(prompt, replace(params, loop_breaker="thinking", max_tokens=500))
    assert only.finish_reason == "length"
    assert (len(only.tokens), only.stats.num_loops) == (500, 1)


def test_the_choice_is_checked() -> None:
    with pytest.raises(ConfigError, match="loop_breaker must be one of off, thinking, all"):
        SamplingParams(loop_breaker="yes")  # type: ignore[arg-type]
