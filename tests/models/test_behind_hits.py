"""Behind a prefix hit a tiny Gemma assistant and a tiny block drafter are right as often as in a cold run, from memory and from files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mlxspec.config import EngineConfig, SamplingParams
from mlxspec.drafters.base import Drafter
from mlxspec.drafters.dflash import DFlashDrafter
from mlxspec.drafters.gemma_assistant import GemmaAssistant
from mlxspec.engine.engine import Engine
from tests import families, tiny_models
from tests.engine.behind_hits import Counted, Turn, check, measure
from tests.engine.test_prefix import words

SAMPLED = SamplingParams(seed=3, max_tokens=40, ignore_eos=True)
Made = tuple[object, Drafter]


def engines(make: Callable[[], Made]) -> Callable[[EngineConfig], Engine]:
    def engine(config: EngineConfig) -> Engine:
        model, drafter = make()
        config = replace(config, prefill_chunk=32)
        return Engine(model, tiny_models.tokenizer(), drafters=[drafter], config=config)  # type: ignore[arg-type]

    return engine


def assistant() -> Made:
    """Right often, but not always."""
    target = families.target("gemma4-dense")
    return target, GemmaAssistant(families.make_assistant(target), target.max_context)


def block_drafter() -> Made:
    """Of random weights: right by the noise that it shares with the target, where that outweighs logits."""
    target = tiny_models.target()
    return target, DFlashDrafter(tiny_models.make_dflash(target), target.max_context)


@pytest.mark.parametrize(
    ("name", "made", "temperature"),
    [("mtp", assistant, 0.7), pytest.param("dflash", block_drafter, 8.0, marks=pytest.mark.slow)],
)
def test_tiny_drafters(tmp_path: Path, name: str, made: Callable[[], Made], temperature: float) -> None:
    turns = [Turn(words(90, seed), words(12, seed + 50)) for seed in range(4)]
    params = replace(SAMPLED, temperature=temperature)
    assert check(measure(engines(made), name, turns, params, tmp_path), least=100) == ""


def test_what_falls_short_is_said() -> None:
    good = Counted(200, 100, 0)
    figures = {"cold": good, "memory": Counted(200, 97, 90), "disk": Counted(200, 100, 90)}
    assert check(figures, least=200) == ""
    for store, counted in (
        ("memory", Counted(200, 95, 90)),
        ("disk", Counted(200, 100, 0)),
        ("cold", Counted(199, 100, 0)),
        ("cold", Counted(200, 0, 0)),
    ):
        assert store in check(figures | {store: counted}, least=200)
