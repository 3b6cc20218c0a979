"""Gemma models over prompts with images: whoever drafts, and under each policy, the text is that of plain decoding."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from mlxspec.drafters.gemma_assistant import GemmaAssistant
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.engine.engine import Engine
from tests import families
from tests.engine.test_images_drafted import NGRAMS, Case
from tests.engine.test_images_gemma import BLOCKS, draft_model, engine


def drafting(form: str, **config) -> tuple[Engine, tuple[str, ...]]:  # type: ignore[no-untyped-def]
    """An engine with every drafter of the family, and their names."""
    lookups = [
        ngram_lookup("ngram-simple", 2, 12),
        ngram_lookup("ngram-map-k", 2, 8, 1),
        ngram_lookup("ngram-map-k4v", 2, 8, 1),
    ]
    found = engine(form, [*lookups, draft_model(form)], **config)
    if form == "gemma3":  # for which no assistant is published
        return found, (*NGRAMS, "draft-model")
    assistant = GemmaAssistant(families.make_assistant(found.model), found.max_context)
    return engine(form, [*lookups, draft_model(form), assistant], **config), (*NGRAMS, "draft-model", "mtp")


@pytest.mark.slow
@pytest.mark.parametrize("form", BLOCKS)
@pytest.mark.parametrize("policy", ["fixed", "auto"])
def test_every_drafter_and_policy_gives_the_plain_text(form: str, policy: str) -> None:
    run, names = drafting(form, prefill_chunk=24)
    plain = engine(form, [], prefix_budget=0)
    for name in names:
        counts: Counter[str] = Counter()
        for number in range(3):
            counts += Case(number, name, policy, axes=False).play(run, plain)
        assert counts["cached"] > 0
        if policy == "fixed":
            assert counts[name] > 0, name


@pytest.mark.parametrize(
    ("form", "number"),
    [("gemma4-dense", 1), *(pytest.param(f, n, marks=pytest.mark.slow) for f in BLOCKS for n in range(4))],
)
def test_random_rows_and_drafters_give_the_plain_text(form: str, number: int) -> None:
    chunk = int(np.random.default_rng(number).choice([16, 23, 512]))
    run, names = drafting(form, prefill_chunk=chunk)
    Case(number, among=names, axes=False).play(run, engine(form, [], prefix_budget=0))
