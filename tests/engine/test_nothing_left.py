"""A place where no token is possible ends its request with one sentence; what leaves no first token is refused; other rows go on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

from mlxspec.config import SamplingParams
from mlxspec.engine.engine import Engine, Result
from mlxspec.errors import ConfigError, GrammarError
from mlxspec.sampling import loops
from mlxspec.sampling.round import NO_TOKEN_LEFT, RoundRow, sample
from mlxspec.sampling.row import RowSampler
from tests import tiny_models
from tests.engine import equality
from tests.models.metal_graph import as_on_metal, blank, launches

A, B, END = 33, 34, tiny_models.VOCAB - 1  # of the tiny tokenizer: "A", "B", the token that ends an answer
PROMPT = [5, 40, *[A] * 12]  # lookups draft A
OTHERS = (
    SamplingParams(max_tokens=12, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=1.0, seed=4),
)


def forbids(num: int):  # type: ignore[no-untyped-def]
    """A logits processor that leaves A alone, and nothing behind num tokens of the answer."""

    def processor(tokens, logits):  # type: ignore[no-untyped-def]
        is_left = (mx.arange(logits.shape[-1]) == A) & (int(tokens.shape[0]) < len(PROMPT) + num)
        return mx.where(is_left, logits, -mx.inf)

    return processor


def careless(logprobs: mx.array) -> mx.array:
    """A caller's sampler that takes the first token whatever it is given."""
    return mx.array([A]) if mx.isfinite(logprobs[0, A]).item() else mx.array([0])


WAYS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "words": ({"allowed_token_ids": (A,), "bad_words": ("AAAA",)}, [A] * 3),
    "bias": ({"allowed_token_ids": (A,), "logit_bias": {A: -1e9, B: 1e9}, "bad_words": ("AAAA",)}, [A] * 3),
    "grammar": ({"allowed_token_ids": (A,), "regex": "AAAB"}, [A] * 3),
    "least": ({"allowed_token_ids": (A, END), "bad_words": ("AAAA",), "min_tokens": 9}, [A] * 3),
    "processor": ({"logits_processors": [forbids(3)]}, [A] * 3),
    "processor and words": ({"logits_processors": [forbids(9)], "bad_words": ("AAAA",)}, [A] * 3),
    "penalties": ({"allowed_token_ids": (A,), "bad_words": ("AAAA",), "presence_penalty": 2.0}, [A] * 3),
}
DRAWN: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 3},
    "top-k": {"temperature": 1.0, "top_k": 5, "seed": 3},
    "filters": {
        "temperature": 0.8,
        "top_p": 0.9,
        "typical_p": 0.5,
        "xtc_probability": 1.0,
        "top_n_sigma": 1.0,
        "seed": 3,
    },
    "own sampler": {"sampler": careless},
}


@pytest.fixture(scope="module")
def tiny() -> Engine:
    return equality.engine(prefix_budget=0)


@catches(
    "nobody looks whether a token is left",
    "mlxspec.sampling.sampler:possible",
    lambda right: lambda logits, chosen: chosen,
    case="words",
)
@catches(
    "nobody looks at what a logits processor leaves",
    "mlxspec.sampling.sampler:possible",
    lambda right: lambda logits, chosen: chosen,
    case="left[processor-",
)
@pytest.mark.parametrize("drafters", [(), equality.ALL], ids=["plain", "drafted"])
@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("way", WAYS)
def test_a_row_ends_where_nothing_is_left(
    tiny: Engine, way: str, drawn: str, drafters: tuple[str, ...]
) -> None:
    asked, said = WAYS[way]
    params = SamplingParams(**{"max_tokens": 12, **asked, **DRAWN[drawn]})
    spec = equality.spec(*drafters)
    result = tiny.generate(PROMPT, params, spec=spec)
    rows = [tiny.submit(PROMPT, p, spec=spec) for p in (OTHERS[0], params, OTHERS[1])]
    while not tiny.is_idle:
        tiny.step()
    beside = [Result.of(row) for row in rows]
    for found in (result, beside[1]):
        assert list(found.tokens) == said
        assert (found.finish_reason, found.error) == ("error", NO_TOKEN_LEFT)
        assert not drafters or found.stats.num_rounds <= 2  # it was inside a draft, or behind one
    for row, other in zip((beside[0], beside[2]), OTHERS, strict=True):
        assert row.tokens == tiny.generate(PROMPT, other, spec=spec).tokens
        assert row.error is None


