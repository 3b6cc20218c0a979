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
