"""What the server sends, read by the published models of OpenAI's, Anthropic's and Ollama's own packages, with strict checks.

The packages themselves read leniently: they build objects without checking them. Here each body and each event of a stream is validated
strictly by the class that its package has for it: no required field is missing, no value is outside its enumeration or of another type,
and a field that the class does not know is one of ours that are documented.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from tests.server.serving import QUESTION, Served
from tests.server.stream_grammar import named_events
from tests.server.test_sdk import SCHEMA, TOOLS

pytestmark = pytest.mark.filterwarnings("ignore")

USER = {"role": "user", "content": QUESTION}
QUIET = {"enable_thinking": False}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"name": "x", "full": true, "kind": "class"}}\n</tool_call>'
CALLS: dict[str, str] = {
    "a call of its own will": f"start: {json.dumps(CALL)}",
    "text and a call": f"start: {json.dumps('I look. ' + CALL)}",
    "two calls": f"start: {json.dumps(CALL + chr(10) + CALL)}",
    "thinking and a call": f"start: {json.dumps(CALL)}",
}
# fields beyond those of the reference APIs
# Fields that the packages' classes do not have: ours, and `store`, which the reference API sends too.
_REASONING = {
    f"choices.*.{part}.{name}" for part in ("delta", "message") for name in ("reasoning", "reasoning_content")
}
OURS = {
    "chat": {"timings", "mlxspec", *_REASONING},
    "completions": {"timings", "mlxspec"},
    "responses": {"timings", "mlxspec", "store"},
    # a call's name stands in the class of openai 2
    "responses.event": {"response.timings", "response.mlxspec", "response.store", "name"},
    "messages": {"timings", "mlxspec"},
    "ollama": set(),  # its classes drop what they do not know
}


def classes(union: Any) -> dict[str, type[BaseModel]]:
    """The classes of a union by the value of their field `type`."""
    if typing.get_origin(union) is typing.Annotated:
        union = typing.get_args(union)[0]
    found = {}
    for one in typing.get_args(union):
        for name in typing.get_args(one.model_fields["type"].annotation):
            found[name] = one
    return found


def extras(value: Any, path: str = "") -> Iterator[str]:
    """Paths of fields that the classes do not know; `*` for a place in a list."""
    if isinstance(value, BaseModel):
        for name in value.model_extra or {}:
            yield f"{path}{name}"
        for name in type(value).model_fields:
            yield from extras(getattr(value, name), f"{path}{name}.")
    elif isinstance(value, list):
        for each in value:
            yield from extras(each, f"{path}*.")


def check(kind: Any, data: bytes | str, api: str) -> Any:
    found = TypeAdapter(kind).validate_json(data, strict=True)
    assert set(extras(found)) <= OURS[api], set(extras(found)) - OURS[api]
    return found


def posted(served: Served, path: str, body: dict[str, Any]) -> bytes:
    status, headers, data = served.ask("POST", path, body)
    assert status == 200, data
    assert ("text/event-stream" in headers["content-type"]) == (
        body.get("stream") is True and path[1:4] == "v1/"
    )
    return data


def data_lines(data: bytes) -> list[str]:
    blocks = [b for b in data.decode().split("\n\n") if b.startswith("data: ") and b != "data: [DONE]"]
    return [block[6:] for block in blocks]


# --- Chat Completions, completions, models

FORM = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
REQUIRED = {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 120}
CHATS: dict[str, dict[str, Any]] = {
    "text": QUIET,
    "thinking": {"thinking_budget": 4},
    "only thinking": {"max_tokens": 3},
    "a required call": {**QUIET, **REQUIRED},
    "a named call": {**QUIET, **REQUIRED, "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
    "tools that are not called": {**QUIET, "tools": TOOLS, "tool_choice": "auto"},
    **{name: {**QUIET, "tools": TOOLS, "lark": lark, "max_tokens": 150} for name, lark in CALLS.items()},
    "thinking and a call": {"tools": TOOLS, "lark": CALLS["two calls"], "thinking_budget": 4, "max_tokens": 200},
    "a cut call": {**QUIET, **REQUIRED, "max_tokens": 14},
    "a schema": {**QUIET, "response_format": FORM, "max_tokens": 100},
    "any object": {**QUIET, "response_format": {"type": "json_object"}, "max_tokens": 20},
    "three answers": {**QUIET, "n": 3, "temperature": 1.5, "seed": 5},
    "a stop": {**QUIET, "stop": ["path"]},
    "logprobs": {**QUIET, "logprobs": True, "top_logprobs": 2},
    "logprobs of a call": {**QUIET, **REQUIRED, "logprobs": True},
    "nothing": {**QUIET, "lark": 'start: "x"', "stop": ["x"]},
    "developer and tier": {**QUIET, "messages": [{"role": "developer", "content": "Be short."}, USER], "service_tier": "auto"},
}  # fmt: skip


@pytest.mark.parametrize("name", CHATS)
def test_chat_completions(thinker: Served, name: str) -> None:
    chat = pytest.importorskip("openai.types.chat", reason="the openai package is not installed")
    body = {"model": "demo", "messages": [USER], "max_tokens": 8, **CHATS[name]}
    whole = check(chat.ChatCompletion, posted(thinker, "/v1/chat/completions", body), "chat")
    assert whole.usage is not None
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    lines = data_lines(posted(thinker, "/v1/chat/completions", streamed))
    chunks = [check(chat.ChatCompletionChunk, line, "chat") for line in lines]
    assert chunks[-1].usage is not None
    ends = {c.index: c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason}
    assert ends == {c.index: c.finish_reason for c in whole.choices}


@pytest.mark.parametrize(
    "more",
    [{}, {"logprobs": 2}, {"n": 2, "temperature": 1.5}, {"echo": True}, {"stop": ["\n"]}, {"regex": "[ab]{2}"}],
    ids=str,
)  # fmt: skip
def test_completions(thinker: Served, more: dict[str, Any]) -> None:
    types = pytest.importorskip("openai.types", reason="the openai package is not installed")
    body = {"model": "demo", "prompt": "def main():", "max_tokens": 6, **more}
    check(types.Completion, posted(thinker, "/v1/completions", body), "completions")
    for line in data_lines(posted(thinker, "/v1/completions", {**body, "stream": True})):
        told = json.loads(line)
        for choice in told[
            "choices"
        ]:  # null until the end, as the reference API sends it and the class has it not
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        check(types.Completion, json.dumps(told), "completions")


# --- Responses

FUNCTION = {"type": "function", "strict": False, **TOOLS[0]["function"]}
MUST = {
    "tools": [FUNCTION],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_output_tokens": 120,
}
RESPONSES: dict[str, dict[str, Any]] = {
    "text": QUIET,
    "thinking": {"thinking_budget": 4},
    "only thinking": {"max_output_tokens": 3},
    "a summary": {"thinking_budget": 4, "reasoning": {"effort": "low", "summary": "auto"}},
    "sealed thinking": {"thinking_budget": 4, "include": ["reasoning.encrypted_content"], "store": False},
    "a required call": {**QUIET, **MUST},
    "a named call": {**QUIET, **MUST, "tool_choice": {"type": "function", "name": "look_up"}},
    **{name: {**QUIET, "tools": [FUNCTION], "lark": lark, "max_output_tokens": 150} for name, lark in CALLS.items()},
    "thinking and a call": {"tools": [FUNCTION], "lark": CALLS["two calls"], "thinking_budget": 4, "max_output_tokens": 200},
    "a cut call": {**QUIET, **MUST, "max_output_tokens": 14},
    "a schema": {
        **QUIET, "text": {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}},
        "max_output_tokens": 100,
    },
    "what was asked": {
        **QUIET, "instructions": "Be short.", "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.9,
        "truncation": "disabled", "prompt_cache_key": "k", "safety_identifier": "s", "tools": [FUNCTION], "tool_choice": "none",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RESPONSES)
def test_responses(thinker: Served, name: str) -> None:
    types = pytest.importorskip("openai.types.responses", reason="the openai package is not installed")
    body = {"model": "demo", "input": QUESTION, "max_output_tokens": 8, **RESPONSES[name]}
    whole = check(types.Response, posted(thinker, "/v1/responses", body), "responses")
    known = classes(types.ResponseStreamEvent)
    events = []
    for name, told in named_events(posted(thinker, "/v1/responses", {**body, "stream": True})):
        events.append(check(known[name], json.dumps(told), "responses.event"))
    assert events[-1].type == f"response.{whole.status}"
    assert [item.type for item in events[-1].response.output] == [item.type for item in whole.output]


def test_models_and_counts(thinker: Served) -> None:
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")
    for headers, kind in (
        ({}, openai.types.Model),
        ({"anthropic-version": "2023-06-01"}, anthropic.types.ModelInfo),
    ):
        listed = json.loads(thinker.ask("GET", "/v1/models", headers=headers)[2])
        assert listed["object"] == "list"
        for model in listed["data"]:
            kind.model_validate_json(json.dumps(model), strict=True)
            one = thinker.ask("GET", f"/v1/models/{model['id']}", headers=headers)[2]
            kind.model_validate_json(one, strict=True)
    counted = posted(thinker, "/v1/messages/count_tokens", {"model": "demo", "messages": [USER]})
    anthropic.types.MessageTokensCount.model_validate_json(counted, strict=True)
    counted = posted(thinker, "/v1/responses/input_tokens", {"model": "demo", "input": "hi"})
    openai.types.responses.InputTokenCountResponse.model_validate_json(counted, strict=True)


# --- Messages

TOOL = {"name": "look_up", "description": "Look up.", "input_schema": TOOLS[0]["function"]["parameters"]}
OFF = {"thinking": {"type": "disabled"}}
ONE = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 150}
MESSAGES: dict[str, dict[str, Any]] = {
    "text": OFF,
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 4}},
    "only thinking": {"max_tokens": 3},
    "thinking that is not shown": {"thinking": {"type": "adaptive", "display": "omitted"}, "max_tokens": 4},
    "a required call": {**OFF, **ONE},
    "a named call": {**OFF, **ONE, "tool_choice": {"type": "tool", "name": "look_up"}},
    **{name: {**OFF, "tools": [TOOL], "lark": lark, "max_tokens": 150} for name, lark in CALLS.items()},
    "thinking and a call": {
        "tools": [TOOL], "lark": CALLS["two calls"], "thinking": {"type": "enabled", "budget_tokens": 4}, "max_tokens": 200,
    },
    "a cut call": {**OFF, **ONE, "max_tokens": 14},
    "a schema": {**OFF, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 120},
    "a stop": {**OFF, "stop_sequences": ["path"]},
    "nothing": {**OFF, "lark": 'start: "x"', "stop_sequences": ["x"]},
    "cache marks": {
        **OFF, "system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
        "metadata": {"user_id": "u"}, "service_tier": "auto",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(thinker: Served, name: str) -> None:
    types = pytest.importorskip("anthropic.types", reason="the anthropic package is not installed")
    body = {"model": "demo", "messages": [USER], "max_tokens": 8, **MESSAGES[name]}
    whole = check(types.Message, posted(thinker, "/v1/messages", body), "messages")
    known = classes(types.RawMessageStreamEvent)
    read = []
    for event, told in named_events(posted(thinker, "/v1/messages", {**body, "stream": True})):
        if event != "ping":
            read.append(check(known[event], json.dumps(told), "messages"))
    starts = [e.content_block.type for e in read if e.type == "content_block_start"]
    assert starts == [block.type for block in whole.content]
    (end,) = (e for e in read if e.type == "message_delta")
    assert end.delta.stop_reason == whole.stop_reason


# --- Ollama

OLLAMA: dict[str, dict[str, Any]] = {
    "text": {"think": False},
    "thinking": {"think": True, "options": {"thinking_budget": 4, "num_predict": 12}},
    **{
        name: {"think": False, "tools": TOOLS, "options": {"lark": lark, "num_predict": 150}}
        for name, lark in CALLS.items()
    },
    "a schema": {"think": False, "format": SCHEMA, "options": {"num_predict": 100}},
    "json": {"think": False, "format": "json"},
    "a stop": {"think": False, "options": {"stop": ["path"], "num_predict": 20}},
}


@pytest.mark.parametrize("name", OLLAMA)
def test_ollama(thinker: Served, name: str) -> None:
    ollama = pytest.importorskip("ollama", reason="the ollama package is not installed")
    more = {"options": {"num_predict": 8}, **OLLAMA[name]}
    body = {"model": "demo", "messages": [USER], **more}
    whole = check(ollama.ChatResponse, posted(thinker, "/api/chat", {**body, "stream": False}), "ollama")
    lines = posted(thinker, "/api/chat", body).decode().splitlines()
    parts = [check(ollama.ChatResponse, line, "ollama") for line in lines]
    assert "".join(p.message.content or "" for p in parts) == whole.message.content
    assert parts[-1].done_reason == whole.done_reason
    if "tools" not in more:
        prompt = {"model": "demo", "prompt": QUESTION, **more}
        check(
            ollama.GenerateResponse, posted(thinker, "/api/generate", {**prompt, "stream": False}), "ollama"
        )
        for line in posted(thinker, "/api/generate", prompt).decode().splitlines():
            check(ollama.GenerateResponse, line, "ollama")


def test_what_ollama_tells_of_models(thinker: Served) -> None:
    ollama = pytest.importorskip("ollama", reason="the ollama package is not installed")
    check(ollama.ListResponse, thinker.ask("GET", "/api/tags")[2], "ollama")
    check(ollama.ShowResponse, posted(thinker, "/api/show", {"model": "demo"}), "ollama")
