"""OpenAI's Responses: the `openai` SDK against the demo server, what becomes of input items, and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from planting import catches

from mlxspec.engine.stats import RequestStats
from mlxspec.parsers.pieces import CallArguments, CallStart
from mlxspec.server.errors import ApiError, BadField
from mlxspec.server.forms.base import review
from mlxspec.server.job_run import Delta, End
from mlxspec.server.responses_api import ResponsesRequest, sealed, unsealed, writer
from tests.server import readers
from tests.server.jobs import one_answer
from tests.server.serving import LONG, QUESTION, Served
from tests.server.stream_grammar import ResponsesGrammar
from tests.server.test_sdk import SCHEMA, TOOLS

openai = pytest.importorskip("openai", reason="the openai package is not installed")

FUNCTION: Any = {"type": "function", "strict": False, **TOOLS[0]["function"]}
QUIET: Any = {"enable_thinking": False}


@pytest.fixture(scope="module")
def client(thinker: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=thinker.base, api_key="none", max_retries=0, timeout=LONG) as made:
        yield made


def ask(client: Any, **more: Any) -> Any:
    extra = {**QUIET, **more.pop("extra_body", {})}
    given = {"model": "demo", "input": QUESTION, "max_output_tokens": 24, **more}
    return client.responses.create(**given, extra_body=extra)


def test_the_sdk(client: Any) -> None:
    whole = ask(client)
    assert (whole.object, whole.status, whole.incomplete_details.reason) == (
        "response",
        "incomplete",
        "max_output_tokens",
    )
    assert whole.usage.output_tokens == 24
    assert whole.output_text
    assert whole.timings["predicted_n"] == 24
    assert whole.mlxspec["drafters"]
    events = list(ask(client, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete"
    asked = {
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "name": "look_up"},
        "max_output_tokens": 150,
    }
    called = ask(client, **asked, parallel_tool_calls=False)
    (call,) = called.output
    assert set(json.loads(call.arguments)) == {"name", "full", "kind"}
    items: list[Any] = [
        {"role": "user", "content": QUESTION},
        *called.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "Joins paths."},
    ]
    assert ask(client, input=items, tools=[FUNCTION]).output_text
    form = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}}
    shaped = ask(client, text=form, max_output_tokens=150)
    assert shaped.status == "completed"
    assert set(json.loads(shaped.output_text)) == set(SCHEMA["properties"])


def test_the_sdks_stream_helper(client: Any) -> None:
    with client.responses.stream(
        model="demo", input=QUESTION, tools=[FUNCTION], tool_choice="required", max_output_tokens=150,
        parallel_tool_calls=False, extra_body=QUIET,
    ) as stream:  # fmt: skip
        final = stream.get_final_response()
    assert final.status == "completed"
    assert json.loads(final.output[0].arguments)


def test_nothing_is_stored_and_every_look_up_says_so(client: Any) -> None:
    """The history is the client's to send; what asks for a stored one is refused with a sentence."""
    first = ask(client, store=True)
    assert (first.store, first.previous_response_id, first.truncation) == (False, None, "disabled")
    with pytest.raises(openai.NotFoundError, match="send the whole conversation as input"):
        client.responses.retrieve(first.id)
    for name, value in (("previous_response_id", first.id), ("conversation", "c")):
        with pytest.raises(openai.BadRequestError, match="send the whole conversation as input") as found:
            ask(client, **{name: value})
        assert found.value.param == name
    with pytest.raises(openai.BadRequestError, match="send a shorter history"):
        ask(client, truncation="auto")
    assert ask(client, truncation="disabled").output_text == first.output_text


@catches(
    "what is short is not read",
    "mlxspec.server.responses_api:unsealed",
    lambda right: lambda value: "nothing",
    case="summary",
)
@pytest.mark.parametrize(
    ("members", "thought"),
    [
        (
            {"content": [{"type": "reasoning_text", "text": "whole"}], "encrypted_content": sealed("no")},
            "whole",
        ),
        ({"encrypted_content": sealed("seal")}, "seal"),
        ({}, "short"),
        ({"encrypted_content": "another server's"}, "short"),
    ],
    ids=["content", "seal", "summary", "summary-behind-another-seal"],
)
def test_reasoning_is_read_from_wherever_it_stands(members: dict[str, Any], thought: str) -> None:
    """Some clients send the summary back and no more of it."""
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], **members}
    answer = {"role": "assistant", "content": "4"}
    asked = readers.responses({"input": [{"role": "user", "content": "2+2?"}, item, answer]})
    assert asked.messages[-1] == {"role": "assistant", "content": "4", "reasoning_content": thought}


