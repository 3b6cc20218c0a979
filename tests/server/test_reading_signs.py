"""What clients receive while a long prompt is read in pieces that are quicker than the server's pauses: events, also through the SDKs,
since some clients count no comments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server import chromium
from tests.server.page_window import ask, home_of
from tests.server.serving import LONG, Served

SLOW = """
import time
import mlxspec.server.settings as settings
from mlxspec.engine.prefill import Prefill
advance = Prefill.advance
def slow(self, end):
    time.sleep(0.02)
    self.request.stats.prefill_seconds += 0.02
    return advance(self, end)
Prefill.advance = slow
settings.ServerConfig.__init__.__kwdefaults__["keepalive_seconds"] = 0.2
"""


@pytest.fixture(scope="module")
def slow() -> Iterator[Served]:
    """A server that reads pieces of 32 tokens in 20 ms at least."""
    with Served("--prefill-chunk", "32", plant=SLOW) as served:
        yield served


def long(word: str) -> list[Any]:
    return [{"role": "user", "content": " ".join(f"{word}{i}" for i in range(200))}]


def test_messages_are_pinged(slow: Served) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")
    with anthropic.Anthropic(base_url=slow.base.removesuffix("/v1"), api_key="none", timeout=LONG) as client:
        stream = client.messages.create(model="demo", max_tokens=3, messages=long("a"), stream=True)
        kinds = [event.type for event in stream]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")  # the SDK keeps pings to itself
    body = {"model": "demo", "max_tokens": 3, "messages": long("b"), "stream": True}
    assert slow.ask("POST", "/v1/messages", body)[2].count(b'"type": "ping"') > 3


def test_responses_tell_that_they_go_on(slow: Served) -> None:
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    with (
        openai.OpenAI(base_url=slow.base, api_key="none", max_retries=0, timeout=LONG) as client,
        client.responses.stream(model="demo", max_output_tokens=3, input=long("c")) as stream,
    ):
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[: kinds.index("response.output_item.added")].count("response.in_progress") > 4
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.status == "incomplete"


def test_ollamas_client_receives_empty_pieces(slow: Served) -> None:
    ollama = pytest.importorskip("ollama", reason="the ollama package is not installed")
    options = {"num_predict": 3, "temperature": 0}
    with ollama.Client(host=slow.base.removesuffix("/v1"), timeout=LONG) as client:
        pieces = list(client.chat("demo", long("e"), stream=True, think=False, options=options))
    texts = [piece.message.content for piece in pieces]
    first = next(i for i, text in enumerate(texts) if text)
    assert first > 3
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].prompt_eval_count > 200


def test_progress_counts_from_when_a_prompt_begins_to_be_read(slow: Served) -> None:
    """What the prefix cache had took no time; tokens and milliseconds then grow alike."""
    asked = {"messages": long("d"), "max_tokens": 2, "return_progress": True}
    for is_second in (False, True):
        steps = [
            c["prompt_progress"]
            for c in slow.stream("/v1/chat/completions", asked)[0]
            if "prompt_progress" in c
        ]
        assert (steps[0]["cache"] > 0) == is_second
        assert steps[0]["processed"] == steps[0]["cache"]
        assert steps[0]["time_ms"] == 0
        times = [step["time_ms"] for step in steps]
        assert times == sorted(times)
        num_pieces = len(steps) - 1
        assert times[-1] >= 20 * num_pieces


@pytest.mark.slow
def test_the_page_says_how_long_a_prompt_takes(window: chromium.Browser, slow: Served) -> None:
    home = home_of(slow.port)
    window.forget(home)
    window.open(home)
    window.until("document.querySelector('#model-facts').textContent")
    window.js(
        "window.told = new Set(); new MutationObserver(() => window.told.add(document.querySelector('#turns').textContent))"
        ".observe(document.querySelector('#turns'), {subtree: true, childList: true, characterData: true})"
    )
    ask(window, long("e")[0]["content"])
    told = "\n".join(window.js("[...window.told]"))
    assert re.search(r"Reading the prompt: \d+ of \d+ tokens, \d+ a second, \d+ s left\.", told), told[:500]
