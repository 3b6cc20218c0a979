"""OpenAI's `/v1/responses/compact`, by the openai SDK and by hand; what becomes of its answer in the next request."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from planting import catches

from mlxspec.server.errors import BadField
from mlxspec.server.forms.base import review
from mlxspec.server.responses_api import SUMMARY, ResponsesRequest, conversation, sealed, unsealed
from tests.engine.sighted_demo import picture
from tests.server.serving import LONG, QUESTION, Served

openai = pytest.importorskip("openai", reason="the openai package is not installed")

TURNS: list[Any] = [
    {"role": "user", "content": "Mend the parser."},
    {"type": "function_call", "call_id": "1", "name": "run", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "2 failed"},
    {"role": "assistant", "content": "Two tests fail."},
    {"role": "user", "content": "Go on."},
]


def messages(items: list[Any]) -> list[Any]:
    return requested(items).messages


def requested(items: list[Any]) -> Any:
    return conversation(review(ResponsesRequest, {"input": items})[0])


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=served.base, api_key="none", max_retries=0, timeout=LONG) as made:
        yield made


def test_the_sdk_compacts_and_goes_on(client: Any) -> None:
    extra = {"lark": 'start: "Two tests of the parser fail."', "enable_thinking": False}
    found = client.responses.compact(model="demo", input=TURNS, instructions="Be short.", extra_body=extra)
    assert found.object == "response.compaction"
    *said, last = found.output
    assert [part.text for item in said for part in item.content] == ["Mend the parser.", "Go on."]
    assert (last.type, unsealed(last.encrypted_content)) == ("compaction", "Two tests of the parser fail.")
    assert found.usage.output_tokens > 5
    again = [item.model_dump(exclude_none=True, warnings=False) for item in found.output]
    whole = client.responses.create(
        model="demo", input=[*again, {"role": "user", "content": QUESTION}], max_output_tokens=8
    )
    assert whole.usage.output_tokens == 8
    assert "encrypted" not in str(whole.mlxspec.get("notices"))


def test_a_summary_is_read_as_text_and_that_of_another_server_is_named() -> None:
    items = [{"type": "compaction", "encrypted_content": sealed("Two fail.")}, TURNS[-1]]
    first, *_ = messages(items)
    assert first["content"].startswith(f"{SUMMARY}\n\nTwo fail.")
    items[0] = {"type": "compaction", "encrypted_content": "gAAAA"}
    request = requested(items)
    assert [m["content"] for m in request.messages] == ["Go on."]
    assert request.notices == (
        "input[0] was left out: another server wrote this compaction, and it is encrypted",
    )


def test_an_image_is_given_back_as_it_was_sent() -> None:
    url = "data:image/png;base64," + base64.b64encode(picture(seed=1)).decode()
    content = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What is this?"}]
    body = {"input": [{"role": "user", "content": content}], "lark": 'start: "A circle."'}
    with Served("--model", "demo-vision") as sighted:
        status, _, data = sighted.ask("POST", "/v1/responses/compact", {**body, "enable_thinking": False})
        assert status == 200, data
        first, last = json.loads(data)["output"]
        assert first["content"] == content
        again = {"input": [first, last, TURNS[-1]], "max_output_tokens": 2}
        status, _, data = sighted.ask("POST", "/v1/responses", again)
        assert status == 200, data


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"max_output_tokens": 3}, "did not end its summary"),
        ({"stream": True}, "stream"),
        ({"input": []}, "input must not be empty"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
    ],
    ids=lambda x: str(x),
)
def test_bad_requests_get_one_sentence(served: Served, body: dict[str, Any], says: str) -> None:
    found, _, data = served.ask(
        "POST", "/v1/responses/compact", {"input": TURNS, "enable_thinking": False, **body}
    )
    assert found == 400, data
    assert says in data.decode()


@catches(
    "a result without an id answers the newest call",
    "mlxspec.server.template_messages:TemplateMessages.open_call",
    lambda right: lambda self, name: self._open[-1] if self._open else None,
)
def test_a_result_without_an_id_is_that_of_the_first_open_call() -> None:
    calls = [
        {"type": "function_call", "call_id": i, "name": name, "arguments": "{}"}
        for i, name in ("1a", "2b", "3a")
    ]
    results = [
        {"type": "function_call_output", "output": "of b", "name": "b", "caller": {"type": "direct"}},
        {"type": "function_call_output", "output": "of 1"},
        {"type": "function_call_output", "output": "of 3", "namespace": None},
    ]
    found = messages([TURNS[0], *calls, *results])
    assert [(m["tool_call_id"], m["content"]) for m in found if m["role"] == "tool"] == [
        ("2", "of b"),
        ("1", "of 1"),
        ("3", "of 3"),
    ]
    with pytest.raises(BadField, match="no call_id, and no earlier call is without a result"):
        messages([TURNS[0], results[1]])
