"""Whatever is asked for wrongly is one of our errors, in one sentence, and leaves nothing queued."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
from planting import catches

from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.engine.engine import Engine
from mlxspec.errors import ConfigError, ContextOverflowError, MlxspecError
from tests import tiny_models
from tests.engine import equality

pytestmark = pytest.mark.smoke

ABSURD: tuple[Any, ...] = (
    -1,
    -0.5,
    math.nan,
    math.inf,
    -math.inf,
    10**400,
    -(10**400),
    10**5000,
    "12",
    b"1",
    None,
    True,
    [1],
    [None],
    {"a": 1},
    {-1: 1.0},
    {1: math.nan},
    {1: "x"},
    {"1": 1.0},
    object(),
    1 + 2j,
    "",
    (),
    ("",),
    (1,),
    ["x" * 1000],
)


def _strings(value: Any) -> bool:
    return value in ("12", (), ["x" * 1000], {"a": 1}, {"1": 1.0})


# What is no absurdity for these fields
FINE: dict[tuple[type, str], Callable[[Any], bool]] = {
    (SamplingParams, "loop_breaker"): lambda v: v is None,
    (SamplingParams, "seed"): lambda v: v is None,
    (SamplingParams, "stop"): _strings,
    (SamplingParams, "bad_words"): _strings,
    (SamplingParams, "dry_sequence_breakers"): _strings,
    (SamplingParams, "ignore_eos"): lambda v: v is True,
    (SamplingParams, "logprobs"): lambda v: v is True,
    (SamplingParams, "prompt_logprobs"): lambda v: v is True,
    (SamplingParams, "keeps_stop"): lambda v: v is True,
    (SamplingParams, "thinks_first"): lambda v: v is True,
    (SamplingParams, "stop_outside"): lambda v: v == (),
    (SamplingParams, "repeat_last_n"): lambda v: type(v) is int and v in (-1, 0),
    (SamplingParams, "dry_penalty_last_n"): lambda v: type(v) is int and v in (-1, 0),
    (SamplingParams, "allowed_token_ids"): lambda v: v in ((), (1,), [1]),
    (SamplingParams, "stop_token_ids"): lambda v: v in ((), (1,), [1]),
    (SamplingParams, "presence_penalty"): lambda v: type(v) in (int, float) and v in (-1, -0.5),
    (SamplingParams, "frequency_penalty"): lambda v: type(v) in (int, float) and v in (-1, -0.5),
    (SamplingParams, "json_schema"): lambda v: v is None or isinstance(v, (dict, str)),
    (SamplingParams, "regex"): lambda v: v in (None, "12"),
    (SamplingParams, "lark"): lambda v: v in (None, "12"),
    (SamplingParams, "lark_at"): lambda v: v == "",
    (SamplingParams, "thinking_budget"): lambda v: v is None,
    (SamplingParams, "logits_processors"): lambda v: v in ([], ()),
    (SamplingParams, "sampler"): lambda v: v is None,
    (SamplingParams, "adapters"): lambda v: v in ({"a": 1}, {"1": 1.0}),
    (SpecConfig, "drafters"): lambda v: v in ((), {"a": 1}),
    (SpecConfig, "predicted"): lambda v: (
        isinstance(v, str) or (isinstance(v, (list, tuple)) and all(type(t) is int and t >= 0 for t in v))
    ),
    (EngineConfig, "memory_budget"): lambda v: v is None,
    (EngineConfig, "prefill_chunk"): lambda v: v is None,
    (EngineConfig, "prefix_budget"): lambda v: v is None or v == 0,
    (EngineConfig, "prefix_disk"): lambda v: v is None or v == 0,
    (EngineConfig, "past_texts"): lambda v: type(v) is int and v == 0,
    (EngineConfig, "past_texts_disk"): lambda v: v is None or (type(v) is int and v == 0),
    (EngineConfig, "prefix_dir"): lambda v: v is None,
    (SpecConfig, "policy"): lambda v: v is None,
    (SpecConfig, "n_max"): lambda v: v is None,
    (SpecConfig, "owner"): lambda v: isinstance(v, str),
    (SpecConfig, "draft_vocab"): lambda v: v is None or (type(v) is int and v == 0),
    (EngineConfig, "max_context"): lambda v: v is None,
    (EngineConfig, "exact"): lambda v: v is True,
}
CLASSES = (SamplingParams, SpecConfig, EngineConfig)
OPTIONS = [(c, f.name) for c in CLASSES for f in fields(c)]


@cache
def engine() -> Engine:
    return equality.engine()


def is_one_sentence(error: BaseException) -> bool:
    text = str(error)
    return "\n" not in text and len(text) < 300 and text.endswith(".")


@pytest.mark.parametrize(("cls", "name"), OPTIONS, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_absurd_values_of_every_option_are_refused_by_name(cls: type, name: str) -> None:
    for value in ABSURD:
        if FINE.get((cls, name), lambda _: False)(value):
            cls(**{name: value})
            continue
        with pytest.raises(ConfigError) as caught:
            cls(**{name: value})
        assert is_one_sentence(caught.value), caught.value
        if name != "drafters":
            assert name in str(caught.value)


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="n_min"):
        SpecConfig(drafters=("mtp",), n_max=3, n_min=4)
    with pytest.raises(ConfigError, match="n_min"):
        SpecConfig(drafters=("mtp", "draft-model", "ngram-map-k4v"), n_max=3, ngram_m=4, n_min=5)
    SpecConfig(drafters=("mtp", "ngram-simple"), n_max=3, n_min=4)  # n-gram lookup drops no short drafts
    SpecConfig(n_max=3, n_min=4)  # nobody drafts
    with pytest.raises(ConfigError, match="twice"):
        SpecConfig(drafters=("mtp", "mtp"))
    with pytest.raises(ConfigError, match="sampler and temperature"):
        SamplingParams(sampler=len, temperature=0.5)
    with pytest.raises(ConfigError, match="letters"):
        SpecConfig(drafters=("my drafter",))
    with pytest.raises(ConfigError, match=r"mtq was not loaded.*ngram-simple"):
        engine().generate([1], spec=SpecConfig(drafters=("mtq",)))


def test_one_name_is_a_list_of_one() -> None:
    assert SpecConfig(drafters="mtp").drafters == ("mtp",)
    assert SamplingParams(stop="\n").stop == ("\n",)


BAD_PROMPTS: tuple[Any, ...] = (
    "",
    [],
    (),
    [-1],
    [tiny_models.VOCAB],
    [1, 2, 10**400],
    [1, 2, 10**5000],
    [1.0],
    [1, 2.5],
    [None],
    [1, None],
    [True],
    ["1"],
    [[1]],
    b"text",
    bytearray(b"text"),
    None,
    5,
    3.5,
    {"a": 1},
    object(),
)


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda p: str(type(p).__name__))
@pytest.mark.parametrize("how", ["generate", "one of several", "stream", "submit"])
def test_bad_prompts_are_refused_before_anything_is_queued(prompt: Any, how: str) -> None:
    if how == "generate" and prompt in ([["1"]], ["1"], [[1]]):
        return  # a list of good prompts
    call, given = (
        (engine().generate, [[1, 2], prompt]) if how == "one of several" else (getattr(engine(), how), prompt)
    )
    with pytest.raises(ConfigError) as caught:
        call(given)
    assert is_one_sentence(caught.value), caught.value
    assert engine().is_idle


@pytest.mark.parametrize("how", ["generate", "stream", "submit"])
def test_a_prompt_must_leave_room_for_an_answer(how: str) -> None:
    small = equality.engine(max_context=20)
    for length in (20, 21, 500):
        with pytest.raises(ContextOverflowError) as caught:
            getattr(small, how)([1] * length)
        assert (caught.value.num_prompt, caught.value.limit) == (length, 20)
        assert is_one_sentence(caught.value)
        assert small.is_idle
    result = small.generate([1] * 19, SamplingParams(ignore_eos=True))
    assert (len(result.tokens), result.finish_reason) == (1, "length")


def test_a_configured_context_cannot_exceed_the_models() -> None:
    assert equality.engine(max_context=1 << 20).max_context == tiny_models.target().max_context


@pytest.mark.parametrize("number", [0, 1, 3])
def test_lists_must_be_equally_long(number: int) -> None:
    with pytest.raises(ConfigError, match="2 prompts"):
        engine().generate([[1], [2]], [SamplingParams()] * number)
    assert engine().is_idle


@pytest.mark.parametrize("params", [5, "hot", {"temperature": 1}, [None, 3], ["x", "y"]], ids=str)
def test_parameters_must_be_parameters(params: Any) -> None:
    with pytest.raises(ConfigError, match="SamplingParams"):
        engine().generate([[1], [2]], params)
    assert engine().is_idle


def test_options_of_drafting_must_be_that() -> None:
    with pytest.raises(ConfigError, match="SpecConfig"):
        engine().generate([1], spec="mtp")  # type: ignore[arg-type]


def test_a_drafter_that_was_not_loaded_is_refused_with_those_that_were() -> None:
    small = equality.engine([equality.Oracle([])])
    for how in (small.generate, small.stream, small.submit):
        with pytest.raises(ConfigError, match=r"mtp was not loaded.*ngram-simple"):
            how([1], spec=SpecConfig(drafters=("mtp",)))
    with pytest.raises(ConfigError, match="loaded are: suffix"):
        Engine(tiny_models.target(), spec=SpecConfig(drafters=("mtp",)))
    assert small.is_idle


def test_a_bias_on_a_token_the_model_has_not_is_refused() -> None:
    params = SamplingParams(logit_bias={tiny_models.VOCAB: 1.0})
    with pytest.raises(ConfigError, match=str(tiny_models.VOCAB)):
        engine().generate([[1], [2]], [SamplingParams(), params])
    assert engine().is_idle


def test_without_a_tokenizer_there_is_no_text() -> None:
    bare = Engine(tiny_models.target())
    for attempt in (
        lambda: bare.generate("text"),
        lambda: bare.generate([1], SamplingParams(stop="x")),  # would be ignored in silence
        lambda: bare.chat_prompt([{"role": "user", "content": "hi"}]),
    ):
        with pytest.raises(ConfigError):
            attempt()
    assert bare.is_idle
    assert bare.generate([1], SamplingParams(max_tokens=2, ignore_eos=True)).text == ""


def test_without_a_template_there_is_no_chat() -> None:
    with pytest.raises(ConfigError, match="chat template"):
        engine().chat_prompt([{"role": "user", "content": "hi"}])


def test_the_tree_of_errors_has_one_root() -> None:
    assert issubclass(ConfigError, MlxspecError)
    assert issubclass(ContextOverflowError, MlxspecError)


LOADED = SpecConfig(drafters=("ngram-simple",), ngram_n=4, ngram_m=20, ngram_min_hits=2)


@catches(
    "settings of n-gram lookup that a request brings are ignored",
    "mlxspec.engine.request_factory:READ_AT_LOAD",
    lambda right: (),
    case="ngram_n-12]",
)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ngram_n", 12),
        ("ngram_n", 1),
        ("ngram_m", 21),
        ("ngram_min_hits", 3),
        ("draft_vocab", 512),
        ("draft_bits", 8),
        ("draft_kv_bits", 8),
    ],
)
def test_what_drafters_are_made_with_is_no_requests_to_choose(name: str, value: object) -> None:
    """In Python as over HTTP. A request that says nothing of it, or the same, or a shorter draft, is served."""
    engine = Engine(tiny_models.target(), drafters=[ngram_lookup("ngram-simple", 4, 20)], spec=LOADED)
    with pytest.raises(ConfigError, match=f"^{name} cannot be") as caught:
        engine.generate([1, 2], spec=replace(LOADED, **{name: value}))
    assert is_one_sentence(caught.value)
    with pytest.raises(ConfigError, match=f"^{name} cannot be"):
        engine.submit([1, 2], spec=SpecConfig(**{name: value}))
    for fine in (LOADED, SpecConfig(), SpecConfig(drafters=("ngram-simple",)), replace(LOADED, ngram_m=2)):
        assert engine.generate([1, 2], SamplingParams(max_tokens=2), spec=fine).tokens
