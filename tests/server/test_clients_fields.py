"""Fields that clients send under names of their own, and what they ask for beside tools."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import mlxspec.demo
from mlxspec import SamplingParams, load
from mlxspec.server import chat_api
from mlxspec.server.chat_api import ChatCompletionRequest
from mlxspec.server.errors import BadField
from mlxspec.server.prompt import Context
from tests.server import readers
from tests.server.serving import QUESTION, Served

USER = {"role": "user", "content": QUESTION}
SCHEMA = {
    "type": "object",
    "properties": {"z": {"type": "boolean"}},
    "required": ["z"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "o", "schema": SCHEMA}}


def tool(name: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    ("asked", "template", "budget"),
    [
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 64}}, {"enable_thinking": True}, 64),
        ({"thinking": {"type": "auto"}}, {}, None),
        ({"reasoning": {"effort": "low", "exclude": True}}, {"reasoning_effort": "low"}, None),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}, None),
        ({"reasoning": {"max_tokens": 9}}, {}, 9),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none", "enable_thinking": False}, None),
    ],
)
def test_thinking_as_other_servers_clients_ask_for_it(
    asked: dict[str, Any], template: dict[str, Any], budget: int | None
) -> None:
    body = {"messages": [USER], **asked}
    assert readers.notices(ChatCompletionRequest, body) == []
    form = readers.chat_form(body)
    assert chat_api.conversation(form).template == template
    assert form.thinking_budget == budget  # type: ignore[attr-defined]


def test_forms_that_contradict_each_other_are_one_sentence() -> None:
    for more in (
        {"thinking": {"type": "disabled"}, "enable_thinking": True},
        {"reasoning": {"effort": "low"}, "reasoning_effort": "high"},
    ):
        with pytest.raises(BadField, match="contradict each other"):
            readers.chat({"messages": [USER], **more})


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "ns/f:" + "x" * 80}}]
)
def test_a_required_call_beside_a_format_is_a_call_of_a_tool_with_any_name(demo: Served, choice: Any) -> None:
    name = "ns/f:" + "x" * 80
    body = {
        "messages": [USER],
        "tools": [tool(name)],
        "tool_choice": choice,
        "response_format": FORMAT,
        "max_tokens": 120,
    }
    status, answer = demo.post("/v1/chat/completions", body)
    assert status == 200, answer
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == name
    assert any("response_format is for answers of text" in n for n in answer["mlxspec"]["notices"])


def test_a_custom_tool_in_chat_completions_is_called_with_its_text(demo: Served) -> None:
    custom = {"type": "custom", "custom": {"name": "patch", "description": "apply it"}}
    body = {
        "messages": [USER],
        "tools": [custom],
        "tool_choice": {"type": "custom", "custom": {"name": "patch"}},
        "max_tokens": 60,
    }
    status, answer = demo.post("/v1/chat/completions", body)
    assert status == 200, answer
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert (call["type"], call["custom"]["name"]) == ("custom", "patch")
    chunks, _, is_done = demo.stream("/v1/chat/completions", body)
    (streamed,) = [
        d for c in chunks for choice in c["choices"] for d in choice["delta"].get("tool_calls", ())
    ]
    assert is_done
    assert streamed["custom"] == call["custom"]


def test_models_tell_codex_their_context(demo: Served) -> None:
    demo.chat(max_tokens=1)
    answer = json.loads(demo.ask("GET", "/v1/models")[2])
    (model,) = answer["models"]
    assert model["context_window"] == answer["data"][0]["context_length"]


def test_tokens_of_a_prediction_count_whoever_drafted_them(demo: Served) -> None:
    text = demo.chat(max_tokens=40, temperature=0)["choices"][0]["message"]["content"]
    for more in ({}, {"draft": "ngram-simple", "policy": "fixed"}, {"draft": "off"}):
        answer = demo.chat(
            max_tokens=40, temperature=0, prediction={"type": "content", "content": text}, **more
        )
        assert answer["choices"][0]["message"]["content"] == text
        told = answer["usage"]["completion_tokens_details"]
        assert told["accepted_prediction_tokens"] >= answer["usage"]["completion_tokens"] - 2, more
        assert told["rejected_prediction_tokens"] <= 2


def test_no_time_to_keep_a_model_unloads_it() -> None:
    with Served("--model", "demo") as served:
        status, answer = served.post(
            "/api/chat", {"messages": [USER], "stream": False, "options": {"num_predict": 2}}
        )
        assert (status, answer["done"]) == (200, True)
        status, answer = served.post("/api/generate", {"keep_alive": 0})
        assert (status, answer["done_reason"]) == (200, "unload")
        assert served.post("/api/chat", {"messages": []})[1]["done_reason"] == "load"
        ask = {"messages": [USER], "stream": False, "options": {"num_predict": 2}, "keep_alive": "0s"}
        assert served.post("/api/chat", ask)[0] == 200
        assert served.settle()["mlxspec_model_loads_total"] == 2
        served.settle()
        assert served.chat(max_tokens=1)
        assert served.settle()["mlxspec_model_loads_total"] == 3


@pytest.mark.parametrize("syntax", ["lark", "regex"])
def test_a_custom_tools_grammar_holds_where_its_call_is_required(demo: Served, syntax: str) -> None:
    definition = {
        "lark": 'start: "begin" LF ("x" LF) ("x" LF)? "end"\n%import common.LF\n',
        "regex": r"begin\n(x\n){1,2}end",
    }[syntax]
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    body = {
        "input": "x",
        "tools": [{"type": "custom", "name": "patch", "format": form}],
        "max_output_tokens": 90,
    }
    status, answer = demo.post("/v1/responses", {**body, "tool_choice": {"type": "custom", "name": "patch"}})
    assert status == 200, answer
    (call,) = [item for item in answer["output"] if item["type"] == "custom_tool_call"]
    told = [n for n in answer["mlxspec"]["notices"] if "not enforced" in n]
    assert re.fullmatch(r"begin\n(x\n){1,2}end", call["input"])  # the demo writes calls as JSON
    assert told == []


def test_a_custom_tools_grammar_that_json_cannot_hold_is_named(demo: Served) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start? ")"'}
    body = {
        "input": "x",
        "tools": [{"type": "custom", "name": "patch", "format": form}],
        "max_output_tokens": 1,
    }
    status, answer = demo.post("/v1/responses", body)
    assert status == 200, answer
    assert any("one regular expression" in n for n in answer["mlxspec"]["notices"])


@pytest.mark.parametrize(("opens", "knows"), [(True, False), (False, False), (False, True)])
def test_thinking_that_is_off_is_off_or_a_notice_says_why(tmp_path: Path, opens: bool, knows: bool) -> None:
    """Whether the template opens thinking in any case, leaves it to the model, or knows the variable."""
    folder = tmp_path / "demo"
    shutil.copytree(Path(mlxspec.demo.__file__).parent / "target", folder)
    answer = "<|im_start|>assistant\n" + ("<think>\n" if opens else "")
    if knows:
        answer += "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{# </think> #}"
    (folder / "chat_template.jinja").write_text(
        f"{turns}{{% if add_generation_prompt %}}{answer}{{% endif %}}"
    )
    engine = load(folder, draft="off")
    at = Context(engine=engine, defaults=SamplingParams())
    body = {"messages": [USER], "max_tokens": 2}
    job, _ = chat_api.read(readers.chat_form({**body, "enable_thinking": False}), at)
    assert job.rendered.endswith("<think>\n\n</think>\n\n") is (opens or knows)
    assert not job.form.opens_thinking(job.rendered)
    told = [n for n in job.notices if "turned off" in n or "does not know it" in n]
    assert len(told) == (not knows)
    plain, _ = chat_api.read(readers.chat_form(body), at)
    assert plain.form.opens_thinking(plain.rendered) is opens
