"""A client whose prompts stop sharing their beginning is told of in the log, once, by position and without text."""

from __future__ import annotations

import random
from typing import Any

from mlxspec.server.prompt_watch import PromptWatch
from tests.server.serving import Served
from tests.server.test_messages import BILLING


def tokens(seed: int, num: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(150_000) for _ in range(num)]


def test_a_changed_token_near_the_beginning_is_told_once() -> None:
    watch = PromptWatch(least=100)
    head, body = tokens(1, 20), tokens(2, 400)
    assert watch.see("a", [*head, 7, *body]) is None
    assert watch.see("a", tokens(9, 300)) is None  # another conversation of the same client
    said = watch.see("a", [*head, 8, *body, *tokens(3, 60)])
    assert said is not None
    assert "token 21 of 481 " in said
    assert watch.see("a", [*head, 9, *body, *tokens(3, 60)]) is None
    assert watch.see("b", [*head, 9, *body]) is None  # another client


def test_a_line_of_another_length_is_found_too() -> None:
    for more in (1, 2, 3, 5):
        watch = PromptWatch(least=100)
        watch.see("a", tokens(1, 20) + tokens(2, 400))
        assert watch.see("a", tokens(1, 20) + tokens(5, more) + tokens(2, 400)) is not None


def test_what_is_no_changed_beginning() -> None:
    watch = PromptWatch(least=100)
    body = tokens(2, 400)
    for prompt in (
        body,
        body + tokens(3, 50),
        body[:300] + tokens(4, 90),
        tokens(5, 400),
        body + tokens(6, 900),
    ):
        assert watch.see("a", prompt) is None
    assert PromptWatch(least=100).see("a", []) is None
    short = PromptWatch(least=100)
    short.see("a", [1, *body[:90]])
    assert short.see("a", [2, *body[:90]]) is None


def test_little_is_remembered() -> None:
    watch = PromptWatch(least=10, most_clients=3, most_prompts=2, most_bytes=4000)
    for i in range(50):
        watch.see(f"client {i % 7}", tokens(i, 200))
        kept = [prompt for known in watch._clients.values() for prompt in known.prompts]
        assert watch._num_bytes == sum(map(len, kept)) <= 4000
        assert len(watch._clients) <= 3
    for i in range(5):
        watch.see("one", tokens(i, 50))
    assert len(watch._clients["one"].prompts) == 2


def test_the_log_tells_where_prompts_differ(thinker: Served) -> None:
    """A billing line that a chat completion keeps: the log has one line about it, and none of its words."""
    document = " ".join(f"v{i} word" for i in range(210))
    for turn in range(3):
        system = f"{BILLING.format(f'{turn:05x}')} {document}"
        asked: dict[str, Any] = {
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": "hello"}],
            "max_tokens": 1,
        }
        status, _, data = thinker.ask(
            "POST", "/v1/chat/completions", asked, headers={"User-Agent": "watched"}
        )
        assert status == 200, data
    thinker.wait_for(r"no longer begin alike.* token \d+ of 1\d{3} is the first")
    said = [line for line in thinker.lines if "no longer begin alike" in line]
    assert len(said) == 1
    assert not [line for line in thinker.lines if "billing" in line or "cc_version" in line]
