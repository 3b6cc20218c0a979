"""`mlxspec serve` with a model that runs by mlx-lm's code, as the `openai` SDK sees it: chat, schemas, tools of another family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models.adapted_zoo import write
from tests.server.serving import LONG, Served

openai = pytest.importorskip("openai", reason="the openai package is not installed")

CALL = "<tool_call>look<arg_key>text</arg_key><arg_value>a b</arg_value></tool_call>"
TEMPLATE = "{% if tools %}{{ tools | tojson }} <tool_call>NAME<arg_key>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}\n"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
        },
    }
]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = write("lfm2", tmp_path_factory.mktemp("served") / "lfm2")
    template = Path(folder) / "own.jinja"
    template.write_text(TEMPLATE)
    (folder / "generation_config.json").write_text('{"do_sample": false}')
    options = (
        "--model",
        f"tiny={folder}",
        "--chat-template",
        str(template),
        "--policy",
        "fixed",
        "--draft",
        "ngram-simple",
    )
    with (
        Served(*options, env={"MLX_DISABLE_COMPILE": "1"}) as server,
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=LONG
        ) as made,
    ):
        yield made


def ask(client: Any, **more: Any) -> Any:
    messages = [{"role": "user", "content": "def add(a, b):\n    return a + b\n"}]
    return client.chat.completions.create(
        **{"model": "tiny", "messages": messages, "max_tokens": 120, **more}
    )


def test_an_answer_is_the_same_streamed_whole_and_without_drafts(client: Any) -> None:
    whole = ask(client, max_tokens=24).choices[0].message.content
    chunks = list(ask(client, max_tokens=24, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert ask(client, max_tokens=24, extra_body={"draft": "off"}).choices[0].message.content == whole


def test_an_answer_follows_a_schema_and_has_log_probabilities(client: Any) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    choice = ask(client, response_format=wanted, logprobs=True, top_logprobs=2).choices[0]
    assert json.loads(choice.message.content)["colour"] in ("red", "green")
    assert choice.logprobs.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_in_another_familys_notation_is_one(client: Any, stream: bool) -> None:
    """The answer is held to the notation of GLM by a regular expression."""
    regex = CALL.replace("a b", "[ab]{3}")
    found = ask(client, tools=TOOLS, stream=stream, extra_body={"regex": regex})
    if stream:
        deltas = [c.choices[0].delta for c in found if c.choices]
        calls = [call for d in deltas for call in d.tool_calls or ()]
        name, arguments = calls[0].function.name, "".join(c.function.arguments or "" for c in calls)
        content = "".join(d.content or "" for d in deltas)
    else:
        message = found.choices[0].message
        assert found.choices[0].finish_reason == "tool_calls"
        (call,) = message.tool_calls
        name, arguments, content = call.function.name, call.function.arguments, message.content or ""
    assert name == "look"
    assert set(json.loads(arguments)["text"]) <= {"a", "b"}
    assert not content


def test_a_call_cannot_be_required_without_a_grammar(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="no grammar of its notation"):
        ask(client, tools=TOOLS, tool_choice="required")
