"""Callables of the user's (logits processors, samplers, drafters of their own): right at every verified position, exact, and their failures
are their request's alone."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.config import SamplingParams
from mlxspec.drafters.base import NO_DRAFT, Ask, Draft, Drafter
from mlxspec.engine.engine import Engine, Result
from mlxspec.errors import HookError
from mlxspec.events import FinishEvent
from tests import tiny_models
from tests.engine import equality
from tests.engine.equality import ALL, PLAIN, spec

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = equality.prompts(6, 7)


@cache
def engine() -> Engine:
    return equality.engine()


def by_history(tokens: mx.array, logits: mx.array) -> mx.array:
    """Lifts ten tokens that only the whole history tells."""
    key = int(np.dot(np.asarray(tokens, np.int64), np.arange(1, tokens.size + 1)) % 10007)
    lifted = np.random.default_rng(key).integers(0, tiny_models.EOS, 10)
    return logits.at[:, mx.array(lifted)].add(6.0)


def oracle_for(prompt: list[int], result: Result, **config) -> Engine:
    """An engine whose drafter knows the answer and is wrong at times."""
    return equality.engine([equality.Oracle([[*prompt, *result.tokens]], sure=0.8, seed=3)], **config)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_processors_see_the_right_history_at_every_verified_position(temperature: float) -> None:
    prompt = PROMPTS[4]
    params = SamplingParams(
        max_tokens=40, temperature=temperature, seed=5, ignore_eos=True, logits_processors=(by_history,)
    )
    plain = engine().generate(prompt, params, spec=PLAIN)
    assert plain.tokens != engine().generate(prompt, SamplingParams(max_tokens=40), spec=PLAIN).tokens
    seen: list[list[int]] = []

    def listening(tokens: mx.array, logits: mx.array) -> mx.array:
        assert logits.shape == (1, tiny_models.VOCAB)
        seen.append(tokens.tolist())
        return logits

    from dataclasses import replace

    params = replace(params, logits_processors=(listening, by_history))
    drafted = oracle_for(prompt, plain).generate(prompt, params, spec=spec("ngram-simple", ngram_m=12))
    equality.same(plain, drafted, prompt, params, "oracle")
    assert drafted.stats.num_accepted > 10
    assert (
        drafted.stats.num_drafted > drafted.stats.num_accepted
    )  # some did not stand: those positions were asked about too
    text = [*prompt, *drafted.tokens]
    assert all(text[:length] in seen for length in range(len(prompt), len(text)))
    assert all(s[: len(prompt)] == prompt for s in seen)
    assert any(s != text[: len(s)] for s in seen)


@pytest.mark.parametrize("names", [("mtp",), ("draft-model",), ALL], ids="+".join)
def test_real_drafters_keep_the_text_of_processors_and_samplers(names: tuple[str, ...]) -> None:
    def second_best(logprobs: mx.array) -> mx.array:
        return mx.argsort(-logprobs, axis=-1)[:, 1]

    several = [
        SamplingParams(max_tokens=20, logits_processors=[by_history], repetition_penalty=1.1),
        SamplingParams(max_tokens=20, temperature=0.8, seed=1),
        SamplingParams(max_tokens=20, sampler=second_best, logits_processors=[by_history], bad_words=("a",)),
        SamplingParams(max_tokens=20, sampler=lambda x: mx.argmax(x, axis=-1)),
    ]
    wanted = [engine().generate(p, s, spec=PLAIN) for p, s in zip(PROMPTS, several, strict=False)]
    got = engine().generate(PROMPTS[:4], several, spec=spec(*names))
    for prompt, params, a, b in zip(PROMPTS, several, wanted, got, strict=False):
        if params.sampler is not None:
            assert b.tokens == a.tokens
        else:
            equality.same(a, b, prompt, params, "hooks")
    assert wanted[3].tokens == engine().generate(PROMPTS[3], SamplingParams(max_tokens=20), spec=PLAIN).tokens
    assert "a" not in got[2].text


def failing_at(length: int, how: str):
    def hook(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size >= length:
            if how == "raises":
                raise RuntimeError("out of ideas.")
            if how == "fails when computed":
                return logits + broken()
            return None if how == "returns nothing" else logits[0]
        return logits

    return hook


def broken() -> mx.array:
    """An array (1,) that can be built, and whose computation raises."""
    return mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu).sum(keepdims=True)[0]


@cache
def plainly(number: int, max_tokens: int) -> Result:
    """What plain decoding says to one of PROMPTS."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return engine().generate(PROMPTS[number], params, spec=PLAIN)


@pytest.mark.parametrize("how", ["raises", "returns nothing", "returns another shape"])
@pytest.mark.parametrize("after", [0, 1, 9])
def test_a_failing_processor_ends_its_request_where_the_text_gets_there(after: int, how: str) -> None:
    failing_processor(after, how)


