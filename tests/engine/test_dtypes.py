"""The same text in what people run: 16 bits and quantized weights, with every drafter, policy and kind of request.

Every test runs plain decoding and drafting with one model, and compares tokens, text and log-probabilities. A drafter that ends by an
error is a failure: no result may have a notice. Quantized models multiply packed weights here (mx.quantized_matmul), as on a GPU; loading
one on a CPU would unpack it. The fast tier has a slice; the slow tier has all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import gpu_rounding
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlxspec
from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
from mlxspec.drafters.base import Ask, Draft
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.eagle3 import Eagle3
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.drafters.mtp import Mtp
from mlxspec.engine.engine import Engine, Result
from mlxspec.models.head_rows import HeadRows
from tests import tiny_models
from tests.engine import equality
from tests.engine.equality import PLAIN, prompts, same, spec
from tests.tiny_models import FORMS

MODELS = ("mtp", "eagle3", "dflash", "draft-model")
NGRAMS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v")
DRAFTERS = [*((name,) for name in (*MODELS, *NGRAMS, "own")), (*NGRAMS, "own", *MODELS)]
POLICIES: dict[str, dict] = {
    "fixed": {},
    "p_min": {"n_max": 6, "p_min": 0.3},
    "n_min": {"n_max": 6, "p_min": 0.5, "n_min": 2},
    "deep": {"n_max": 12, "ngram_m": 16},  # wider than what a CPU's float32 recurrence takes step by step
    "auto": {"policy": "auto"},
}
REQUESTS: tuple[dict, ...] = (
    {},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.15, "logit_bias": {5: 4.0}},
)
NUM_ROWS = len(REQUESTS)
LISTED = range(
    30, 70
)  # ids that models propose, besides those of the text, where they read only some rows of the head
LISTING = [("mtp",), ("dflash",), ("draft-model",), (*NGRAMS, *MODELS)]
FAST = {  # (form, drafters, policy) in the fast tier
    ("bfloat16", DRAFTERS[-1], "auto"),
    ("bfloat16", ("own",), "p_min"),
    ("bfloat16", ("mtp",), "fixed"),
    ("bfloat16", ("dflash",), "p_min"),
    ("4bit", ("dflash",), "p_min"),
    ("float16", ("mtp",), "deep"),
    ("4bit", ("mtp",), "p_min"),
    ("bfloat16", ("eagle3",), "fixed"),
    ("4bit", ("eagle3",), "p_min"),
}
FAST_LISTING = {
    ("bfloat16", ("mtp",), "fixed"),
    ("bfloat16", ("mtp",), "p_min"),
    ("bfloat16", ("draft-model",), "p_min"),
    ("4bit", LISTING[-1], "auto"),
}


class Own(equality.Oracle):
    """A drafter of the user's: right with a probability, on the device, with confidences in the model's dtype."""

    name = "own"

    def __init__(self, form: str) -> None:
        super().__init__([], sure=0.8)
        self._dtype = FORMS[form].dtype

    def learn(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = [list(t) for t in texts]

    def propose(self, asks: Sequence[Ask], sampler) -> list[Draft]:
        drafts = super().propose(asks, sampler)
        return [
            Draft(d.length, mx.array(d.tokens, mx.int32), mx.full((d.length,), 0.75, self._dtype))
            if d.length
            else d
            for d in drafts
        ]


@cache
def engine(form: str, *, exact: bool = False, lists: bool = False) -> Engine:
    """lists: drafters that run a model propose from the rows LISTED of their head; rows of floats are kept in 4 bits."""
    model, small, own = tiny_models.target(form), tiny_models.echo(form=form), Own(form)
    block = equality.Nudged(
        tiny_models.dflash(form=form), model.max_context, head_rows=_rows(model) if lists else None
    )
    drafters = [
        Mtp(tiny_models.mtp_head(form), model.max_context, _rows(model) if lists else None),
        Eagle3(tiny_models.eagle3(form), model.max_context),
        DraftModel(small, model.vocab_size, _rows(small) if lists else None),
        ngram_lookup("ngram-simple", 3, 12),
        ngram_lookup("ngram-map-k", 2, 8, 1),
        ngram_lookup("ngram-map-k4v", 2, 8, 1),
        block,
        own,
    ]
    made = equality.engine(drafters, form, exact=exact, prefix_budget=0)
    for told in (own, block):
        told.learn([[*p, *r.tokens] for p, r in zip(requests()[0], plain(form), strict=True)])
    return made


def _rows(model: tiny_models.Qwen35) -> HeadRows:
    return HeadRows(model.head_module, LISTED, model.vocab_size, bits=4, capped=model.capped)


@cache
def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    params = [
        SamplingParams(max_tokens=12 + 5 * i, seed=i, ignore_eos=True, top_logprobs=2, **asked)
        for i, asked in enumerate(REQUESTS)
    ]
    return prompts(NUM_ROWS, 2), params


@cache
def plain(form: str) -> list[Result]:
    made = equality.engine([], form, prefix_budget=0)
    return [made.generate(p, s, spec=PLAIN) for p, s in zip(*requests(), strict=True)]


def check(form: str, results: Sequence[Result], what: str) -> None:
    model = tiny_models.target(form)
    for prompt, params, wanted, got in zip(*requests(), plain(form), results, strict=True):
        assert not got.stats.notices, f"{form}, {what}: {got.stats.notices}"
        same(wanted, got, prompt, params, f"{form}, {what}", model)
        if equality.keeps_bits(model):
            assert got.logprobs == wanted.logprobs, f"{form}, {what}"


def drafting(names: tuple[str, ...], policy: str) -> SpecConfig:
    return spec(*names, **POLICIES[policy])


def marked(form: str, names: tuple[str, ...], policy: str, among: set = FAST):
    fast = (form, names, policy) in among
    return pytest.param(
        form, names, policy, id=f"{form}-{'+'.join(names)}-{policy}", marks=[] if fast else [pytest.mark.slow]
    )


@pytest.mark.parametrize(
    ("form", "names", "policy"), [marked(f, n, p) for f in FORMS for n in DRAFTERS for p in POLICIES]
)
def test_drafted_text_is_plain_text(form: str, names: tuple[str, ...], policy: str) -> None:
    made, asked = engine(form), drafting(names, policy)
    what = f"{'+'.join(names)}, {policy}"
    some, params = requests()
    check(form, made.generate(some, params, spec=asked), f"{what}, rows together")
    alone = [made.generate(p, s, spec=asked) for p, s in zip(some, params, strict=True)]
    check(form, alone, f"{what}, alone")
    if policy in ("fixed", "deep") and names[-1] in (*MODELS, "own"):
        did = [d for r in alone for d in r.stats.drafters.values()]
        assert sum(d.num_accepted for d in did) > 0  # else equal texts prove little


@pytest.mark.parametrize(
    ("form", "names", "policy"),
    [marked(f, n, p, FAST_LISTING) for f in FORMS for n in LISTING for p in POLICIES],
)
def test_texts_are_the_same_where_models_propose_from_some_rows(
    form: str, names: tuple[str, ...], policy: str
) -> None:
    made, asked = engine(form, lists=True), drafting(names, policy)
    what = f"{'+'.join(names)}, {policy}, some rows"
    some, params = requests()
    check(form, made.generate(some, params, spec=asked), f"{what}, rows together")
    alone = [made.generate(p, s, spec=asked) for p, s in zip(some, params, strict=True)]
    check(form, alone, f"{what}, alone")
    if policy in ("fixed", "deep"):
        did = [r.stats.drafters[n] for r in alone for n in names if n in MODELS and n in r.stats.drafters]
        assert 0 < sum(d.num_accepted for d in did) < sum(d.num_drafted for d in did)


@pytest.mark.parametrize(
    "form", [pytest.param(f, marks=[] if f == "4bit" else [pytest.mark.slow]) for f in FORMS]
)
def test_a_grammar_where_models_propose_from_some_rows(form: str) -> None:
    made, prompt = engine(form, lists=True), requests()[0][1]
    for asked in (
        {"regex": "[a-f]{3,20}(x|yz)*", "temperature": 0.8},
        {"bad_words": ("a",), "ignore_eos": True},
    ):
        params = SamplingParams(max_tokens=16, seed=3, **asked)
        wanted = made.generate(prompt, params, spec=PLAIN)
        got = made.generate(prompt, params, spec=spec(*MODELS, p_min=0.2))
        assert not got.stats.notices
        assert (got.tokens, got.text) == (wanted.tokens, wanted.text), f"{form}, {list(asked)}"


@pytest.mark.parametrize(
    "form", [pytest.param(f, marks=[] if f == "bfloat16" else [pytest.mark.slow]) for f in FORMS]
)
def test_turns_of_a_conversation(form: str) -> None:
    """The prefix store hands on what the model and its drafters know; plain and drafted conversations stay the same."""
    model = tiny_models.target(form)
    for params in (requests()[1][0], requests()[1][1]):
        talks = [
            (equality.engine(form=form), how) for how in (PLAIN, spec("mtp"), spec("draft-model", "mtp"))
        ]
        text = prompts(1, 5)[0]
        for turn in range(3):
            wanted, *drafted = [made.generate(text, params, spec=how) for made, how in talks]
            for got in drafted:
                assert not got.stats.notices
                assert got.stats.num_cached == wanted.stats.num_cached
                same(wanted, got, text, params, f"{form}, turn {turn}", model)
                if got.tokens != wanted.tokens:
                    return
            assert turn == 0 or wanted.stats.num_cached > 0
            text = [*text, *wanted.tokens, *prompts(1, 6 + turn)[0]]


@pytest.mark.parametrize(
    "form", [pytest.param(f, marks=[] if f == "bfloat16" else [pytest.mark.slow]) for f in FORMS]
)
def test_a_grammar_and_callables(form: str) -> None:
    """What must see tokens or logits on the host, in any dtype."""

    def doubled(tokens: mx.array, logits: mx.array) -> mx.array:
        return mx.array(2.0 * np.asarray(logits))  # numpy cannot read 16-bit logits

    def least_surprising(logprobs: mx.array) -> mx.array:
        return mx.array(int(np.asarray(logprobs).argmax()))

    made, prompt = engine(form), requests()[0][1]
    for asked in (
        {"regex": "[a-f]{3,20}(x|yz)*", "temperature": 0.8},
        {"logits_processors": (doubled,), "ignore_eos": True},
        {"sampler": least_surprising, "ignore_eos": True},
        {"bad_words": ("a",), "ignore_eos": True},
    ):
        params = SamplingParams(max_tokens=16, seed=3, **asked)
        wanted = made.generate(prompt, params, spec=PLAIN)
        got = made.generate(prompt, params, spec=spec(*MODELS, p_min=0.2))
        assert not got.stats.notices
        assert wanted.finish_reason != "error"
        assert (got.tokens, got.text) == (wanted.tokens, wanted.text), f"{form}, {list(asked)}"


@pytest.mark.parametrize(
    "form", [pytest.param(f, marks=[] if f == "4bit" else [pytest.mark.slow]) for f in FORMS]
)
def test_exact_gives_the_bits_of_plain_decoding(form: str) -> None:
    """Every text is that of the same engine without drafting, with no excuse. In 16 bits so are log-probabilities, bit for bit, and drafts
    are still verified. In float32 the BLAS may round otherwise at another length of context than the probe's."""
    keeps = equality.keeps_bits(tiny_models.target(form))
    made = engine(form, exact=True)
    alone = [made.generate(p, s, spec=PLAIN) for p, s in zip(*requests(), strict=True)]
    for names in (("mtp",), DRAFTERS[-1]):
        results = made.generate(*requests(), spec=drafting(names, "deep"))
        results += [
            made.generate(p, s, spec=drafting(names, "deep")) for p, s in zip(*requests(), strict=True)
        ]
        for wanted, got in zip(2 * alone, results, strict=True):
            assert (got.tokens, got.text) == (wanted.tokens, wanted.text)
            if keeps:
                assert got.logprobs == wanted.logprobs
    if keeps:
        assert made.stats.probe is not None
        assert made.stats.probe.exact_width >= 9
        assert any(r.stats.num_accepted for r in results)


