"""The `openai` Python SDK against the demo server: every feature as that client sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.serving import LONG, QUESTION, Served

openai = pytest.importorskip("openai", reason="the openai package is not installed")

MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look up a function.",
            "parameters": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 12},
                    "full": {"type": "boolean"},
                    "kind": {"type": "string", "enum": ["function", "class"]},
                },
                "required": ["name", "full", "kind"],
            },
        },
    },
    {"type": "function", "function": {"name": "nothing", "parameters": {"type": "object", "properties": {}}}},
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "colour": {"type": "string", "enum": ["red", "green"]},
        "yes": {"type": "boolean"},
    },
    "required": ["name", "colour", "yes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(demo: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=demo.base, api_key="none", max_retries=0, timeout=LONG) as made:
        yield made


def ask(client: Any, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "demo", "messages": MESSAGES, "max_tokens": 24, **more})


def test_chat_streamed_and_whole(client: Any) -> None:
    whole = ask(client)
    assert whole.object == "chat.completion"
    assert whole.model == "demo"
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24
    assert whole.usage.prompt_tokens_details.cached_tokens <= whole.usage.prompt_tokens
    fixed = {"policy": "fixed"}  # auto may find that drafting does not pay on a busy machine
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}, extra_body=fixed))
    assert len({c.id for c in chunks}) == 1
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == 24
    assert all(c.usage is None for c in chunks[:-1])
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason]
    assert reasons == ["length"]
    timings = chunks[-1].timings
    assert timings["predicted_n"] == 24
    assert timings["cache_n"] + timings["prompt_n"] == whole.usage.prompt_tokens
    assert timings["draft_n"] >= timings["draft_n_accepted"] > 0
    assert all(c.usage is None for c in ask(client, stream=True, max_tokens=2))


def test_a_tool_that_must_be_called(client: Any) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "look_up"}}):
        more = {"tools": TOOLS[:1], "tool_choice": choice, "max_tokens": 120, "parallel_tool_calls": False}
        whole = ask(client, **more)
        assert whole.choices[0].finish_reason == "tool_calls"
        assert whole.choices[0].message.content is None
        (call,) = whole.choices[0].message.tool_calls
        assert call.function.name == "look_up"
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == {"name", "full", "kind"}
        chunks = [c.choices[0] for c in ask(client, stream=True, **more)]
        deltas = [d for c in chunks for d in c.delta.tool_calls or ()]
        assert deltas[0].id
        assert deltas[0].function.name == "look_up"
        assert all(d.id is None and d.function.name is None for d in deltas[1:])
        assert "".join(d.function.arguments for d in deltas) == call.function.arguments
        assert chunks[-1].finish_reason == "tool_calls"
        with client.chat.completions.stream(model="demo", messages=MESSAGES, **more) as stream:
            final = stream.get_final_completion()
        assert json.loads(final.choices[0].message.tool_calls[0].function.arguments) == arguments


def test_a_conversation_with_a_tool(client: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"name": "x"}'}}
    turns: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Joins paths."},
    ]
    for choice in ("auto", "none"):
        answer = ask(client, messages=turns, tools=TOOLS, tool_choice=choice)
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].message.content


def test_a_json_schema(client: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    for more in ({}, {"temperature": 1.0, "seed": 3}, {"extra_body": {"draft": "off"}}):
        answer = ask(client, response_format=form, max_tokens=100, **more)
        found = json.loads(answer.choices[0].message.content)
        assert set(found) == {"name", "colour", "yes"}
        assert answer.choices[0].finish_reason == "stop"
    either = ask(client, response_format=form, max_tokens=100, tools=TOOLS)
    assert either.choices[0].message.tool_calls or json.loads(either.choices[0].message.content)
    free = ask(client, response_format={"type": "json_object"}, max_tokens=100, temperature=0.7, seed=1)
    assert free.choices[0].message.content.startswith("{")


def test_a_parsed_answer(client: Any) -> None:
    pydantic = pytest.importorskip("pydantic")
    thing = pydantic.create_model("Thing", yes=(bool, ...), no=(bool, ...))
    answer = client.chat.completions.parse(
        model="demo", messages=MESSAGES, max_tokens=60, response_format=thing
    )
    assert isinstance(answer.choices[0].message.parsed.yes, bool)


def test_logprobs(client: Any) -> None:
    whole = ask(client, logprobs=True, top_logprobs=3)
    found = whole.choices[0].logprobs.content
    assert len(found) == 24
    assert b"".join(bytes(t.bytes) for t in found).decode() == whole.choices[0].message.content
    for entry in found:
        assert entry.logprob <= 1e-4
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob >= entry.logprob - 1e-3
    chunks = list(ask(client, logprobs=True, stream=True))
    streamed = [
        t for c in chunks if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.content
    ]
    assert [t.token for t in streamed] == [t.token for t in found]
    assert streamed[0].top_logprobs == []
    old = client.completions.create(model="demo", prompt="def main():", max_tokens=6, logprobs=2)
    entries = old.choices[0].logprobs
    assert "".join(entries.tokens) == old.choices[0].text
    assert [len(t) for t in entries.top_logprobs] == [2] * 6
    assert entries.text_offset[0] == 0


def test_several_answers_seeds_stops_and_bias(client: Any) -> None:
    three = ask(client, n=3, temperature=1.5, seed=5)
    again = ask(client, n=3, temperature=1.5, seed=5, extra_body={"draft": "off"})
    texts = [c.message.content for c in three.choices]
    assert [c.index for c in three.choices] == [0, 1, 2]
    assert texts == [c.message.content for c in again.choices]
    assert len(set(texts)) > 1
    streamed = list(ask(client, n=3, temperature=1.5, seed=5, stream=True))
    assert [
        "".join(c.choices[0].delta.content or "" for c in streamed if c.choices[0].index == i)
        for i in range(3)
    ] == texts
    stopped = ask(client, stop=["path", "zzz"])
    assert stopped.choices[0].message.content == "`os."
    assert stopped.choices[0].finish_reason == "stop"
    assert ask(client, logit_bias={"5": 100}, max_tokens=3).choices[0].message.content
    assert ask(client, presence_penalty=1.5, frequency_penalty=0.5, max_tokens=3).choices[0].message.content


def test_completions(client: Any, demo: Served) -> None:
    texts = ["def main():", "import os"]
    single = [client.completions.create(model="demo", prompt=t, max_tokens=8) for t in texts]
    both = client.completions.create(model="demo", prompt=texts, max_tokens=8)
    assert [c.text for c in both.choices] == [s.choices[0].text for s in single]
    assert both.usage.completion_tokens == 16
    ids = demo.post("/tokenize", {"content": texts[0]})[1]["tokens"]
    by_id = client.completions.create(model="demo", prompt=ids, max_tokens=8)
    assert by_id.choices[0].text == single[0].choices[0].text
    streamed = client.completions.create(model="demo", prompt=texts[0], max_tokens=8, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == single[0].choices[0].text
    echoed = client.completions.create(model="demo", prompt=texts[0], max_tokens=8, echo=True)
    assert echoed.choices[0].text == texts[0] + single[0].choices[0].text


def test_drafting_is_chosen_a_request(client: Any) -> None:
    """Same text whoever drafts; what drafted is said."""
    texts = set()
    for draft in ("off", "auto", ["ngram-simple"], "mtp", False, True):
        # policy auto may find that drafting does not pay, on a machine that is busy with other things
        answer = ask(client, extra_body={"draft": draft, "n_max": 2, "policy": "fixed"}, max_tokens=32)
        texts.add(answer.choices[0].message.content)
        used = set(answer.mlxspec["drafters"])
        if draft in ("off", False):
            assert not used
            assert "draft_n" not in answer.timings
        elif draft == "mtp":
            assert used == {"mtp"}
    assert len(texts) == 1
    cut = ask(client, extra_body={"draft": "mtp", "speculative.n_max": 1}, max_tokens=32)
    assert cut.mlxspec["rounds"] >= 15


def test_errors_are_those_the_sdk_knows(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        ask(client, messages=[{"role": "user", "content": "word " * 4000}])
    assert found.value.code == "context_length_exceeded"
    assert found.value.body["n_ctx"] == 2048
    with pytest.raises(openai.BadRequestError) as found:
        ask(client, messages=[{"role": "user", "content": "word " * 4000}], stream=True)
    for more, param in (
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"draft": "ngram-map-k"}}, "draft"),
        ({"extra_body": {"ngram_static": "x"}}, "ngram_static"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
            "messages[0].content[0]",
        ),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ):
        with pytest.raises(openai.BadRequestError) as found:
            ask(client, **more)
        assert found.value.param == param, found.value
    with pytest.raises(openai.BadRequestError, match="JSON schema"):
        ask(
            client,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}},
        )


def test_models(client: Any, demo: Served) -> None:
    (model,) = client.models.list()
    assert model.id == "demo"
    assert client.models.retrieve("demo").meta["n_ctx"] == 2048
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("../../etc/passwd")
    answer = ask(client, model="gpt-4o", max_tokens=1)
    assert answer.model == "demo"  # with one model every name means it, and the answer says which it was
    assert demo.ask("GET", "/health")[0] == 200


def test_unknown_fields_are_named(client: Any) -> None:
    answer = ask(client, max_tokens=1, user="me", extra_body={"tea": 2, "stream_options": None})
    assert answer.mlxspec["notices"] == ["tea is no field of this request and was ignored"]
    answer = ask(client, max_tokens=1, reasoning_effort="high", extra_body={"enable_thinking": True})
    assert sorted(answer.mlxspec["notices"]) == [
        f"{name} has no effect: the chat template does not know it"
        for name in ("enable_thinking", "reasoning_effort")
    ]
    asked = {"reasoning_effort": "none", "extra_body": {"enable_thinking": False}}
    assert ask(client, max_tokens=1, **asked).mlxspec["notices"] == []
    answer = ask(client, max_tokens=1, extra_body={"n_mx": 2})
    assert answer.mlxspec["notices"] == [
        "n_mx is no field of this request and was ignored; did you mean n_max?"
    ]
    with pytest.raises(
        openai.BadRequestError, match="prompt is missing, and prmpt is no field of this request"
    ):
        client.completions.create(model="demo", prompt=openai.omit, extra_body={"prmpt": "x"})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": {"b": 1}}, "colour": 1}}]
    answer = ask(client, max_tokens=1, tools=tools)
    assert answer.mlxspec["notices"] == [
        "tools[0].function.colour is no field of this request and was ignored"
    ]
