"""`tool_choice` of the type allowed_tools: the model is told of all tools, and only some may be called."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxspec.parsers.formats import ChatFormat, ToolStyle
from mlxspec.parsers.pieces import CallArguments, CallStart, Content, Reasoning, merged
from mlxspec.server.chat_api import ChatCompletionRequest
from mlxspec.server.errors import BadField
from mlxspec.server.forms.base import review
from mlxspec.server.responses_api import ResponsesRequest
from tests.server import readers
from tests.server.serving import Served

NAMES = ("read", "write", "list_all")
PARAMETERS = {"type": "object", "properties": {"q": {"enum": ["a"]}}, "required": ["q"]}
FUNCTIONS = [{"name": name, "parameters": PARAMETERS} for name in NAMES]
NESTED = [{"type": "function", "function": function} for function in FUNCTIONS]
FLAT = [{"type": "function", **function} for function in FUNCTIONS]
CALLS: dict[ToolStyle, str] = {
    "json": '<tool_call>\n{"name": "NAME", "arguments": {"q": "a"}}\n</tool_call>',
    "xml": "<tool_call>\n<function=NAME>\n<parameter=q>\na\n</parameter>\n</function>\n</tool_call>",
    "gemma4": '<|tool_call>call:NAME{q:<|"|>a<|"|>}<tool_call|>',
    "function-gemma": "<start_function_call>call:NAME{q:<escape>a<escape>}<end_function_call>",
}


def chat_choice(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def response_choice(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": [*tools, {"type": "web_search"}]}


@pytest.mark.parametrize("style", CALLS)
@pytest.mark.parametrize("length", [1, 3, 1000])
def test_a_call_of_another_tool_is_text(style: ToolStyle, length: int) -> None:
    """In pieces of every length: nothing is lost, and what is allowed is a call."""
    other, own = CALLS[style].replace("NAME", "write"), CALLS[style].replace("NAME", "read")
    for tools in (NESTED[:1], NESTED[:1] + NESTED[2:]):
        parser = ChatFormat(tools=style).parser("", tools)
        text = f"Well. {other}\n{own}"
        pieces = [p for i in range(0, len(text), length) for p in parser.push(text[i : i + length])]
        pieces = merged([*pieces, *parser.finish()])
        assert "".join(p.text for p in pieces if isinstance(p, Content)).startswith(f"Well. {other}")
        assert [p.name for p in pieces if isinstance(p, CallStart)] == ["read"]
        arguments = "".join(p.text for p in pieces if isinstance(p, CallArguments))
        assert json.loads(arguments) == {"q": "a"}
        assert not any(isinstance(p, Reasoning) for p in pieces)


def test_both_forms_say_the_same() -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "tools": NESTED}
    for mode in ("auto", "required"):
        chat = {**body, "tool_choice": chat_choice(mode, "read", "write")}
        response = {"input": "x", "tools": FLAT, "tool_choice": response_choice(mode, "read", "write")}
        assert readers.notices(ChatCompletionRequest, chat) == []
        assert readers.notices(ResponsesRequest, response) == []
        found, other = readers.chat(chat), readers.responses(response)
        assert found.tool_choice == other.tool_choice
        assert found.tool_choice is not None
        assert found.tool_choice.kind == mode
        assert [t["function"]["name"] for t in found.tool_choice.of(found.tools)] == ["read", "write"]
        assert len(found.tools) == len(other.tools) == 3


def test_tools_of_a_namespace_are_allowed_by_their_own_names() -> None:
    space = {"type": "namespace", "name": "docs", "tools": FLAT}
    request = readers.responses(
        {"input": "x", "tools": [space], "tool_choice": response_choice("auto", "read")}
    )
    assert request.tool_choice is not None
    assert request.tool_choice.allowed == ("docs__read",)


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools is missing."),
        (chat_choice("auto"), "tool_choice.allowed_tools.tools must have at least 1 item."),
        (chat_choice("none", "read"), "tool_choice.allowed_tools.mode must be one of auto, required."),
    ],
)
def test_a_choice_that_is_none_is_one_sentence(choice: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadField) as found:
        review(ChatCompletionRequest, {"messages": [{"role": "user", "content": "x"}], "tool_choice": choice})
    assert str(found.value) == sentence


def test_a_required_call_is_of_an_allowed_tool(thinker: Served) -> None:
    """Whatever the model would call: each tool alone, then two of three. The prompt is that of a request without a choice."""
    ask = [{"role": "user", "content": "x"}]
    chat: dict[str, Any] = {"messages": ask, "tools": NESTED, "enable_thinking": False, "max_tokens": 60}
    response = {"input": "x", "tools": FLAT, "enable_thinking": False, "max_output_tokens": 60}
    _, plain = thinker.post("/v1/chat/completions", {**chat, "max_tokens": 1})
    for names in (*((name,) for name in NAMES), NAMES[1:]):
        status, answer = thinker.post(
            "/v1/chat/completions", {**chat, "tool_choice": chat_choice("required", *names)}
        )
        assert status == 200, answer
        called = {c["function"]["name"] for c in answer["choices"][0]["message"]["tool_calls"]}
        assert called <= set(names)
        assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
        status, answer = thinker.post(
            "/v1/responses", {**response, "tool_choice": response_choice("required", *names)}
        )
        assert status == 200, answer
        assert {item["name"] for item in answer["output"]} <= set(names)
        assert answer["tool_choice"]["mode"] == "required"


def test_tools_that_are_not_there_are_one_sentence(thinker: Served) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": NESTED, "max_tokens": 2}
    for choice, sentence in (
        (chat_choice("auto", "read", "delete"), "There is no tool 'delete'."),
        (chat_choice("required", "delete"), "There is no tool 'delete'."),
    ):
        status, answer = thinker.post("/v1/chat/completions", {**body, "tool_choice": choice})
        assert (status, answer["error"]["message"]) == (400, sentence)
        assert answer["error"]["param"] == "tool_choice"
    only_search = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}
    status, answer = thinker.post("/v1/responses", {"input": "x", "tools": FLAT, "tool_choice": only_search})
    assert (status, answer["error"]["message"]) == (400, "tool_choice allows none of the tools.")
