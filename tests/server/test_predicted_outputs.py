"""OpenAI's predicted outputs through its own package: the same answer, streamed and whole, and the counts that its API documents."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.serving import QUESTION, Served

openai = pytest.importorskip("openai", reason="needs openai's package")
MESSAGES = [{"role": "user", "content": QUESTION}]


def asked(demo: Served, **more: Any) -> Any:
    with openai.OpenAI(base_url=demo.base, api_key="x", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            max_tokens=40,
            temperature=0,
            extra_body={"policy": "fixed"},
            **more,
        )
        return list(answer) if more.get("stream") else answer


def test_a_prediction_is_used_and_counted(demo: Served) -> None:
    plain = asked(demo)
    text = plain.choices[0].message.content
    assert plain.usage.completion_tokens_details is None
    for content in (text, [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]):
        found = asked(demo, prediction={"type": "content", "content": content})
        assert found.choices[0].message.content == text
        told = found.usage.completion_tokens_details
        assert told.accepted_prediction_tokens > found.usage.completion_tokens // 2
        assert told.rejected_prediction_tokens <= found.usage.completion_tokens
    other = asked(demo, prediction={"type": "content", "content": "quite another text " * 20})
    assert other.choices[0].message.content == text


def test_streamed(demo: Served) -> None:
    text = asked(demo).choices[0].message.content
    chunks = list(
        asked(
            demo,
            stream=True,
            stream_options={"include_usage": True},
            prediction={"type": "content", "content": text},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens > 0


def test_what_cannot_be_used(demo: Served) -> None:
    for wrong in (
        "text",
        {"type": "content"},
        {"type": "other", "content": "x"},
        {"type": "content", "content": 3},
    ):
        with pytest.raises(openai.BadRequestError, match="prediction"):
            asked(demo, prediction=wrong)
    with pytest.raises(openai.BadRequestError, match="longer than the context"):
        asked(demo, prediction={"type": "content", "content": "word " * 20_000})
    with openai.OpenAI(base_url=demo.base, api_key="x", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            max_tokens=4,
            prediction={"type": "content", "content": "x"},
            extra_body={"draft": "off"},
        )
    assert (
        "prediction is not used: nothing drafts for this request" in answer.model_extra["mlxspec"]["notices"]
    )
