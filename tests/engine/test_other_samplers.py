"""Samplers and limits of other servers in an engine: the text is the same with and without drafting, and ends where it should."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planting import catches

from mlxspec import SamplingParams, SpecConfig, load
from mlxspec.engine.engine import Engine
from mlxspec.engine.request import Request

PROMPT = "def join(a, *p):\n"
ASKED: list[dict[str, Any]] = [
    {"min_tokens": 38, "stop_token_ids": [10]},
    {"allowed_token_ids": [*range(400)]},
    {"temperature": 1.0, "top_n_sigma": 1.0},
    {"temperature": 1.0, "typical_p": 0.7},
    {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05, "top_k": 20, "typical_p": 0.9},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1, "ignore_eos": True},
    {"dry_multiplier": 2.0, "temperature": 0.8},
    {
        "repetition_penalty": 2.0,
        "presence_penalty": 0.5,
        "ignore_eos": True,
    },  # counted, beside one of the last tokens
    {"repeat_last_n": 24, "repetition_penalty": 4.0, "presence_penalty": 1.0, "ignore_eos": True},
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load("demo", spec=SpecConfig(policy="fixed"))


def answers(engine: Engine, *asked: dict[str, Any], drafts: bool) -> list[Request]:
    """Of requests that are answered together."""
    spec = engine.spec if drafts else replace(engine.spec, drafters=())
    requests = [
        engine.submit(PROMPT, SamplingParams(**{"max_tokens": 40, "seed": 5, **a}), spec=spec) for a in asked
    ]
    while any(r.finish_reason is None for r in requests):
        engine.step()
    return requests


def text(request: Request) -> list[int]:
    return request.history[len(request.prompt) :]


@catches(
    "drafts before a place are not seen",
    "mlxspec.sampling.processors:process",
    lambda right: lambda hooks, history, drafts, logits: right(hooks, history, drafts * 0, logits),
)
def test_the_text_is_the_same_drafted_and_plain(engine: Engine) -> None:
    drafted = answers(engine, *ASKED, drafts=True)
    plain = [answers(engine, a, drafts=False)[0] for a in ASKED]
    for asked, one, other in zip(ASKED, drafted, plain, strict=True):
        assert text(one) == text(other), asked
        assert one.stats.num_drafted > 0
        assert one.error is None
        beside = {name: asked[name] for name in ("temperature", "ignore_eos") if name in asked}
        assert text(one) != text(answers(engine, beside, drafts=False)[0]), asked


def test_where_an_answer_ends(engine: Engine) -> None:
    free = text(answers(engine, {"ignore_eos": True}, drafts=False)[0])
    token = free[4]
    first = free.index(token)
    ends = {"stop_token_ids": [token], "ignore_eos": True}
    for drafts in (True, False):
        (request,) = answers(engine, ends, drafts=drafts)
        assert (text(request), request.finish_reason) == (free[:first], "stop")
        (request,) = answers(engine, {**ends, "min_tokens": 20}, drafts=drafts)
        assert len(text(request)) >= 20
        assert token not in text(request)[:20]
    whole = answers(engine, {}, drafts=True)[0].answer.text
    stop = whole[10:13]
    (cut,) = answers(engine, {"stop": [stop]}, drafts=True)
    (kept,) = answers(engine, {"stop": [stop], "keeps_stop": True}, drafts=True)
    assert kept.answer.text == cut.answer.text + stop == whole[: whole.index(stop) + len(stop)]
    (late,) = answers(engine, {"stop": [stop], "min_tokens": 36}, drafts=True)
    assert len(text(late)) >= 36
