"""`truncation: "auto"` of Responses: turns at the beginning of a conversation that is longer than the context are left out."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mlxspec.errors import ContextOverflowError
from mlxspec.server.fit_context import fitting
from tests.server.serving import QUESTION, Served


def size(messages: Any) -> int:
    return sum(len(m["content"]) for m in messages)


def prompt(messages: Any, most: int) -> list[Any]:
    """Messages of a token a character."""
    if size(messages) >= most:
        raise ContextOverflowError(size(messages), most)
    return list(messages)


TURNS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=12
)


@given(turns=TURNS, has_system=st.booleans(), context=st.integers(20, 300))
def test_as_few_turns_as_fit_are_left_out(turns: Any, has_system: bool, context: int) -> None:
    """Each turn is a user's message, results of tools and an answer; the last one waits for its answer."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s" * 5}] if has_system else []
    for asked, num_tools, answered in turns:
        messages.append({"role": "user", "content": "u" * asked})
        messages += [{"role": "tool", "content": "t"}] * num_tools
        messages.append({"role": "assistant", "content": "a" * answered})
    messages.pop()
    head, room = int(has_system), context // 4
    try:
        found, num = fitting(messages, prompt, context, room)
    except ContextOverflowError:
        last = max(i for i, m in enumerate(messages) if m["role"] == "user")
        assert size(messages[:head]) + size(messages[last:]) >= context
        return
    assert found == [*messages[:head], *messages[head + num :]]
    assert found[head]["role"] == "user"
    if num:
        assert size(messages) >= context
        fits = size(found) < context - room
        starts = [i for i in range(head + 1, head + num) if messages[i]["role"] == "user"]
        for earlier in starts:  # fewer would not have fitted
            assert size(messages[:head]) + size(messages[earlier:]) >= context - room
        assert fits or not any(
            m["role"] == "user" for m in found[head + 1 :]
        )  # the last turn alone may take all


def test_a_conversation_that_is_too_long_goes_on(thinker: Served) -> None:
    _, _, data = thinker.ask("GET", "/v1/models")
    context = json.loads(data)["data"][0]["context_length"]
    long = "def main(): return 0\n" * (context // 24)
    turns = [
        item
        for i in range(8)
        for item in ({"role": "user", "content": f"{i} {long}"}, {"role": "assistant", "content": f"{i}"})
    ]
    body = {
        "instructions": "Be brief.",
        "input": [*turns, {"role": "user", "content": QUESTION}],
        "max_output_tokens": 3,
        "enable_thinking": False,
    }
    status, answer = thinker.post("/v1/responses", body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    body["truncation"] = "auto"
    status, answer = thinker.post("/v1/responses", body)
    assert status == 200, answer
    assert answer["truncation"] == "auto"
    assert context // 4 < answer["usage"]["input_tokens"] < context
    assert any("left out at the beginning of the conversation" in n for n in answer["mlxspec"]["notices"])
    status, counted = thinker.post("/v1/responses/input_tokens", body)
    assert (status, counted["input_tokens"]) == (200, answer["usage"]["input_tokens"])
    status, answer = thinker.post("/v1/responses", {**body, "input": long * 40})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