@catches(
    "what leaves no first token is taken",
    "mlxspec.sampling.row:RowSampler._check_beginning",
    lambda right: lambda self: None,
)
@pytest.mark.parametrize(
    "asked",
    [
        {"allowed_token_ids": (A,), "bad_words": ("A",)},
        {"allowed_token_ids": (A,), "bad_words": ("A",), "temperature": 1.0},
        {"allowed_token_ids": (END,), "min_tokens": 5},
        {"allowed_token_ids": (60,), "regex": "[a-b]+"},
        {"bad_words": tuple(chr(c) for c in range(32, 127)), "min_tokens": 1},
    ],
    ids=["words", "words, drawn", "end", "grammar", "all words"],
)
def test_what_leaves_no_first_token_is_refused(tiny: Engine, asked: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, GrammarError), match="No token may begin the answer"):
        tiny.generate(PROMPT, SamplingParams(max_tokens=8, **asked))
    assert tiny.is_idle


THINKS = [ord(letter) - 32 for letter in "why? <think>"]


@catches(
    "a closing tag is forced whose tokens may not come",
    "mlxspec.sampling.constraints:_forbids",
    lambda right: lambda thinking, params: None,
)
def test_a_closing_tag_that_may_not_come_is_not_forced(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor by the loop breaker: closing would leave nothing and end the request."""
    monkeypatch.setattr(loops, "LEAST", 24)
    asked = SamplingParams(max_tokens=64 + loops.DELAY + 16, allowed_token_ids=(A,), ignore_eos=True)
    found = tiny.generate(THINKS, asked)
    assert (found.finish_reason, set(found.tokens), found.stats.num_loops) == ("length", {A}, 0)
    ended = tiny.generate(THINKS, replace(asked, loop_breaker="all"))
    assert (ended.finish_reason, len(ended.tokens), ended.stats.num_loops) == ("length", loops.EVERY, 1)
    with pytest.raises(ConfigError, match="thinking_budget and allowed_token_ids"):
        tiny.generate(THINKS, replace(asked, thinking_budget=5))
    with pytest.raises(ConfigError, match="thinking_budget and bad_words"):
        tiny.generate(THINKS, SamplingParams(max_tokens=8, thinking_budget=5, bad_words=("zz", "/think")))
    tag = tuple(ord(letter) - 32 for letter in "</think>")
    closed = tiny.generate(THINKS, replace(asked, thinking_budget=5, allowed_token_ids=(A, *tag)))
    assert closed.error is None
    assert closed.text[5:].startswith("</think>")


@catches(
    "a forced tag completes a bad word",
    "mlxspec.sampling.constraints:_both",
    lambda right: lambda one, other: other if one is None or other is not None else one,
)
def test_a_bad_word_is_not_completed_by_a_forced_tag(tiny: Engine) -> None:
    """What is thought ends as the word begins, so nothing is left where the tag must come."""
    params = SamplingParams(max_tokens=20, thinking_budget=3, logit_bias={A: 100.0}, ignore_eos=True)
    said = tiny.generate(THINKS, params)
    assert said.text.startswith("AAA</think>")
    found = tiny.generate(THINKS, replace(params, bad_words=("A<",)))
    assert (list(found.tokens), found.finish_reason, found.error) == ([A] * 3, "error", NO_TOKEN_LEFT)


def test_a_first_token_that_is_left_is_taken(tiny: Engine) -> None:
    for asked in (
        {"allowed_token_ids": (A, B), "bad_words": ("A",)},
        {"allowed_token_ids": (65,), "regex": "a+"},
    ):
        result = tiny.generate(PROMPT, SamplingParams(max_tokens=3, **asked))
        assert set(result.tokens) == {asked["allowed_token_ids"][-1]}
        assert result.error is None
    ended = tiny.generate(PROMPT, SamplingParams(max_tokens=3, allowed_token_ids=(END,)))
    assert (ended.tokens, ended.finish_reason) == ((), "stop")


def test_looking_launches_nothing_where_nothing_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a whole choice at Qwen3.5's vocabulary: as many as without looking; two more where something is forbidden."""
    vocab = 248_320

    def kernels(**asked: Any) -> int:
        row = RoundRow(
            sampler=RowSampler(SamplingParams(**asked), [1], vocab),
            length=9,
            history=lambda: np.zeros(0, np.int32),
            num_drafted=3,
        )
        with as_on_metal(monkeypatch):
            tokens, logits = mx.zeros((4,), mx.int32), blank((4, vocab), mx.bfloat16)
            return launches(sample([row], tokens, logits).arrays).total()

    with monkeypatch.context() as patch:
        patch.setattr("mlxspec.sampling.sampler.possible", lambda logits, chosen: chosen)
        unwatched = [kernels(), kernels(temperature=0.7, top_k=20), kernels(logit_bias={3: 1.0})]
    watched = [kernels(), kernels(temperature=0.7, top_k=20), kernels(logit_bias={3: 1.0})]
    print(f"\nkernels: unwatched {unwatched}, watched {watched}")
    assert watched[:2] == unwatched[:2]
    assert watched[2] <= unwatched[2] + 2
    assert unwatched[0] <= 3
