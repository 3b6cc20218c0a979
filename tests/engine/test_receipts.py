"""A receipt says whether plain decoding gives an answer again, and where not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gpu_rounding
import pytest
from planting import Fault

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine
from mlxspec.engine.record import Record, record
from mlxspec.errors import ConfigError
from mlxspec.sampling import acceptance
from tests.engine import equality

SPEC = SpecConfig(drafters=("ngram-simple", "mtp"), policy="fixed", n_max=3)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = equality.engine()
    yield made
    made.close()


def asked(number: int) -> tuple[list[int], SamplingParams]:
    """A prompt that repeats itself, and how its answer is sampled."""
    (prompt,) = equality.prompts(1, 5 + number)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.2},
        {"temperature": 0.7, "min_p": 0.05, "seed": number},
    ]
    return prompt * 2, SamplingParams(max_tokens=24, **kinds[number % len(kinds)])


@pytest.mark.parametrize(
    "numbers", [range(16), pytest.param(range(16, 1016), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_drafted_answers_are_plain_ones(engine: Engine, numbers: range) -> None:
    accepted = 0
    for number in numbers:
        prompt, params = asked(number)
        result = engine.generate(prompt, params, spec=SPEC)
        receipt = engine.prove(prompt, result, params)
        assert receipt.is_equal, (number, receipt)
        assert receipt.num_tokens == len(result.tokens)
        accepted += receipt.num_accepted
    assert accepted > len(numbers)


def test_one_draft_accepted_too_many_is_found(engine: Engine) -> None:
    """At its first place, with what the model thinks of both tokens."""
    fault = Fault(
        "one too many",
        "mlxspec.sampling.acceptance:match",
        lambda right: lambda d, s: min(len(d), right(d, s) + 1),
    )
    prompt, params = asked(0)
    plain = engine.generate(prompt, params).tokens
    with fault.planted():
        assert acceptance.match([1, 2], [1, 3, 4]) == 2
        wrong = engine.generate(prompt, params, spec=SPEC)
    found = engine.prove(prompt, wrong, params).difference
    assert found is not None
    assert (wrong.tokens[: found.place], found.plain) == (plain[: found.place], plain[found.place])
    assert found.answer == wrong.tokens[found.place] != found.plain
    assert found.plain_logprob is not None
    assert found.answer_logprob is None or found.answer_logprob < found.plain_logprob


@pytest.mark.parametrize("min_tokens", [3, 60, 200])
def test_a_record_keeps_the_minimum_that_the_context_left_room_for(min_tokens: int) -> None:
    """By it the answer comes out again, also in an engine of a larger context."""
    short, larger = (equality.engine(max_context=size) for size in (96, 192))
    prompt, _ = asked(0)
    request = short.submit(prompt, SamplingParams(max_tokens=200, min_tokens=min_tokens), spec=SPEC)
    while not short.is_idle:
        short.step()
    found = Record.read(json.dumps(record(request, "model", 16, None)))
    assert found.params.min_tokens == min(min_tokens, 96 - len(prompt))
    assert larger.prove(prompt, found.result, found.params).is_equal
    short.close()
    larger.close()


@pytest.mark.parametrize("change", [{"finish_reason": "stop"}, {"tokens": (1, 2, 3)}])
def test_other_ends_are_differences(engine: Engine, change: dict[str, Any]) -> None:
    prompt, params = asked(0)
    result = replace(engine.generate(prompt, params), **change)
    assert not engine.prove(prompt, result, params).is_equal


def test_what_cannot_be_proved_is_an_error(engine: Engine) -> None:
    prompt, params = asked(0)
    result = engine.generate(prompt, params)
    with pytest.raises(ConfigError, match="failed cannot be proved: it broke"):
        engine.prove(prompt, replace(result, finish_reason="error", error="it broke"), params)
    with pytest.raises(ConfigError, match="stopped before its first token"):
        engine.prove(prompt, replace(result, finish_reason="cancelled", tokens=()), params)
    stopped = replace(result, finish_reason="cancelled", tokens=result.tokens[:5], text=result.text[:3])
    assert engine.prove(prompt, stopped, params).is_equal
    for answer in (result, stopped):
        with pytest.raises(ConfigError, match="text is not what its tokens say"):
            engine.prove(prompt, replace(answer, text="another text"), params)


def test_a_prompt_in_words(engine: Engine) -> None:
    result = engine.generate("word3 word4 word3", max_tokens=6, spec=SPEC)
    assert engine.prove("word3 word4 word3", result, max_tokens=6).is_equal
    wrong = replace(result, tokens=(*result.tokens[:2], result.tokens[2] ^ 1, *result.tokens[3:]))
    found = engine.prove("word3 word4 word3", wrong, max_tokens=6).difference
    assert found is not None
    assert (found.place, found.plain) == (2, result.tokens[2])
    assert found.plain_logprob is not None


@pytest.mark.parametrize("num", [12, pytest.param(250, marks=pytest.mark.slow)])
def test_a_flip_in_16_bits_is_found_at_its_first_place(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of several rows round as a GPU's do."""
    gpu_rounding.plant(monkeypatch.setattr)
    engine, flips = equality.engine(form="bfloat16"), 0
    for number in range(num):
        prompt, params = asked(number)
        params = replace(params, seed=number)
        result, plain = (engine.generate(prompt, params, spec=spec) for spec in (SPEC, SpecConfig()))
        receipt = engine.prove(prompt, result, params)
        assert receipt.is_equal == (result.tokens == plain.tokens)
        if (found := receipt.difference) is not None:
            flips += 1
            pairs = enumerate(zip((*result.tokens, None), (*plain.tokens, None), strict=False))
            assert (found.place, found.answer, found.plain) == next(
                (i, a, b) for i, (a, b) in pairs if a != b
            )
            if params.temperature == 0 and None not in (found.answer, found.plain):
                assert found.answer_logprob is not None
                assert found.plain_logprob is not None
    print(f"{flips} of {num} answers differ")
    assert flips
    engine.close()
