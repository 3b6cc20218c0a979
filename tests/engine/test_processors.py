"""Everything a request may ask of its tokens, with drafting and without: same text, valid answers, true log-probabilities."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.base import Draft
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.engine.engine import Engine
from mlxspec.engine.round import sample_round
from mlxspec.errors import ConfigError, GrammarError
from mlxspec.events import FinishEvent, TokensEvent
from mlxspec.kernels.flat import FlatRows
from tests import tiny_models
from tests.engine import equality
from tests.engine.equality import ALL, PLAIN, prompts, same, spec
from tests.engine.table import Table

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["red", "green", "blue"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "is_new": {"type": "boolean"},
    },
    "required": ["name", "kind", "sizes", "is_new"],
    "additionalProperties": False,
}
OPEN = [ord(c) - 32 for c in "say <think>"]

# all processors in turn; every one with something random in it too
ASKED: tuple[dict, ...] = (
    {"json_schema": SCHEMA, "temperature": 0.0},
    {"json_schema": SCHEMA, "temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1},
    {"regex": "[a-f]{3,20}(x|yz)*", "temperature": 0.8, "frequency_penalty": 0.5},
    {"bad_words": ("e", "ab", "th"), "temperature": 1.2, "presence_penalty": 0.4},
    {"thinking_budget": 7, "temperature": 0.9, "min_p": 0.02},
    {"thinking_budget": 5, "json_schema": SCHEMA, "temperature": 0.7},
    {
        "thinking_budget": 9,
        "bad_words": ("a", "Q!"),
        "logit_bias": {5: 3.0},
        "top_k": 30,
        "temperature": 1.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "stop": ("zz", "</think>X"),
    },
)


@cache
def engine() -> Engine:
    return equality.engine()


def asked(**more) -> tuple[list[list[int]], list[SamplingParams]]:
    params = [
        SamplingParams(**{"max_tokens": 90, "seed": 30 + i, "top_logprobs": i % 3, **options, **more})
        for i, options in enumerate(ASKED)
    ]
    starts = [
        OPEN if p.thinking_budget is not None else s
        for p, s in zip(params, prompts(len(params), 4), strict=True)
    ]
    return starts, params


# each drafter alone with each constraint is what random requests draw
SETS = [("forced",), pytest.param(ALL, marks=pytest.mark.slow)]


@cache
def plain() -> list:
    some, params = asked()
    return [engine().generate(p, s, spec=PLAIN) for p, s in zip(some, params, strict=True)]


@pytest.mark.parametrize("drafters", SETS, ids="+".join)
@pytest.mark.parametrize(
    "limits",
    [{"n_max": 6, "p_min": 0.3, "n_min": 2}, pytest.param({}, marks=pytest.mark.slow)],
    ids=["p_min", "plain"],
)
def test_the_text_of_a_seed_is_the_same_with_every_processor_on(
    drafters: tuple[str, ...], limits: dict
) -> None:
    some, params = asked()
    together = engine().generate(some, params, spec=spec(*drafters, **limits))
    alone = [
        engine().generate(p, s, spec=spec(*drafters, **limits)) for p, s in zip(some, params, strict=True)
    ]
    for prompt, p, wanted, *found in zip(some, params, plain(), together, alone, strict=True):
        for got in found:
            same(wanted, got, prompt, p, f"{drafters}, {limits}")
            assert not got.stats.notices, got.stats.notices
            assert got.stats.num_thinking == wanted.stats.num_thinking
            assert got.stats.num_thinking_forced == wanted.stats.num_thinking_forced


def test_answers_hold_what_was_asked_of_them() -> None:
    for (_, params), result in zip(zip(*asked(), strict=True), plain(), strict=True):
        thought, tag, rest = result.text.partition("</think>")
        if params.thinking_budget is not None and result.finish_reason != "length":
            assert len(thought) <= params.thinking_budget + (0 if tag else 8)
        if params.json_schema is not None:
            json.loads(rest if params.thinking_budget is not None else result.text)
        for word in params.bad_words:
            assert word not in result.text.replace("</think>", "")
    assert any(r.stats.num_thinking_forced for r in plain())


# ---- grammars


@pytest.mark.parametrize("num", [16, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drafters", [(), ALL], ids=["plain", "drafted"])
def test_every_answer_is_valid_json(drafters: tuple[str, ...], num: int) -> None:
    kinds = set()
    for first in range(0, num, 8):
        params = [
            SamplingParams(max_tokens=120, temperature=2.5 * (i % 4), seed=i, json_schema=SCHEMA)
            for i in range(first, first + 8)
        ]
        for result in engine().generate(prompts(8, first), params, spec=spec(*drafters)):
            answer = json.loads(result.text)
            assert result.finish_reason == "stop"
            assert list(answer) == ["name", "kind", "sizes", "is_new"]
            assert len(answer["name"]) <= 6
            assert answer["kind"] in ("red", "green", "blue")
            assert all(0 <= n <= 99 for n in answer["sizes"])
            assert len(answer["sizes"]) <= 3
            kinds.add(answer["kind"])
    assert num < 200 or len(kinds) == 3


def test_what_a_schema_forces_costs_few_rounds() -> None:
    params = SamplingParams(max_tokens=120, json_schema=SCHEMA, seed=1)
    without, forced = (engine().generate([3, 4], params, spec=spec(*names)) for names in ((), ("forced",)))
    assert forced.tokens == without.tokens
    work = forced.stats.drafters["forced"]
    assert work.acceptance > 0.9
    assert forced.stats.num_rounds < 0.6 * without.stats.num_rounds


def test_a_bad_schema_is_an_error_before_any_token() -> None:
    own = equality.engine([])
    before = own.stats.num_rounds
    with pytest.raises(GrammarError, match="JSON schema"):
        own.generate([[1, 2], [3]], [SamplingParams(), SamplingParams(json_schema={"type": "nonsense"})])
    assert own.is_idle
    assert own.stats.num_rounds == before


def test_an_answer_with_nothing_left_to_say_ends_with_a_sentence() -> None:
    params = SamplingParams(regex="abc", bad_words=("bc",), max_tokens=9)
    for names in ((), ("forced",), ALL):
        events = list(engine().stream([5], params, spec=spec(*names)))
        assert events[-1] == FinishEvent(request=events[-1].request, reason="error", error=events[-1].error)
        assert "no token" in events[-1].error
        assert "".join(e.text for e in events if isinstance(e, TokensEvent)) == "ab"
        result = engine().generate([5], params, spec=spec(*names))
        assert (result.finish_reason, result.text) == ("error", "ab")
        assert result.error == events[-1].error


@pytest.mark.parametrize("on_device", [False, True])
def test_a_drafts_masks_are_the_same_wherever_its_tokens_are(on_device: bool) -> None:
    text = '{"name": "'
    draft = [ord(c) - 32 for c in text]
    request = engine().submit([7], SamplingParams(json_schema=SCHEMA))
    engine().cancel(request.number)
    tokens = mx.array(draft, mx.int32) if on_device else draft
    rows = FlatRows((len(draft) + 1,))
    chosen = sample_round(
        [request],
        [Draft(len(draft), tokens, drafter="mtp", width=len(draft))],
        mx.array([7, *draft], mx.int32),
        mx.zeros((rows.num_tokens, tiny_models.VOCAB)),
    )
    assert chosen.tokens.tolist()[:-1] == draft


# ---- thinking


@pytest.mark.parametrize(
    ("drafters", "budget"),
    [(ALL, 0), (ALL, 1), (ALL, 6), (ALL, 17), ((), 6), (("forced",), 0)],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
def test_thinking_is_closed_at_its_budget_inside_drafts_too(drafters: tuple[str, ...], budget: int) -> None:
    params = SamplingParams(thinking_budget=budget, max_tokens=50, ignore_eos=True, seed=2, temperature=0.6)
    result = engine().generate(OPEN, params, spec=spec(*drafters, n_max=5))
    thought, tag, _ = result.text.partition("</think>")
    assert tag
    assert len(thought) == budget == result.stats.num_thinking
    assert result.stats.num_thinking_forced == len("</think>")


def test_a_budget_far_away_keeps_plain_rounds_running_ahead() -> None:
    own = equality.engine([])
    request = own.submit(OPEN, SamplingParams(thinking_budget=12, max_tokens=30, ignore_eos=True))
    ahead = []
    while not own.is_idle:
        own.step()
        ahead.append(own.pipeline.next is not None)
    assert (request.finish_reason, request.num_generated) == ("length", 30)
    assert all(ahead[:9])
    assert not any(ahead[11:17])
    assert all(ahead[20:27])


@catches(
    "a plain round is launched behind an unread one though the budget may be met there",
    "mlxspec.sampling.row:RowSampler.needs_tokens",
    lambda right: lambda self, width: right(self, width - 1),
    case="after",
)
@pytest.mark.parametrize("budget", range(6), ids=lambda n: f"after {n}" if n else "at once")
def test_a_budget_is_met_exactly_where_plain_rounds_run_ahead_of_the_host(budget: int) -> None:
    """The answer opens its thinking itself, at a token that the host has not read when the next round could be launched."""
    own, asked = equality.engine([], prefix_budget=0), SamplingParams(max_tokens=40, ignore_eos=True, seed=4)
    free = own.generate([5, 6, 7], asked).text
    at = next(i for i in range(6, 15) if free[i] not in free[:i])
    tags = free[at], "#(close)#"
    request = own.submit([5, 6, 7], replace(asked, thinking_budget=budget, thinking_tags=tags))
    num_ahead = 0
    while not own.is_idle:
        own.step()
        num_ahead += own.pipeline.next is not None
    assert (request.finish_reason, request.error) == ("length", None)
    thought = at + 1 + budget
    assert request.answer.text[:thought] == free[:thought]
    assert request.answer.text[thought:].startswith(tags[1])
    assert (request.stats.num_thinking, request.stats.num_thinking_forced) == (budget, len(tags[1]))
    assert num_ahead > 5


# ---- log-probabilities


def test_logprobs_are_the_models_own() -> None:
    params = SamplingParams(
        max_tokens=12, top_logprobs=4, temperature=0.9, seed=8, bad_words=("a",), ignore_eos=True
    )
    result = engine().generate([9, 8, 7], params, spec=spec(*ALL))
    model = tiny_models.target()
    cache_, text = model.make_cache(1), [9, 8, 7, *result.tokens]
    out = model.forward(mx.array(text, mx.int32), FlatRows((len(text),)), cache_, certain=True)
    logits = np.asarray(out.logits, np.float64)
    wanted = (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )
    assert len(result.logprobs) == len(result.tokens)
    for i, (token, found) in enumerate(zip(result.tokens, result.logprobs, strict=True)):
        here = wanted[2 + i]
        assert (found.token, found.data) == (token, chr(32 + token).encode())
        assert math.isclose(found.logprob, here[token], abs_tol=1e-4)
        best = np.argsort(-here)[:4]
        assert [t.token for t in found.top] == best.tolist()
        assert np.allclose([t.logprob for t in found.top], here[best], atol=1e-4)


@cache
def plain_with_logprobs() -> list:
    some, params = asked(top_logprobs=3)
    return [engine().generate(p, s, spec=PLAIN) for p, s in zip(some, params, strict=True)]


@pytest.mark.parametrize("drafters", SETS, ids="+".join)
def test_logprobs_are_the_same_with_drafting(drafters: tuple[str, ...]) -> None:
    some, params = asked(top_logprobs=3)
    without = plain_with_logprobs()
    results = engine().generate(some, params, spec=spec(*drafters))
    for wanted, got in zip(without, results, strict=True):
        if wanted.tokens != got.tokens:
            continue  # a flip at a near tie, which the tests above judge
        for a, b in zip(wanted.logprobs, got.logprobs, strict=True):
            assert (a.token, a.data) == (b.token, b.data)
            assert math.isclose(a.logprob, b.logprob, abs_tol=1e-4)
            assert np.allclose([t.logprob for t in a.top], [t.logprob for t in b.top], atol=1e-4)


def test_events_carry_the_logprobs_of_their_tokens() -> None:
    params = SamplingParams(max_tokens=20, logprobs=True, stop=("q",), seed=1, temperature=1.0)
    events = [
        e for e in engine().stream([1, 2, 3] * 5, params, spec=spec(*ALL)) if isinstance(e, TokensEvent)
    ]
    for event in events:
        assert [p.token for p in event.logprobs] == list(event.tokens)
        assert all(p.top == () for p in event.logprobs)
    silent = engine().stream([1, 2, 3], SamplingParams(max_tokens=3))
    assert all(e.logprobs is None for e in silent if isinstance(e, TokensEvent))


# ---- acceptance


@pytest.mark.slow
def test_the_whole_engine_keeps_the_distribution() -> None:
    """4096 answers of two drafted tokens; the first token comes from the prompt's own forward."""
    rng, size = np.random.default_rng(1), 6
    target = rng.standard_normal((size, size)).astype(np.float32)
    draft = target + rng.standard_normal((size, size)).astype(np.float32)
    model = Table(target)
    drafter = DraftModel(Table(draft), size)
    from mlxspec.config import EngineConfig

    own = Engine(model, None, drafters=[drafter], config=EngineConfig(max_rows=64))
    limits = SpecConfig(drafters=("draft-model",), n_max=2, p_min=0.25)
    params = [SamplingParams(max_tokens=3, temperature=1.0, seed=i) for i in range(4096)]
    results = own.generate([[0]] * len(params), params, spec=limits)
    p = np.exp(target.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    wanted = (p[0][:, None, None] * p[:, :, None] * p[None]).reshape(-1) * len(params)
    counts = np.bincount(
        [(a * size + b) * size + c for a, b, c in (r.tokens for r in results)], minlength=size**3
    )
    chi = ((counts - wanted) ** 2 / wanted).sum()
    free = size**3 - 1
    assert chi < free + 6 * math.sqrt(2 * free)
    stood = sum(r.stats.num_accepted for r in results) / sum(r.stats.num_drafted for r in results)
    assert 0.5 < stood < 0.95


@pytest.mark.parametrize("field", ["acceptance", "draft_sampling"])
def test_another_acceptance_is_refused_with_the_reason(field: str) -> None:
    for value in ("match", "rejection", "shared", 3):
        with pytest.raises(
            ConfigError, match=f"There is no {field} any more: a draft is accepted where it equals the token"
        ):
            SpecConfig(drafters=("mtp",), **{field: value})
        with pytest.raises(ConfigError, match="a seed gives the same text"):
            replace(SpecConfig(), **{field: value})
    assert replace(SpecConfig(), n_max=4) == SpecConfig(n_max=4)
