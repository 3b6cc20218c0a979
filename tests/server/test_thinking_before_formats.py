"""A format, or a required call, on a model whose template lets the model open thinking: it may think, and the format begins behind it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mlxspec.demo
from mlxspec.engine.request import NOT_BEGUN
from tests.server.serving import Served

SCHEMA = {
    "type": "object",
    "properties": {"z": {"type": "boolean"}},
    "required": ["z"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FORMATS: dict[str, dict[str, Any]] = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "o", "schema": SCHEMA}}},
    "call": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo model with a template that knows thinking and does not open it."""
    made = tmp_path_factory.mktemp("models") / "demo"
    shutil.copytree(Path(mlxspec.demo.__file__).parent / "target", made)
    template = made / "chat_template.jinja"
    template.write_text(
        template.read_text() + "{% if enable_thinking is defined %}{% endif %}{# <think> </think> #}"
    )
    with Served("--model", str(made), "--max-rows", "4") as served:
        yield served


@pytest.mark.parametrize("name", FORMATS)
def test_the_model_may_think_before_a_format(hybrid: Served, name: str) -> None:
    first = hybrid.post("/tokenize", {"content": "<think>"})[1]["tokens"][0]
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60, **FORMATS[name]}
    for more, thinks in (
        ({"logit_bias": {str(first): 100}, "thinking_budget": 4}, True),
        ({"logit_bias": {str(first): 100}, "enable_thinking": False}, False),
    ):
        status, answer = hybrid.post("/v1/chat/completions", {**body, **more})
        assert status == 200, answer
        message = answer["choices"][0]["message"]
        assert bool(message.get("reasoning_content")) is thinks, message
        text = message["tool_calls"][0]["function"]["arguments"] if name == "call" else message["content"]
        assert set(json.loads(text)) == {"z"}


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_that_thinks_up_to_its_limit_says_what_did_not_begin(hybrid: Served, name: str) -> None:
    first = hybrid.post("/tokenize", {"content": "<think>"})[1]["tokens"][0]
    body = {"messages": [{"role": "user", "content": "x"}], **FORMATS[name], "logit_bias": {str(first): 100}}
    for more, notices in (
        ({"max_tokens": 12}, [NOT_BEGUN]),
        ({"max_tokens": 2, "enable_thinking": False}, []),  # the format itself is cut
    ):
        status, answer = hybrid.post("/v1/chat/completions", {**body, **more})
        assert status == 200, answer
        assert answer["choices"][0]["finish_reason"] == "length"
        assert [n for n in answer["mlxspec"]["notices"] if n == NOT_BEGUN] == notices
