"""Same text: Gemma models with each drafter against plain decoding, alone and in ragged batches, windows crossed and wrapped."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlxspec.config import EngineConfig, SpecConfig
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.engine.engine import Engine
from mlxspec.models.gemma import Gemma
from mlxspec.models.gemma_config import GemmaConfig, LayerShape, RotaryShape
from tests import tiny_models
from tests.engine.equality import PLAIN, asked, prompts, same, spec

NUM_ROWS = 4
DRAFTERS = [("ngram-simple",), ("draft-model",), ("ngram-simple", "draft-model")]
_LOCAL = RotaryShape(head_dim=16, theta=1e4, num_pairs=8)
_GLOBAL = RotaryShape(head_dim=32, theta=1e6, num_pairs=4)


def layer(window: int | None, **more) -> LayerShape:
    dim = {"head_dim": 32, "rotary": _GLOBAL} if window is None else {"head_dim": 16, "rotary": _LOCAL}
    return LayerShape(window=window, num_kv_heads=2, intermediate_size=96, **dim, **more)


def config(*layers: LayerShape, **more) -> GemmaConfig:
    sizes = {"vocab_size": tiny_models.VOCAB, "hidden_size": 64, "num_heads": 4, "max_context": 2048}
    return GemmaConfig(layers=layers, scale=0.25, embed_scale=1.0, rms_eps=1e-6, tied=False, **sizes, **more)


_NEW = {"norms_values": True, "scales_layers": True, "softcap": 30.0}
FORMS = {
    "gemma3": config(layer(11), layer(7), layer(None), layer(11)),
    "gemma4-dense": config(layer(11), layer(None, keys_are_values=True), **_NEW),
    "gemma4-e": config(
        layer(9), layer(None), layer(9, source=0), layer(None, source=1), per_layer_size=32, per_layer_vocab=tiny_models.VOCAB, **_NEW
    ),
    "gemma4-moe": config(
        layer(11), layer(None, keys_are_values=True), num_experts=4, num_experts_per_token=2, expert_size=32, **_NEW
    ),
}  # fmt: skip


def make(form: str, drift: float = 0.0, weights: str = "float32") -> Gemma:
    """Decisive and led by the last token, as in tests/tiny_models.py; `drift`: matrices are off by noise of so many parts; `weights`: a key
    of tiny_models.FORMS."""
    model, rng, noise = Gemma(FORMS[form]), np.random.default_rng(3), np.random.default_rng(4)
    filled = []
    for name, value in tree_flatten(model.parameters()):
        if value.ndim == 1:
            new = rng.uniform(0.7, 1.3, value.shape) * (0.3 if ".post_" in name else 1.0)
        else:
            new = rng.normal(0.0, 1.0 if "embed_tokens" in name else value.shape[-1] ** -0.5, value.shape)
            new *= (tiny_models.HEAD_SCALE if "lm_head" in name else 1.0) * (
                1.0 + drift * noise.standard_normal(value.shape)
            )
        filled.append((name, mx.array(new.astype(np.float32))))  # fmt: skip
    model.update(tree_unflatten(filled))
    tiny_models.finish(model, weights)
    return model


@cache
def engine(form: str, weights: str = "float32") -> Engine:
    target, draft = make(form, weights=weights), make(form, drift=0.1, weights=weights)
    drafters = [ngram_lookup("ngram-simple", 2, 12), DraftModel(draft, target.vocab_size)]
    loaded = SpecConfig(drafters=tuple(d.name for d in drafters), ngram_n=2)
    config = EngineConfig(prefill_chunk=32)
    return Engine(target, tiny_models.tokenizer(), drafters=drafters, spec=loaded, config=config)


@pytest.mark.parametrize(
    ("form", "weights"),
    [
        ("gemma4-e", "float32"),
        ("gemma4-dense", "bfloat16"),
        *(pytest.param(form, "float32", marks=pytest.mark.slow) for form in FORMS if form != "gemma4-e"),
        *(
            pytest.param(form, weights, marks=pytest.mark.slow)
            for form in FORMS
            for weights in tiny_models.FORMS
            if weights != "float32" and (form, weights) != ("gemma4-dense", "bfloat16")
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
        what, wish = "+".join(drafters), spec(*drafters, ngram_n=2)
        check(run.generate(some, params, spec=wish), f"{what}, rows together")
        if drafters == DRAFTERS[-1]:
            check([run.generate(p, s, spec=wish) for p, s in zip(some, params, strict=True)], what)
    for name, (drafted, accepted) in seen.items():
        # else equal texts prove little; but lookups in a random model's text are seldom right
        assert accepted < drafted or (name == "ngram-simple" and not drafted), (
            f"{name}: {accepted} of {drafted}"
        )
        assert accepted > 0 or name == "ngram-simple", f"{name}: {accepted} of {drafted}"
    assert len(seen) == 2
