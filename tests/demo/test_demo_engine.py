"""The shipped family through the engine: the answers are those of the training network, with drafting and without."""

from __future__ import annotations

import json

import pytest

import mlxspec
from mlxspec import demo
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    return mlxspec.load("demo", spec=SpecConfig(policy="fixed"))


@pytest.mark.parametrize("drafting", [False, True], ids=["plain", "drafting"])
def test_greedy_answers_are_those_recorded_in_training(engine: Engine, drafting: bool) -> None:
    items = json.loads(demo.workload("ask").read_text())["items"][:3]
    prompts = [engine.chat_prompt(item["messages"]) for item in items]
    params = SamplingParams(temperature=0.0, max_tokens=96)
    results = engine.generate(prompts, params, spec=None if drafting else SpecConfig())
    assert [r.text for r in results] == [item["greedy"] for item in items]


def test_an_edit_is_drafted_from_its_prompt(engine: Engine) -> None:
    item = json.loads(demo.workload("edit").read_text())["items"][1]
    params = SamplingParams(temperature=0.0, max_tokens=200)
    prompt = engine.chat_prompt(item["messages"])
    drafted, plain = (engine.generate(prompt, params, spec=s) for s in (None, SpecConfig()))
    assert drafted.text == plain.text
    assert drafted.text.startswith("```python\n")


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_a_drafter_of_layers_is_loaded_by_name_and_agrees_with_the_target(name: str) -> None:
    """The share of its first tokens that are accepted is real: that of a drafter that was fed wrongly is below 5 %."""
    made = mlxspec.load(
        "demo", draft=name, draft_model=f"demo-{name}", spec=SpecConfig(policy="fixed", n_max=3)
    )
    item = json.loads(demo.workload("explain").read_text())["items"][0]
    params = SamplingParams(temperature=0.0, max_tokens=64)
    prompt = made.chat_prompt(item["messages"])
    plain, drafted = (made.generate(prompt, params, spec=s) for s in (SpecConfig(), None))
    assert drafted.tokens == plain.tokens
    tried, accepted = drafted.stats.drafters[name].by_position[0]
    assert tried >= 5
    assert accepted > 0.5 * tried