def failing_processor(after: int, how: str) -> None:
    prompt, other = PROMPTS[4], PROMPTS[5]
    quiet = SamplingParams(max_tokens=24, ignore_eos=True)
    plain = plainly(4, 24)
    params = SamplingParams(
        max_tokens=24, ignore_eos=True, logits_processors=(failing_at(len(prompt) + after, how),)
    )
    for own in (engine(), oracle_for(prompt, plain)):
        limits = PLAIN if own is engine() else spec("ngram-simple", ngram_m=12)
        ended, beside = own.generate([prompt, other], [params, quiet], spec=limits)
        assert ended.finish_reason == "error"
        assert "logits processor failing_at.<locals>.hook" in ended.error
        assert ended.error.endswith(".")
        assert ("RuntimeError: out of ideas." in ended.error) == (how == "raises")
        assert ended.tokens == plain.tokens[:after]
        assert beside.tokens == plainly(5, 24).tokens
        assert own.is_idle
    events = list(engine().stream(prompt, params, spec=spec(*ALL)))
    assert isinstance(events[-1], FinishEvent)
    assert (events[-1].reason, events[-1].error) == ("error", ended.error)


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        (mx.array([tiny_models.VOCAB]), f"chose {tiny_models.VOCAB}"),
        (mx.array([-1]), "chose -1"),
        (mx.array([1, 2]), "one token id"),
        (mx.array([1.0]), "float32"),
        (3, "not int"),
    ],
    ids=str,
)
def test_a_sampler_that_chooses_no_token_ends_its_request(chosen: object, says: str) -> None:
    no_token(chosen, says)


def test_computations_that_fail_end_their_request() -> None:
    """In a process of its own: behind two computations that failed, MLX counts tasks that are over, and may wait for them for ever."""
    calls = (
        "from tests.engine import test_hooks as t",
        "for after in (0, 1, 9): t.failing_processor(after, 'fails when computed')",
        "t.no_token(None, 'LU factorization failed')",
    )
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(calls)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr


def no_token(chosen: object, says: str) -> None:
    def choose(logprobs: mx.array) -> object:
        return broken().astype(mx.int32) if chosen is None else chosen

    params = SamplingParams(max_tokens=9, sampler=choose)
    for limits in (PLAIN, spec(*ALL)):
        (result,) = engine().generate([PROMPTS[1]], params, spec=limits)
        assert (result.finish_reason, result.tokens) == ("error", ())
        assert says in result.error
        with pytest.raises(HookError) as caught:  # of one answer
            engine().generate(PROMPTS[1], params, spec=limits)
        assert str(caught.value) == result.error
        assert caught.value.result.tokens == ()


class Copying(Drafter):
    """By history alone, with nothing but `propose`."""

    name = "copying"
    max_draft = 7

    def draft(self, asks, sampler):
        self.limits = [a.limit for a in asks]
        return [Draft.of(list(a.history[-a.limit :])) for a in asks]


class Broken(Drafter):
    name = "broken"

    def __init__(self, give) -> None:
        self.give = give

    def draft(self, asks: list[Ask], sampler) -> list[Draft]:
        return self.give(asks)


def test_a_drafter_of_ones_own_needs_only_propose() -> None:
    own = Copying()
    mine = equality.engine([own])
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    plain = engine().generate(PROMPTS[3], params, spec=PLAIN)
    for policy in ("fixed", "auto"):
        drafted = mine.generate(PROMPTS[3], params, spec=spec("copying", policy=policy))
        assert drafted.tokens == plain.tokens
    assert own.limits
    assert max(own.limits) <= 7
    assert mine.generate(PROMPTS[3], params).stats.drafters["copying"].num_drafted > 0


@pytest.mark.parametrize(
    ("give", "says"),
    [
        (lambda asks: [], "gave [] where a list of 1 drafts"),
        (lambda asks: [Draft.of([1] * (a.limit + 1)) for a in asks], "at most"),
        (lambda asks: [Draft(3, [1, 2]) for _ in asks], "of length 3 has the tokens"),
        (lambda asks: [Draft.of([tiny_models.VOCAB]) for _ in asks], "no token id"),
        (lambda asks: [Draft.of([-1]) for _ in asks], "no token id"),
        (lambda asks: [Draft.of(["a"]) for _ in asks], "no token id"),
        (lambda asks: [[1, 2] for _ in asks], "where a Draft was asked for"),
        (lambda asks: 1 / 0, "ZeroDivisionError"),
    ],
    ids=[str(i) for i in range(8)],
)
def test_a_drafter_that_errs_ends_for_the_row_and_says_so(give, says: str) -> None:
    mine = equality.engine([Broken(give)])
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    plain = engine().generate(PROMPTS[2], params, spec=PLAIN)
    drafted = mine.generate(PROMPTS[2], params)
    assert drafted.tokens == plain.tokens
    assert len(drafted.stats.notices) == 1
    assert says in drafted.stats.notices[0]
    assert NO_DRAFT.length == 0