def test_input_items_as_the_template_reads_them() -> None:
    body = {
        "instructions": "You are.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": sealed(" so")},
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
            {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "c"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'},
            {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "*** Begin"},
            {"type": "function_call_output", "call_id": "1", "output": "yes"},
            {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "no"}]},
            {"role": "developer", "content": "Hurry."},
        ],
    }  # fmt: skip
    request = readers.responses(body)
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
        {"id": "2", "type": "function", "function": {"name": "patch", "arguments": {"input": "*** Begin"}}},
    ]
    assert list(request.messages) == [
        {"role": "system", "content": "You are.\n\nBe brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "reasoning_content": "hm so", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "yes"},
        {"role": "tool", "tool_call_id": "2", "name": "patch", "content": "no"},
        {"role": "user", "content": "Hurry."},
    ]
    assert request.notices == ("input[11] of the role developer was given to the model as the user's",)
    assert unsealed(sealed("é\n")) == "é\n"
    assert unsealed("mlxspec:!") == unsealed(None) == ""


TOOLS_OF_CODEX: list[dict[str, Any]] = [
    {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}, "strict": False},
    {"type": "custom", "name": "apply_patch", "description": "Edits files.",
     "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}},
    {"type": "web_search"},
    {"type": "local_shell"},
    {"type": "namespace", "name": "n", "tools": []},
]  # fmt: skip


def test_tools_of_every_type() -> None:
    request = readers.responses({"input": "x", "tools": TOOLS_OF_CODEX, "tool_choice": "auto"})
    assert [t["function"]["name"] for t in request.tools] == ["shell", "apply_patch"]
    custom = request.tools[1]["function"]
    assert custom["parameters"]["required"] == ["input"]
    assert custom["description"] == "Edits files.\nThe input follows this lark grammar:\nstart: /x/"
    said = "\n".join(request.notices)
    for name in ("web_search", "local_shell"):
        assert f"of the type {name} was left out" in said
    (own,) = request.customs
    assert (own.tool, own.path, own.syntax, own.definition) == (
        "apply_patch",
        "tools[1]",
        "lark",
        "start: /x/",
    )


def test_a_custom_tool_is_called_with_its_text() -> None:
    form, _ = review(ResponsesRequest, {"input": "x", "tools": TOOLS_OF_CODEX})
    stats = RequestStats(num_prompt=3)
    protocol, whole = (writer(form)("m", one_answer()) for _ in range(2))
    pieces = [CallStart(0, "apply_patch"), CallArguments(0, '{"input": "*** '), CallArguments(0, 'Begin"}')]
    updates = [
        Delta(choice=0, pieces=pieces, stats=stats),
        End(choice=0, reason="tool_calls", cause="end", stats=stats),
    ]
    data = b"".join(map(protocol.wire.frame, protocol.begin()))
    for update in updates:
        data += b"".join(map(protocol.wire.frame, protocol.chunks(update)))
        whole.take(update)
    grammar = ResponsesGrammar()
    grammar.read(data)
    grammar.finish()
    (item,) = grammar.items
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", "*** Begin")
    assert whole.whole()["output"][0]["input"] == "*** Begin"


def test_what_codex_sends(thinker: Served) -> None:
    """The fields of Codex's requests, as its sources name them; a second turn with what the first one gave, as Codex keeps it."""
    body = {
        "model": "demo", "instructions": "You are a coder.", "tools": TOOLS_OF_CODEX, "tool_choice": "auto", "parallel_tool_calls": False,
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Job before you write."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context/>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        ],
        "reasoning": {"effort": "medium", "summary": "auto"}, "store": False, "stream": True, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "abc", "client_metadata": {"x": "y"}, "text": {"verbosity": "low"}, "thinking_budget": 5,
        "max_output_tokens": 30,
    }  # fmt: skip
    said: list[ResponsesGrammar] = []
    for _ in range(2):
        status, _, data = thinker.ask("POST", "/v1/responses", body)
        assert status == 200, data
        grammar = ResponsesGrammar()
        grammar.read(data)
        grammar.finish()
        said.append(grammar)
        for item in grammar.items:
            kept = {k: v for k, v in item.items() if not (item["type"] == "reasoning" and k == "content")}
            body["input"].append(kept)  # type: ignore[attr-defined]
        asked = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "and sorted?"}],
        }
        body["input"].append(asked)  # type: ignore[attr-defined]
    first, second = said
    assert [i["type"] for i in first.items] == ["reasoning", "message"]
    assert unsealed(first.items[0]["encrypted_content"]) == first.thinking
    usage = second.response["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] >= 0.9 * first.response["usage"]["input_tokens"]
    assert first.response["usage"]["output_tokens_details"]["reasoning_tokens"] >= 5
    notices = first.response["mlxspec"]["notices"]
    assert not [n for n in notices if "no field" in n], notices


BAD: tuple[tuple[dict[str, Any], str | None, str], ...] = (
    ({"input": ""}, "input", "input must not be empty."),
    ({"input": 5}, "input", "input must be text or a list."),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input must not be empty."),
    ({"input": [{"type": "parcel", "id": "x"}]}, "input", "input must not be empty."),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, None,
     "This model reads no images: "),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]",
     "input[0].content[0] holds no image: give it as a data: URL."),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]}, "input[0].call_id",
     "input[0].call_id names no call of an earlier item."),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments", "input[0].arguments is missing."),
    ({"background": True}, "background", "background cannot be honoured: this server answers while the client waits."),
    ({"conversation": "c"}, "conversation", "conversation cannot be honoured: nothing is stored here; send the whole conversation as"),
    ({"max_tokens": 5}, "max_tokens", "max_tokens cannot be honoured: use max_output_tokens."),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be between 1 and"),
    ({"top_logprobs": 2}, "top_logprobs", "this API gives no log-probabilities here"),
    ({"include": ["message.output_text.logprobs"]}, "include", "/v1/chat/completions has them"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "tools[0].name is missing."),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools."),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice.type", "tool_choice.type must be one of function, custom, allowed_tools."),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "text.format.type must be one of text, json_object, json_schema."),
    ({"regex": "a", "text": {"format": {"type": "json_object"}}}, "regex", "both say what the answer looks like"),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning_effort", "contradict each other"),
    ({"n": 2}, "n", "n cannot be honoured: an answer of this API is one response."),
)  # fmt: skip


