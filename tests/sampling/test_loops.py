"""Texts that loop are noticed, real texts are not, and the text does not depend on who drafted it."""

from __future__ import annotations

import json
import random
import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planting import catches

import mlxspec
from mlxspec.compat.mlx_lm._answers import _params
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.base import Draft, Drafter
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine import request
from mlxspec.engine.engine import Engine, Result
from mlxspec.errors import ConfigError
from mlxspec.sampling import loops
from mlxspec.sampling.constraints import Constraints
from mlxspec.sampling.loops import EVERY, LEAST, LONGEST, WINDOW, period_of
from tests import tiny_models
from tests.engine import equality
from tests.sampling.enumerations import enumerations

LIB = Path(sysconfig.get_paths()["stdlib"])
PERIODS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 300, 377, 400)


def loop(period: int, seed: int, length: int) -> list[int]:
    """100 random tokens, then circles of period random ones."""
    rng = np.random.default_rng(seed)
    circle = rng.integers(0, 3000, period).tolist()
    return rng.integers(0, 3000, 100).tolist() + circle * -(-length // period)


@catches(
    "long periods are not looked at",
    "mlxspec.sampling.loops:LONGEST",
    lambda right: 200,
    case="400",
)
@pytest.mark.parametrize("period", PERIODS)
def test_loops_are_noticed(period: int) -> None:
    """Behind 200 tokens and four periods, at the next look."""
    least = max(LEAST, 4 * period)
    text = loop(period, period, least + 2 * EVERY)
    noticed = [n for n in range(EVERY, len(text), EVERY) if period_of(text[:n]) is not None]
    assert noticed
    assert 100 + least <= noticed[0] < 100 + least + EVERY
    assert period_of(text) == period


@pytest.mark.parametrize("period", PERIODS)
def test_a_circle_with_something_new_in_it_is_no_loop(period: int) -> None:
    """One token in 200, or one in each fourth circle, is another one every time: a number that counts."""
    apart = max(LEAST, 4 * period) - 1
    text = loop(period, period, 9 * apart)
    for i, place in enumerate(range(100, len(text), apart)):
        text[place] = 9000 + i
    assert [n for n in range(EVERY, len(text)) if period_of(text[max(0, n - WINDOW) : n]) is not None] == []


@catches(
    "nine tokens in ten alike are a loop",
    "mlxspec.sampling.loops:period_of",
    lambda right: nearly_periodic,
)
def test_enumerations_are_no_loops() -> None:
    """200 of 25 kinds, at every place that a look may have."""
    tokenizer = mlxspec.load("demo", draft="off").tokenizer
    texts = enumerations()
    assert len({text for _, text in texts}) == 200
    alarms = []
    for kind, text in texts:
        said = tokenizer.encode(text, special=False)
        places = range(LEAST, len(said) + 1, 8)
        alarms += [(kind, n) for n in places if period_of(said[max(0, n - WINDOW) : n]) is not None]
    assert not alarms, alarms


def nearly_periodic(tokens: Sequence[int]) -> int | None:
    """A rule that takes what counts for a loop."""
    text = np.asarray(tokens)
    for period in range(1, len(text) // 4 + 1):
        last = text[-max(LEAST, 4 * period) :]
        if len(last) >= LEAST and np.mean(last[period:] == last[:-period]) >= 0.9:
            return period
    return None


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
    wrong=st.lists(st.integers(0, 500), max_size=3),
)
def test_agrees_with_counting(start: list[int], circle: list[int], times: int, wrong: list[int]) -> None:
    text = start + circle * max(times, times * LEAST // (4 * len(circle)))
    for place in wrong:
        text[-1 - place % len(text)] = 99
    text = text[-WINDOW:]

    def loops(period: int) -> bool:
        length = max(LEAST, 4 * period)
        return length <= len(text) and all(
            text[-i] == text[-i - period] for i in range(1, length - period + 1)
        )

    wanted = next((p for p in range(1, LONGEST + 1) if loops(p)), None)
    assert period_of(text) == wanted


# ---- on a model

NEXT: dict[int, int] = {}  # what the model below says behind a token
ENDS = SamplingParams(max_tokens=160, ignore_eos=True, loop_breaker="all")
LOOK, LATER = 16, 32  # in place of EVERY and DELAY


class Knows(Drafter):
    """Drafts what the model is made to say, with a wrong token at each place that 7 divides where drafts are short."""

    name = "knows"
    max_draft = 256
    width = 11

    def draft(self, asks, sampler):  # type: ignore[no-untyped-def]
        return [Draft.of(self.follow(ask.history, min(self.width, ask.limit))) for ask in asks]

    def follow(self, history: Sequence[int], num: int) -> list[int]:
        found = [history[-1]]
        while len(found) <= num and found[-1] in NEXT:
            found.append(NEXT[found[-1]])
        wrong = range(-len(history) % 7 + 1, len(found), 7) if num < 20 else ()
        return [0 if place in wrong else token for place, token in enumerate(found)][1:]


class Made:
    """A model that says what NEXT tells, and behind other tokens what it likes."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, tokens, rows, cache, **more):  # type: ignore[no-untyped-def]
        out = self._model.forward(tokens, rows, cache, **more)
        if out.logits is None:
            return out
        table = np.full(self.vocab_size, -1, np.int32)
        table[list(NEXT)] = list(NEXT.values())
        wanted = mx.array(table)[tokens[-out.logits.shape[0] :]][:, None]
        said = mx.where(mx.arange(self.vocab_size) == wanted, out.logits + 1e4, out.logits)
        return replace(out, logits=said)


@pytest.fixture(scope="module")
def tiny() -> Engine:
    """Its MTP head drafts behind unread rounds."""
    drafters = [Mtp(tiny_models.mtp_head(), tiny_models.target().max_context), Knows()]
    made = equality.engine(drafters, prefix_budget=0)
    made._model = Made(made.model)  # type: ignore[assignment]
    return made


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short loops are loops too, and are closed soon, so that tests are short."""
    monkeypatch.setattr(loops, "LEAST", 24)
    monkeypatch.setattr(request, "EVERY", LOOK)
    monkeypatch.setattr(request, "DELAY", LATER)


def ids(text: str) -> list[int]:
    return [ord(letter) - 32 for letter in text]


THINKS, CLOSE = ids("a question <think>"), ids("</think>")


def chain(first: int, circle: int) -> None:
    """The model says `first` different tokens behind a tag and then a circle of others."""
    free = [t for t in range(95) if t not in CLOSE]
    said = free[: first + circle]
    assert len(said) == first + circle
    NEXT.clear()
    NEXT.update(zip([THINKS[-1], *said], [*said, said[first]], strict=True))


def text_of(start: int, num: int) -> list[int]:
    """What NEXT says behind a token."""
    found = [start]
    while len(found) <= num:
        found.append(NEXT[found[-1]])
    return found[1:]


def by(*names: str) -> SpecConfig:
    return equality.spec(*names)


def check_closed(own: Engine, first: int, circle: int) -> None:
    """Thinking that loops is closed at one place, whoever drafts and whoever is beside it."""
    chain(first, circle)
    said = text_of(THINKS[-1], 420)
    at = next(n for n in range(LOOK, 420, LOOK) if period_of(said[:n]) is not None) + LATER
    params = SamplingParams(max_tokens=at + 30, ignore_eos=True)
    asked = [by(), by("mtp"), by("knows")]
    alone = [own.generate(THINKS, params, spec=spec) for spec in asked]
    rows = [own.submit(THINKS, params, spec=spec) for spec in asked]
    free = own.submit(THINKS, replace(params, loop_breaker="off"), spec=by("mtp"))
    while not own.is_idle:
        own.step()
    for result in (*alone, *map(Result.of, rows)):
        assert result.tokens == (*said[:at], *CLOSE, *said[: 30 - len(CLOSE)])
        assert result.finish_reason == "length"
        assert (result.stats.num_thinking, result.stats.num_loops) == (at, 1)
        notice = f"thinking looped and was closed: it repeats every {circle} tokens (loop_breaker)"
        assert result.stats.notices == [notice]
    assert Result.of(free).tokens == tuple(said[: at + 30])


@catches("nobody looks", "mlxspec.sampling.loops:Loops.look", lambda right: lambda *given: None)
@catches(
    "a tag is forced at once, where rounds are on their way",
    "mlxspec.sampling.constraints:Constraints.close_thinking",
    lambda right: lambda self, num, *more: right(self, 1, *more),
)
@pytest.mark.parametrize(("first", "circle"), [(0, 1), (13, 7)])
def test_thinking_is_closed_alike_whoever_drafts(tiny: Engine, short: None, first: int, circle: int) -> None:
    check_closed(tiny, first, circle)


@pytest.mark.slow
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.integers(0, 66), circle=st.integers(1, 20))
def test_thinking_is_closed_alike_wherever_its_loop_begins(
    tiny: Engine, short: None, first: int, circle: int
) -> None:
    check_closed(tiny, first, circle)


@catches(
    "drafts reach the places at which a look may force a token",
    "mlxspec.engine.request:Request.room",
    lambda right: property(lambda self: max(0, self.params.max_tokens - self.num_generated - 1)),
)
def test_long_drafts_end_where_a_tag_may_come(
    tiny: Engine, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Knows, "width", 256)
    chain(20, 5)
    params = SamplingParams(max_tokens=110, ignore_eos=True)
    plain = tiny.generate(THINKS, params, spec=by())
    drafted = tiny.generate(THINKS, params, spec=by("knows"))
    assert drafted.tokens == plain.tokens
    assert drafted.stats.num_loops == 1
    assert max(len(d.by_position) for d in drafted.stats.drafters.values()) == LATER


@catches(
    "the host must know the tokens of rows that are looked at",
    "mlxspec.sampling.row:RowSampler.needs_tokens",
    lambda right: lambda self, width: self.params.loop_breaker != "off" or right(self, width),
)
@catches(
    "rows have constraints before they loop",
    "mlxspec.sampling.constraints:ConstraintMaker.constraints_for",
    lambda right: (
        lambda self, params, *more: (
            right(self, params, *more) or (None if params.loop_breaker == "off" else self.unconstrained())
        )
    ),
)
@pytest.mark.parametrize("names", [(), ("mtp",)], ids=["plain", "mtp"])
def test_thinking_without_a_loop_costs_nothing(
    tiny: Engine, names: tuple[str, ...], short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    for name in ("eval", "async_eval"):
        monkeypatch.setattr(mx, name, counted(calls, name, getattr(mx, name)))
    monkeypatch.setattr(Constraints, "masks", counted(calls, "masks", Constraints.masks))
    found = []
    NEXT.clear()
    for choice in ("off", "thinking"):
        calls.clear()
        before = vars(tiny.stats).copy()
        params = SamplingParams(max_tokens=130, ignore_eos=True, temperature=1.0, seed=5, loop_breaker=choice)
        result = tiny.generate(THINKS, params, spec=by(*names))
        rounds = {k: v - before[k] for k, v in vars(tiny.stats).items() if k.startswith("num_")}
        found.append((result.tokens, calls.copy(), rounds))
    assert found[0] == found[1]
    assert rounds["num_synchronised"] <= 8 < rounds["num_rounds"]


def counted(calls: Counter[str], name: str, right: Any) -> Any:
    def count(*args: Any) -> Any:
        calls[name] += 1
        return right(*args)

    return count


def script(start: int, said: Sequence[int]):  # type: ignore[no-untyped-def]
    """A logits processor that makes the answer behind `start` tokens this one, and any beyond it."""

    def processor(history, logits):  # type: ignore[no-untyped-def]
        place = int(history.shape[0]) - start
        wanted = said[place] if place < len(said) else -1
        return mx.where(mx.arange(logits.shape[-1]) == wanted, logits + 1e4, logits)

    return processor


@catches(
    "a text that is no thinking is closed",
    "mlxspec.sampling.constraints:ConstraintMaker._thinking_tags",
    lambda right: property(lambda self: ("<think>", "</think>")),
    case="model without thinking",
)
@catches(
    "a tag that is talked of opens thinking",
    "mlxspec.sampling.thinking:Thinking.begins",
    lambda right: lambda self, state: True,
    case="mentioned",
)
@pytest.mark.parametrize(
    ("prompt", "begins", "thinks", "is_closed"),
    [
        ("a question", "<think>", False, False),
        ("a question", "<think>", True, True),
        ("a question", "  <think> ", True, True),
        ("a question", "The tag <think> is", True, False),
        ("a question <think> </think> ", "So: <think>", True, False),
        ("a question <think> ", "so", False, True),
    ],
    ids=[
        "model without thinking",
        "opened",
        "opened behind spaces",
        "mentioned",
        "not to think",
        "by the prompt",
    ],
)
def test_only_thinking_is_closed(
    tiny: Engine,
    short: None,
    monkeypatch: pytest.MonkeyPatch,
    prompt: str,
    begins: str,
    thinks: bool,
    is_closed: bool,
) -> None:
    if thinks:
        monkeypatch.setattr(tiny.factory.constraints, "_thinking_tags", ("<think>", "</think>"))
    start = ids(prompt)
    said = (*ids(begins), *(ids("xyz") * 30))
    NEXT.clear()
    params = SamplingParams(max_tokens=90, ignore_eos=True, logits_processors=[script(len(start), said)])
    result = tiny.generate(start, params, spec=by("knows"))
    assert ("</think>" in result.text) == is_closed == (result.tokens != said[:90])
    assert result.stats.num_loops == is_closed == len(result.stats.notices)


@pytest.mark.parametrize("closes", ["itself", "its budget"])
def test_thinking_that_was_closed_by_something_else_has_no_notice(
    tiny: Engine, short: None, closes: str
) -> None:
    num = LOOK * 2 + LATER - 10
    said = (ids("xyz") * 200)[:num] + CLOSE + ids("w") * 40
    NEXT.clear()
    params = SamplingParams(
        max_tokens=len(said),
        ignore_eos=True,
        thinking_budget=None if closes == "itself" else num,
        logits_processors=[script(len(THINKS), said)],
    )
    result = tiny.generate(THINKS, params, spec=by("knows"))
    assert result.tokens == tuple(said)
    assert (result.stats.num_loops, result.stats.notices) == (0, [])
    assert result.stats.num_thinking_forced == (0 if closes == "itself" else len(CLOSE))


@pytest.mark.parametrize("names", [(), ("mtp",), ("knows",)], ids=["plain", "mtp", "knows"])
@pytest.mark.parametrize(
    "more", [{}, {"bad_words": ("zzzz",)}, {"thinking_budget": 150}], ids=["", "words", "budget"]
)
def test_an_answer_that_loops_is_ended_behind_thinking_that_loops(
    tiny: Engine, short: None, names: tuple[str, ...], more: dict[str, Any]
) -> None:
    chain(0, 7)
    said = text_of(THINKS[-1], 600)
    result = tiny.generate(THINKS, replace(ENDS, **more), spec=by(*names))
    thought = LOOK * 2 + LATER
    behind = thought + len(CLOSE)
    end = next(n for n in range(LOOK, 600, LOOK) if n > behind and period_of(said[: n - behind]))
    assert result.tokens == (*said[:thought], *CLOSE, *said[: end - behind])
    assert (result.finish_reason, result.stats.num_loops) == ("length", 2)
    assert result.stats.notices == [
        "thinking looped and was closed: it repeats every 7 tokens (loop_breaker)",
        "the answer looped and was ended: it repeats every 7 tokens (loop_breaker)",
    ]
    off = tiny.generate(THINKS, replace(ENDS, **more, loop_breaker="off"), spec=by(*names))
    assert len(off.tokens) == 160
    assert ("</think>" in off.text) == ("thinking_budget" in more)


def test_by_default_an_answer_that_loops_is_ended_unless_its_end_is_set(tiny: Engine, short: None) -> None:
    chain(0, 7)
    free = SamplingParams(max_tokens=160)
    asked = ids("a question")
    assert tiny.generate(asked, free).stats.num_loops == 1
    for more in ({"ignore_eos": True}, {"min_tokens": 100}, {"regex": "(.|\n)*"}):
        assert tiny.generate(asked, replace(free, **more)).stats.num_loops == 0


def test_mlx_lms_calls_leave_loops_alone() -> None:
    """They have no place for a notice."""
    assert SamplingParams().loop_breaker is None
    assert _params(8, {}, 0).loop_breaker == "off"


def test_the_choice_is_checked() -> None:
    with pytest.raises(ConfigError, match="loop_breaker must be one of off, thinking, all"):
        SamplingParams(loop_breaker="yes")  # type: ignore[arg-type]
