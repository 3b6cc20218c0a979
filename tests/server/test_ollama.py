"""Ollama's API: its Python client against the demo server, models and their abilities, and errors in its form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.jobs import one_answer
from tests.server.serving import QUESTION, Served
from tests.server.stream_grammar import OllamaGrammar
from tests.server.test_sdk import SCHEMA, TOOLS

MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def client(thinker: Served) -> Iterator[Any]:
    ollama = pytest.importorskip("ollama", reason="the ollama package is not installed")
    made = ollama.Client(host=thinker.base.removesuffix("/v1"))
    yield made
    made._client.close()  # older versions of the package have no method for it


@pytest.mark.filterwarnings("ignore")
def test_the_python_client(client: Any) -> None:
    import ollama

    options = {"num_predict": 24, "num_ctx": 4096, "num_gpu": 1}
    whole = client.chat(model="demo", messages=MESSAGES, think=False, options=options)
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 24)
    parts = list(client.chat(model="demo", messages=MESSAGES, think=False, options=options, stream=True))
    assert "".join(p.message.content for p in parts) == whole.message.content
    assert parts[-1].prompt_eval_count == whole.prompt_eval_count
    thought = client.chat(
        model="demo", messages=MESSAGES, think=True, options={**options, "thinking_budget": 5}
    )
    assert thought.message.thinking
    said = client.generate(model="demo", prompt=QUESTION, think=False, options=options)
    assert said.response == whole.message.content
    shaped = client.chat(
        model="demo", messages=MESSAGES, think=False, format=SCHEMA, options={"num_predict": 150}
    )
    assert set(json.loads(shaped.message.content)) == set(SCHEMA["properties"])
    tools = client.chat(model="demo", messages=MESSAGES, think=False, tools=TOOLS[:1], options=options)
    assert tools.message.role == "assistant"
    assert [m.model for m in client.list().models] == ["demo"]
    shown = client.show("demo")
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities)
    assert shown.modelinfo["mlxspec.context_length"] == 2048
    with pytest.raises(ollama.ResponseError, match="mirostat cannot be honoured"):
        client.chat(model="demo", messages=MESSAGES, options={"mirostat": 2})


def test_a_raw_prompt_is_continued(thinker: Served) -> None:
    asked = {"prompt": "def main():", "raw": True, "stream": False, "options": {"num_predict": 12}}
    status, found = thinker.post("/api/generate", asked)
    assert status == 200, found
    direct = thinker.post("/v1/completions", {"prompt": "def main():", "max_tokens": 12})[1]
    assert found["response"] == direct["choices"][0]["text"]
    shaped = {
        "prompt": "x",
        "raw": True,
        "format": {"const": "42"},
        "stream": False,
        "options": {"num_predict": 20},
    }
    assert thinker.post("/api/generate", shaped)[1]["response"] == '"42"'


def test_a_request_for_nothing_loads_the_model(thinker: Served) -> None:
    for path, asked in (
        ("/api/generate", {"model": "demo"}),
        ("/api/chat", {"model": "demo", "messages": []}),
        ("/api/generate", {"model": "demo:latest", "prompt": "", "keep_alive": "5m"}),
    ):
        status, found = thinker.post(path, asked)
        assert (status, found["done"], found["done_reason"]) == (200, True, "load")


def test_a_context_that_is_not_there_is_said(thinker: Served) -> None:
    asked = {"messages": MESSAGES, "stream": False, "options": {"num_ctx": 8192, "num_predict": 1}}
    notices = thinker.post("/api/chat", asked)[1]["mlxspec"]["notices"]
    assert "options.num_ctx is 8192, and this model's context ends at 2048 tokens" in notices


BAD: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["AAAA"]}]},
     "This model reads no images: "),
    ("/api/chat", {"messages": MESSAGES, "temperature": 1}, "temperature cannot be honoured: it is one of the options."),
    ("/api/chat", {"messages": MESSAGES, "options": {"temperature": -1}}, "options.temperature must be between 0 and 100."),
    ("/api/chat", {"messages": MESSAGES, "options": {"mirostat": 1}},
     "options.mirostat cannot be honoured: this server has no such sampler."),
    ("/api/chat", {"messages": MESSAGES, "options": {"max_tokens": 1}}, "options.max_tokens cannot be honoured: use num_predict."),
    ("/api/chat", {"messages": MESSAGES, "think": "much"}, "think must be one of low, medium, high, max."),
    ("/api/chat", {"messages": MESSAGES, "think": True, "enable_thinking": False}, "enable_thinking and think contradict each other."),
    ("/api/chat", {"messages": MESSAGES, "format": {"type": "object"}, "options": {"regex": "a"}},
     "options.regex and format both say what the answer looks like."),
    ("/api/chat", {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice cannot be honoured"),
    ("/api/chat", {"messages": [{"role": "user"}]}, "messages[0].content is missing."),
    ("/api/generate", {"prompt": "x", "suffix": "y"}, "its vocabulary has no tokens around a gap in a text."),
    ("/api/generate", {"prompt": "x", "context": [1]}, "context cannot be honoured: use /api/chat and send the conversation."),
    ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, "system and raw exclude each other"),
    ("/api/generate", {"prompt": "word " * 4000}, "maximum context length is 2048 tokens"),
)  # fmt: skip


def test_bad_input_is_one_sentence_in_the_apis_form(thinker: Served) -> None:
    for path, body, sentence in BAD:
        status, answer = thinker.post(path, body)
        assert status == 400, (body, answer)
        assert set(answer) == {"error"}
        assert sentence in answer["error"], (body, answer)
        assert "\n" not in answer["error"]
    for path in ("/api/copy", "/api/embeddings"):
        status, answer = thinker.post(path, {})
        assert (status, set(answer)) == (404, {"error"})
    assert isinstance(thinker.post("/api/copy", {})[1]["error"], str)


def test_what_is_not_here_is_said(thinker: Served) -> None:
    status, said = thinker.post("/api/show", {"model": "llama3"})
    assert status == 404
    assert said["error"] == "There is no model 'llama3' here; there are: demo."
    assert thinker.post("/api/show", {"model": "demo:latest"})[0] == 200
    assert "/api/embed" in thinker.post("/api/embeddings", {})[1]["error"]
    assert thinker.post("/api/tags", {}) == (405, {"error": "This route takes GET or HEAD alone."})
    base = f"http://127.0.0.1:{thinker.port}/"
    assert (
        f"{base}v1 for clients of OpenAI and {base} for others"
        in thinker.post("/api/nothing", {})[1]["error"]
    )


def test_models_tell_their_context_and_abilities(thinker: Served) -> None:
    status, _, data = thinker.ask("GET", "/v1/models")
    (model,) = json.loads(data)["data"]
    assert status == 200
    assert (model["context_length"], model["max_model_len"]) == (2048, 2048)
    assert model["capabilities"] == ["completion", "tools", "thinking"]
    assert model["architecture"]["input_modalities"] == ["text"]
    assert (model["type"], model["display_name"]) == ("model", "demo")
    assert json.loads(thinker.ask("GET", "/api/version")[2])["version"]
    (listed,) = json.loads(thinker.ask("GET", "/api/tags")[2])["models"]
    assert listed["name"] == listed["model"] == "demo"


def test_a_body_without_its_type_is_taken_from_programs_only(thinker: Served) -> None:
    body = json.dumps({"messages": MESSAGES, "stream": False, "options": {"num_predict": 1}}).encode()
    untyped, form = {"Content-Type": None}, {"Content-Type": "application/x-www-form-urlencoded"}  # curl's
    for path, headers, wanted in (
        ("/api/chat", untyped, 200),
        ("/api/chat", form, 200),
        ("/api/chat", {**form, "Origin": "http://localhost:3000"}, 415),
        ("/v1/chat/completions", form, 415),
        ("/v1/nowhere", form, 404),
        ("/api/chat", {**untyped, "Origin": "http://localhost:3000"}, 415),
        ("/api/chat", {**untyped, "Origin": "http://evil.example"}, 403),
        ("/api/chat", {"Content-Type": "text/plain"}, 415),
        ("/v1/chat/completions", untyped, 415),
        ("/v1/messages", untyped, 415),
    ):
        status, _, data = thinker.ask("POST", path, raw=body, headers=headers)  # type: ignore[arg-type]
        assert status == wanted, (path, headers, data)


def test_errors_end_a_stream_with_a_line() -> None:
    from mlxspec.server.errors import ApiError
    from mlxspec.server.ollama_api import OllamaChatWriter

    grammar, protocol = OllamaGrammar(), OllamaChatWriter("m", one_answer())
    grammar.read(b"".join(map(protocol.wire.frame, protocol.failed(ApiError("Busy.", status=503)))))
    assert grammar.state == "end"
