"""An agent's conversation of ten turns with tool calls, under a header that changes with each request: what is cached, with and without the
handling of that header."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server import agent_turns
from tests.server.serving import Served


def turns(served: Served, path: str, num_turns: int) -> list[agent_turns.ClientTurn]:
    def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, answer = served.post(path, body)
        assert status == 200, answer
        return answer

    return agent_turns.agent_turns(ask, path, num_turns)


def test_a_changing_header_does_not_defeat_the_prefix_store(demo: Served) -> None:
    """From the second turn on at least 95 % of the prompts' tokens are cached; where the header is kept, only the tools, which stand before
    it."""
    handled = turns(demo, agent_turns.MESSAGES, 10)
    assert agent_turns.cached_share(handled) >= 0.95, handled
    kept = turns(demo, agent_turns.CHAT, 3)
    assert agent_turns.cached_share(kept) <= 0.15, kept


@pytest.mark.slow
def test_where_the_header_is_kept_all_is_read_again_at_each_turn(demo: Served) -> None:
    kept = turns(demo, agent_turns.CHAT, 10)
    assert agent_turns.cached_share(kept) <= 0.15, kept
