"""Same text: Qwen3.5 models of every kind with each drafter against plain decoding, alone and in ragged batches. The dense untied hybrid
has tests of its own (tests/engine/test_equality.py); here are experts, and attention in other places."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from mlxspec.config import EngineConfig
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.mtp import Mtp
from mlxspec.drafters.ngram_simple import NgramSimple
from mlxspec.engine.engine import Engine
from tests import tiny_models
from tests.engine.equality import PLAIN, asked, prompts, same, spec

NUM_ROWS = 3
DRAFTERS = [("ngram-simple",), ("mtp",), ("draft-model",), ("ngram-simple", "mtp", "draft-model")]
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_token": 2,
    "expert_size": 32,
    "shared_expert_size": 32,
    "intermediate_size": 0,
}
FORMS = {
    "moe": replace(tiny_models.config((True, False, True)), **_EXPERTS),
    "moe-attention-first": replace(tiny_models.config((False, True)), **_EXPERTS, norm_topk=False),
    "attention-only": tiny_models.config((False, False)),
}


@cache
def engine(form: str, weights: str) -> Engine:
    c = FORMS[form]
    model, draft = (tiny_models.make(c, drift=drift, form=weights) for drift in (0.0, 0.1))
    drafters = [
        NgramSimple(2, 12),
        Mtp(tiny_models.make_mtp(c, model, form=weights), model.max_context),
        DraftModel(draft, model.vocab_size),
    ]
    return Engine(model, tiny_models.tokenizer(), drafters=drafters, config=EngineConfig(prefill_chunk=32))


@pytest.mark.parametrize(
    ("form", "weights"),
    [
        ("moe", "float32"),
        *(pytest.param(f, "float32", marks=pytest.mark.slow) for f in FORMS if f != "moe"),
        *(
            pytest.param(f, weights, marks=pytest.mark.slow)
            for f in ("moe", "moe-attention-first")
            for weights in tiny_models.FORMS
            if weights != "float32"
        ),
    ],
)
def test_drafted_text_is_plain_text(form: str, weights: str) -> None:
    run = engine(form, weights)
    some, params = prompts(NUM_ROWS, 1), asked(1, NUM_ROWS)
    plain = [run.generate(p, s, spec=PLAIN) for p, s in zip(some, params, strict=True)]
    seen: dict[str, list[int]] = {}

    def check(results: list, what: str) -> None:
        for prompt, asked_for, wanted, got in zip(some, params, plain, results, strict=True):
            same(wanted, got, prompt, asked_for, f"{form}, {weights}, {what}", run.model)
            assert not got.stats.notices, got.stats.notices
            for name, did in got.stats.drafters.items():
                counts = seen.setdefault(name, [0, 0])
                counts[0], counts[1] = counts[0] + did.num_drafted, counts[1] + did.num_accepted

    check(run.generate(some, params, spec=PLAIN), "rows together")
    for drafters in DRAFTERS:
        what = "+".join(drafters)
        alone = [
            run.generate(p, s, spec=spec(*drafters, ngram_n=2)) for p, s in zip(some, params, strict=True)
        ]
        check(alone, what)
        check(run.generate(some, params, spec=spec(*drafters, ngram_n=2)), f"{what}, rows together")
    for name, (drafted, accepted) in seen.items():
        # else equal texts prove little; but lookups in a random model's text are seldom right
        assert accepted < drafted or (name == "ngram-simple" and not drafted), (
            f"{name}: {accepted} of {drafted}"
        )
        assert accepted > 0 or name == "ngram-simple", f"{name}: {accepted} of {drafted}"
    assert {"mtp", "draft-model"} <= set(seen)