def test_bad_input_is_one_sentence(thinker: Served) -> None:
    for more, param, sentence in BAD:
        status, answer = thinker.post("/v1/responses", {"input": "x", "max_output_tokens": 2, **more})
        assert (status, answer["error"]["param"]) == (400, param), (more, answer)
        assert sentence in answer["error"]["message"], (more, answer)
        assert "\n" not in answer["error"]["message"]


def test_an_error_ends_a_stream_as_the_api_says() -> None:
    protocol = writer(review(ResponsesRequest, {"input": "x"})[0])("m", one_answer())
    found = [*protocol.begin(), *protocol.failed(ApiError("Busy.", status=503, code="queue_full"))]
    grammar = ResponsesGrammar()
    grammar.read(b"".join(map(protocol.wire.frame, found)))
    assert grammar.state == "end"
    assert found[-1]["response"]["error"] == {"code": "queue_full", "message": "Busy."}


def test_contradictions_are_found_before_a_job_is_made() -> None:
    with pytest.raises(BadField, match="input must not be empty"):
        readers.responses({"input": [], "instructions": "x"})


def test_an_item_that_a_limit_cut_says_so(thinker: Served) -> None:
    body = {"input": "x", "max_output_tokens": 2, "enable_thinking": False, "ignore_eos": True}
    _, answer = thinker.post("/v1/responses", body)
    assert [item["status"] for item in answer["output"]] == ["incomplete"]
    assert answer["status"] == "incomplete"
