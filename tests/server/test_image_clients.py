"""Other people's clients send an image: the SDKs of OpenAI and Anthropic, openai-agents and litellm. All get the answer to that image."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engine import sighted_demo
from tests.server.serving import LONG, Served
from tests.server.test_clients import python  # noqa: F401  (a fixture)
from tests.server.test_image_parts import WORDS, base64_of, folder, sighted, url  # noqa: F401  (fixtures)

pytestmark = pytest.mark.slow


def wanted(served: Served, data: bytes, **more: Any) -> str:
    parts = [{"type": "image_url", "image_url": {"url": url(data)}}, {"type": "text", "text": WORDS}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 20, "temperature": 0}
    status, answer = served.post("/v1/chat/completions", body | more)
    assert status == 200, answer
    return str(answer["choices"][0]["message"]["content"])


def test_the_openai_sdk(sighted: Served) -> None:  # noqa: F811
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    one, other = sighted_demo.picture(), sighted_demo.picture(seed=1)
    assert wanted(sighted, one) != wanted(sighted, other)
    with openai.OpenAI(base_url=sighted.base, api_key="none", max_retries=0, timeout=LONG) as client:
        for data in (one, other):
            parts: list[Any] = [
                {"type": "image_url", "image_url": {"url": url(data)}},
                {"type": "text", "text": WORDS},
            ]
            given = {
                "model": "demo",
                "messages": [{"role": "user", "content": parts}],
                "max_tokens": 20,
                "temperature": 0,
            }
            whole = client.chat.completions.create(**given)
            assert whole.choices[0].message.content == wanted(sighted, data)
            chunks = client.chat.completions.create(**given, stream=True)
            streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert streamed == whole.choices[0].message.content
            shown = [{"type": "input_image", "image_url": url(data)}, {"type": "input_text", "text": WORDS}]
            response = client.responses.create(
                model="demo", input=[{"role": "user", "content": shown}], max_output_tokens=20, temperature=0
            )
            assert response.output_text == whole.choices[0].message.content
        bad = [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]
        with pytest.raises(openai.BadRequestError, match="not fetched over the network"):
            client.chat.completions.create(model="demo", messages=[{"role": "user", "content": bad}])


def test_the_anthropic_sdk(sighted: Served) -> None:  # noqa: F811
    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")
    data = sighted_demo.picture(seed=2)
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(data)}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": WORDS}]
    root = sighted.base.removesuffix("/v1")
    with anthropic.Anthropic(base_url=root, api_key="none", max_retries=0, timeout=LONG) as client:
        given = {
            "model": "demo",
            "max_tokens": 20,
            "extra_body": {"temperature": 0},
            "messages": [{"role": "user", "content": blocks}],
        }
        message = client.messages.create(**given)
        assert message.content[0].text == wanted(sighted, data)
        with client.messages.stream(**given) as stream:
            assert stream.get_final_text() == message.content[0].text


def test_agents_and_litellm(sighted: Served, python: str) -> None:  # noqa: F811
    data = sighted_demo.picture(seed=3)
    regex = "[^\n]{24}"
    given = json.dumps({"url": url(data), "question": WORDS, "regex": regex})
    command = [python, str(Path(__file__).with_name("client_images.py")), sighted.base, given]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = dict(json.loads(line) for line in ran.stdout.splitlines() if line.startswith("["))
    by_agents = ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"]
    by_litellm = ["openai/demo", "anthropic/demo", "openai/responses/demo", "ollama_chat/demo"]
    assert list(said) == [*by_agents, *by_litellm]
    assert {said[name] for name in by_agents} == {wanted(sighted, data, regex=regex, max_tokens=120)}
    assert {said[name] for name in by_litellm} == {wanted(sighted, data)}