@pytest.mark.parametrize(
    "form",
    [pytest.param(f, marks=[] if f in ("bfloat16", "4bit", "nvfp4") else [pytest.mark.slow]) for f in FORMS],
)
def test_widths_keep_the_bits_of_16_bits_on_a_cpu(form: str) -> None:
    """The recurrence runs step by step at every width, and MLX's own 16-bit and quantized products do not depend on the number of rows."""
    if FORMS[form].dtype == mx.float32 or mx.default_device() != mx.Device(mx.cpu) or gpu_rounding.IS_PLANTED:
        pytest.skip("float32 products are the BLAS's, a GPU's kernels are chosen by width")
    made = engine(form)
    assert made.probe((2, 5, 9, 17)).is_exact


def test_a_trained_model_keeps_its_bits_in_16_bits_on_a_cpu() -> None:
    """The demo shows what random weights hide: with the recurrence all at once, float16 logits differ from 5 tokens on."""
    if mx.default_device() != mx.Device(mx.cpu) or gpu_rounding.IS_PLANTED:
        pytest.skip("a GPU's kernels are chosen by width")
    made = mlxspec.load("demo", dtype="float16", draft="mtp")
    assert made.probe((4, 5, 9, 17)).is_exact


@pytest.mark.parametrize("form", FORMS)
def test_packed_weights_stay_packed(form: str) -> None:
    """What the tests above call quantized multiplies packed weights, the embedding and the head's own included."""
    packed = [
        m
        for m in tiny_models.target(form).modules()
        if isinstance(m, (nn.QuantizedLinear, nn.QuantizedEmbedding))
    ]
    assert bool(packed) == bool(FORMS[form].bits)
    assert {(m.bits, m.group_size, m.mode) for m in packed} <= {tuple(FORMS[form][1:])}
    assert tiny_models.target(form).dtype == FORMS[form].dtype


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_the_demo_drafts_with_its_head_in_16_bits(dtype: str) -> None:
    made = mlxspec.load("demo", dtype=dtype, draft="mtp", config=EngineConfig(prefix_budget=0))
    for params in (
        SamplingParams(max_tokens=24, ignore_eos=True),
        SamplingParams(max_tokens=24, temperature=0.8, seed=1),
    ):
        wanted = made.generate("def main():\n", params, spec=PLAIN)
        for how in (
            spec("mtp"),
            spec("mtp", p_min=0.3),
            spec("mtp", policy="auto"),
        ):
            got = made.generate("def main():\n", params, spec=how)
            assert not got.stats.notices
            same(wanted, got, made.tokenizer.encode("def main():\n"), params, dtype, made.model)
            if how.policy == "fixed":  # auto may find, on a busy machine, that drafts do not pay
                assert got.stats.drafters["mtp"].num_calls > 0
                assert got.stats.drafters["mtp"].num_accepted > 0
