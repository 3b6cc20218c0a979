"""Thinking that loops is closed by default; every API says so, and it is counted."""

from __future__ import annotations

from typing import Any

import pytest

from mlxspec.sampling.loops import DELAY, EVERY, LEAST
from tests.server.serving import Served

SAID = "thinking looped and was closed: it repeats every 1 tokens (loop_breaker)"
THOUGHT = -(-LEAST // EVERY) * EVERY + DELAY
MOST = THOUGHT + 20  # tokens of an answer
LOOPS: dict[str, Any] = {"logit_bias": {"300": 100}, "ignore_eos": True}
USER = {"role": "user", "content": "Think."}
CHAT = {"messages": [USER], "max_tokens": MOST, **LOOPS}


def answered(thinker: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The notices of an answer, and what it was counted as."""
    before = thinker.settle()["mlxspec_loops_total"]
    status, answer = thinker.post(path, {"model": "demo", **body})
    assert status == 200, answer
    num = thinker.settle()["mlxspec_loops_total"] - before
    return {"notices": answer["mlxspec"]["notices"], "num": num, "answer": answer}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT),
        ("/v1/responses", {"input": [USER], "max_output_tokens": MOST, **LOOPS}),
        ("/api/chat", {"messages": [USER], "stream": False, "options": {"num_predict": MOST, **LOOPS}}),
        ("/completion", {"prompt": "Think. <think>", "n_predict": MOST, **LOOPS}),
    ],
    ids=["chat", "messages", "responses", "ollama", "llama.cpp"],
)
def test_a_loop_is_named_and_counted(thinker: Served, path: str, body: dict[str, Any]) -> None:
    found = answered(thinker, path, body)
    assert (found["notices"], found["num"]) == ([SAID], 1)


def test_only_what_loops_inside_thinking_is_closed(thinker: Served) -> None:
    for more in ({"loop_breaker": "off"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        found = answered(thinker, "/v1/chat/completions", {**CHAT, **more})
        assert (found["notices"], found["num"]) == ([], 0)
    chunks, _, is_done = thinker.stream(
        "/v1/chat/completions", {"model": "demo", "messages": [USER], **LOOPS}
    )
    assert is_done
    (last,) = [c for c in chunks if "mlxspec" in c]
    assert last["mlxspec"]["notices"] == [SAID]
