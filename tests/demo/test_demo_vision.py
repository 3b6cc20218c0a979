"""The member of the demo family that reads pictures: what it reads, the same text with drafting, and its recorded figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

import mlxspec
from mlxspec import demo
from mlxspec.bench import demo_prompts, demo_runs
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine

GREEDY = SamplingParams(max_tokens=24)
PICTURES = demo_prompts.picture_prompts()
KINDS = json.loads(demo.FIGURES.read_text())["vision"]["kinds"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with mlxspec.load("demo-vision", spec=SpecConfig(policy="fixed")) as found:
        yield found


def test_pictures_are_read_and_drafted_for(engine: Engine) -> None:
    prompts = [demo_runs.asked(engine, p) for p in PICTURES]
    plain = engine.generate(prompts, GREEDY, spec=replace(engine.spec, drafters=()))
    drafted = engine.generate(prompts, GREEDY)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert sum(r.stats.drafters["mtp"].num_accepted for r in drafted) > 0
    assert not any(r.stats.notices for r in drafted)
    right = sum(r.text == p.says for r, p in zip(plain, PICTURES, strict=True))
    assert right >= len(PICTURES) // 2


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=24, temperature=0.8, seed=3)])
def test_every_drafter_and_policy(engine: Engine, params: SamplingParams) -> None:
    prompts = [demo_runs.asked(engine, p) for p in PICTURES]
    plain = [engine.generate(p, params, spec=replace(engine.spec, drafters=())) for p in prompts]
    for policy in ("fixed", "auto"):
        for names in (("mtp",), ("ngram-simple",), ("ngram-simple", "mtp")):
            spec = replace(engine.spec, drafters=names, policy=policy)
            together = engine.generate(prompts, params, spec=spec)
            assert [r.tokens for r in together] == [r.tokens for r in plain]
