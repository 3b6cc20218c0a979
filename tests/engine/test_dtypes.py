"""16 bits and quantized weights: texts and log-probabilities bit for bit where widths change none, and weights that stay packed.

Quantized models multiply packed weights here (mx.quantized_matmul), as on a GPU; loading one on a CPU would unpack it. That drafted text is
plain text in every form is shown by random requests (test_random_requests.py).
"""

from __future__ import annotations

from functools import cache

import gpu_rounding
import mlx.core as mx
import mlx.nn as nn
import pytest

import mlxspec
from mlxspec.config import EngineConfig, SamplingParams
from tests import engines, tiny_models
from tests.engine import equality
from tests.engine.equality import PLAIN, prompts, same, spec
from tests.tiny_models import FORMS

REQUESTS: tuple[dict, ...] = (
    {},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.15, "logit_bias": {5: 4.0}},
)
NUM_ROWS = len(REQUESTS)


@cache
def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    params = [
        SamplingParams(max_tokens=12 + 5 * i, seed=i, ignore_eos=True, top_logprobs=2, **asked)
        for i, asked in enumerate(REQUESTS)
    ]
    return prompts(NUM_ROWS, 2), params


@pytest.mark.parametrize(
    "form", [pytest.param(f, marks=[] if f == "4bit" else [pytest.mark.slow]) for f in FORMS]
)
def test_exact_gives_the_bits_of_plain_decoding(form: str) -> None:
    """Every text is that of the same engine without drafting, with no excuse. In 16 bits so are log-probabilities, bit for bit, and drafts
    are still verified. In float32 the BLAS may round otherwise at another length of context than the probe's."""
    keeps = equality.keeps_bits(tiny_models.target(form))
    drafters = engines.made_drafters(tiny_models.target(form), "hybrid", form)
    made = equality.engine(drafters, form, exact=True, prefix_budget=0)
    alone = [made.generate(p, s, spec=PLAIN) for p, s in zip(*requests(), strict=True)]
    for drafter in drafters:
        if isinstance(drafter, (equality.Nudged, equality.Oracle)):
            drafter.learn([[*p, *r.tokens] for p, r in zip(requests()[0], alone, strict=True)])
    for names in (("mtp",), tuple(made.drafts.drafters)):
        results = made.generate(*requests(), spec=spec(*names, n_max=12, ngram_m=16))
        results += [
            made.generate(p, s, spec=spec(*names, n_max=12, ngram_m=16))
            for p, s in zip(*requests(), strict=True)
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
    made = equality.engine([], form)
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
