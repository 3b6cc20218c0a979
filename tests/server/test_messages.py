"""Anthropic's Messages: the `anthropic` SDK against the demo server, what becomes of a conversation, and errors in the API's form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from planting import catches, rewritten

from mlxspec.server.errors import ApiError, BadField
from mlxspec.server.job_run import Progress
from mlxspec.server.messages_api import MessagesWriter, without_volatile
from tests.server import readers
from tests.server.jobs import one_answer
from tests.server.serving import LONG, QUESTION, Served
from tests.server.stream_grammar import MessagesGrammar, named_events
from tests.server.test_sdk import SCHEMA, TOOLS

USER = {"role": "user", "content": QUESTION}
BODY: dict[str, Any] = {"model": "demo", "max_tokens": 12, "messages": [USER]}
TOOL = {"name": "look_up", "description": "Look up.", "input_schema": TOOLS[0]["function"]["parameters"]}
BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"


@pytest.fixture
def sdk(thinker: Served) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")
    base = thinker.base.removesuffix("/v1")
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0, timeout=LONG) as made:
        yield made


@pytest.mark.filterwarnings("ignore")
def test_the_sdk(sdk: Any) -> None:
    messages: list[Any] = [USER]
    quiet: Any = {"type": "disabled"}
    whole = sdk.messages.create(model="demo", max_tokens=24, messages=messages, thinking=quiet)
    assert (whole.type, whole.role, whole.stop_reason) == ("message", "assistant", "max_tokens")
    assert whole.usage.output_tokens == 24
    assert whole.timings["predicted_n"] == 24
    assert whole.mlxspec["drafters"]
    with sdk.messages.stream(model="demo", max_tokens=24, messages=messages, thinking=quiet) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == 24
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == (
        whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    )
    asked: Any = {"type": "tool", "name": "look_up", "disable_parallel_tool_use": True}
    called = sdk.messages.create(
        model="demo", max_tokens=150, messages=messages, tools=[TOOL], tool_choice=asked, thinking=quiet
    )
    assert called.stop_reason == "tool_use"
    assert set(called.content[-1].input) == {"name", "full", "kind"}
    turns = [
        *messages,
        {"role": "assistant", "content": called.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": called.content[-1].id, "content": "Joins."}],
        },
    ]
    after = sdk.messages.create(model="demo", max_tokens=4, messages=turns, tools=[TOOL], thinking=quiet)
    assert after.usage.output_tokens == 4
    thought = sdk.messages.create(
        model="demo", max_tokens=60, messages=messages, thinking={"type": "enabled", "budget_tokens": 6}
    )
    assert [b.type for b in thought.content] == ["thinking", "text"]
    assert thought.content[0].signature
    again = [*messages, {"role": "assistant", "content": thought.content}, USER]
    assert sdk.messages.create(model="demo", max_tokens=2, messages=again).usage.output_tokens == 2
    wanted: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    shaped = sdk.messages.create(
        model="demo", max_tokens=150, messages=messages, output_config=wanted, thinking=quiet
    )
    assert set(json.loads(shaped.content[-1].text)) == set(SCHEMA["properties"])
    stopped = sdk.messages.create(
        model="demo", max_tokens=24, messages=messages, stop_sequences=["zzz", "path"], thinking=quiet
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "path")
    counted = sdk.messages.count_tokens(model="demo", messages=messages, thinking=quiet)
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


@pytest.mark.filterwarnings("ignore")
def test_the_sdk_lists_models(sdk: Any) -> None:
    import anthropic

    (found,) = sdk.models.list().data
    anthropic.types.ModelInfo.model_validate_json(found.model_dump_json(), strict=True)
    assert sdk.models.retrieve(found.id) == found


@pytest.mark.filterwarnings("ignore")
def test_the_sdk_knows_the_errors(sdk: Any) -> None:
    import anthropic

    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* > 2048 maximum"):
            sdk.messages.create(
                model="demo",
                max_tokens=1,
                messages=[{"role": "user", "content": "word " * 4000}],
                stream=stream,
            )
    with pytest.raises(anthropic.NotFoundError):
        sdk.post("/v1/messages/batches", cast_to=object, body={})


def wrong(body: dict[str, Any]) -> str:
    """Its sentence, from the reading of a checked body."""
    with pytest.raises(BadField) as found:
        readers.messages(body)
    return str(found.value)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
BAD: tuple[tuple[dict[str, Any], str | None, str], ...] = (
    ({"messages": []}, "messages", "messages must have at least 1 item."),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be between 1 and"),
    ({"temperature": -1}, "temperature", "temperature must be between 0 and 100."),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, None,
     "This model reads no images: "),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]",
     "messages[0].content[0] holds no image: give it as a data: URL."),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type",
     "Documents are not supported yet"),
    ({"messages": [{"role": "user", "content": [{"type": "parcel"}]}]}, "messages[0].content[0].type",
     "messages[0].content[0] is of the type parcel, which cannot be used here; send it as text."),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].id",
     "messages[0].content[0].id is missing."),
    ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].tool_use_id",
     "messages[0].content[0].tool_use_id names no tool_use of an earlier message."),
    ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0]", "is the assistant's."),
    ({"messages": [USER, {"role": "assistant", "content": [USE]}]}, "messages[1]",
     "A tool call needs its result before the model goes on."),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "messages[0] says nothing"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "tools[0].input_schema is missing."),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "tool_choice needs tools."),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice", "There is no tool 'g'."),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type", "tool_choice.type must be one of auto, any, tool, none."),
    ({"thinking": {"type": "between_tools"}}, "thinking.type",
     "thinking.type must be one of enabled, adaptive, disabled."),
    ({"thinking": {"type": "disabled"}, "enable_thinking": True}, "enable_thinking", "contradict each other"),
    ({"regex": "a", "output_config": {"format": {"type": "json_schema", "schema": {}}}}, "regex",
     "regex and output_config.format both say what the answer looks like."),
    ({"n": 2}, "n", "n cannot be honoured: an answer of this API is one message."),
    ({"stop": ["x"]}, "stop", "stop cannot be honoured: use stop_sequences."),
    ({"mirostat": 2}, "mirostat", "mirostat cannot be honoured: this server has no such sampler."),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "this server calls no other servers"),
)  # fmt: skip


def test_bad_input_is_one_sentence_in_the_apis_form(thinker: Served) -> None:
    for more, param, sentence in BAD:
        status, answer = thinker.post("/v1/messages", {**BODY, **more})
        assert (status, answer["type"]) == (400, "error"), (more, answer)
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["param"] == param, (more, answer)
        assert sentence in answer["error"]["message"], (more, answer)
        assert "\n" not in answer["error"]["message"]
    status, answer = thinker.post("/v1/messages", {"messages": [USER]})
    assert (status, answer["error"]["message"]) == (400, "max_tokens is missing.")
    for path, wanted in (("/v1/messages/batches", 404), ("/v1/models", None)):
        status, _, data = thinker.ask("POST", path, {})
        assert ("type" in json.loads(data)) == (wanted == 404)
    status, _, data = thinker.ask("POST", "/v1/messages", raw=b"{")
    assert (status, json.loads(data)["error"]["type"]) == (400, "invalid_request_error")
    status, _, data = thinker.ask("POST", "/v1/messages", BODY, headers={"Host": "evil.example"})
    assert (status, json.loads(data)["error"]["type"]) == (403, "permission_error")


def test_a_conversation_as_the_template_reads_it() -> None:
    body = {
        "max_tokens": 1,
        "system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "c"}, USE]},
            {"role": "user", "content": [{**RESULT, "is_error": True, "content": None}]},
            {"role": "system", "content": "Hurry."},
            {"role": "user", "content": [{"type": "text", "text": "d"}]},
        ],
    }
    request = readers.messages(body)
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": {}}}
    assert list(request.messages) == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "name": "f", "content": "The tool failed."},
        {"role": "user", "content": "Hurry.\nd"},
    ]
    assert request.goes_on is None
    assert request.notices == ("messages[5] of the role system was given to the model as the user's",)
    begun = {**body, "messages": [USER, {"role": "assistant", "content": "I th"}]}
    assert readers.messages(begun).goes_on == "content"


def test_tools_that_the_provider_runs_are_left_out_with_a_word() -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {**TOOL, "type": "custom"}]
    request = readers.messages({**BODY, "tools": tools})
    assert [t["function"]["name"] for t in request.tools] == ["look_up"]
    assert "tools[0] of the type web_search_20250305 was left out" in request.notices[0]


def test_a_billing_line_and_a_budget_are_left_out_of_the_system_prompt() -> None:
    assert without_volatile(BILLING.format("fa690")) == ""
    assert without_volatile(f"{BILLING.format('1')}\nYou are.") == "You are."
    budget = "<total_tokens>{} tokens left</total_tokens>"
    assert without_volatile(f"You are.\n{budget.format(14999436)}\n{budget.format(9)}") == "You are."
    for kept in ("You are.", "The line x-anthropic-billing-header: is for billing.", "<total_tokens>"):
        assert without_volatile(kept) == kept
    billing = {"type": "text", "text": BILLING.format("1")}
    for system in (f"{BILLING.format('1')}\nYou are.", [billing, {"type": "text", "text": "You are."}]):
        request = readers.messages({**BODY, "system": system})
        assert request.messages[0] == {"role": "system", "content": "You are."}
        assert len(request.notices) == 1
    user = readers.messages({**BODY, "messages": [{"role": "user", "content": BILLING}]})
    assert user.messages[0]["content"] == BILLING


def test_pings_come_while_nothing_else_does_and_errors_end_a_stream() -> None:
    protocol = MessagesWriter("m", one_answer())
    assert protocol.pause() is None  # nothing may stand before message_start
    begun = list(protocol.chunks(Progress(choice=0, num_done=1, num_total=2, num_cached=1, seconds=0.0)))
    failed = list(protocol.failed(ApiError("Busy.", status=503)))
    found = [*begun, protocol.pause(), *failed]
    grammar = MessagesGrammar()
    grammar.read(b"".join(map(protocol.wire.frame, found)))
    assert failed[0]["error"] == {"type": "overloaded_error", "message": "Busy.", "param": None, "code": None}
    assert grammar.state == "end"


def test_headers_and_thinking_that_is_not_wanted(thinker: Served) -> None:
    headers = {"x-api-key": "k", "anthropic-version": "2023-06-01", "anthropic-beta": "a-1,b-2"}
    body = {**BODY, "max_tokens": 40, "thinking": {"type": "enabled", "budget_tokens": 4}, "stream": True}
    _, _, data = thinker.ask("POST", "/v1/messages?beta=true", body, headers=headers)
    shown = [v for e, v in named_events(data) if e == "content_block_delta"]
    body["thinking"]["display"] = "omitted"
    _, _, data = thinker.ask("POST", "/v1/messages?beta=true", body, headers=headers)
    hidden = [v for e, v in named_events(data) if e == "content_block_delta"]
    kinds = [v["delta"]["type"] for v in hidden]
    assert "thinking_delta" in [v["delta"]["type"] for v in shown]
    assert "thinking_delta" not in kinds
    assert "signature_delta" in kinds


@catches(
    "a variable of the template gives way to the API's own field",
    "mlxspec.server.messages_api:_take_thinking",
    rewritten("(kwargs is not None and kwargs.reasoning_effort)", "None"),
)
def test_of_several_efforts_the_servers_own_field_counts_first() -> None:
    """Then the template's variable, then the API's field; so a client's habit overrides nothing that was set for this server."""
    places: tuple[tuple[str, dict[str, Any]], ...] = (
        ("low", {"reasoning_effort": "low"}),
        ("medium", {"chat_template_kwargs": {"reasoning_effort": "medium"}}),
        ("high", {"output_config": {"effort": "high"}}),
    )
    for chosen in range(8):
        given = [place for i, place in enumerate(places) if chosen >> i & 1]
        body = {name: value for _, fields in given for name, value in fields.items()}
        found = readers.messages({"messages": [USER], **body}).template.get("reasoning_effort")
        assert found == (given[0][0] if given else None), body
