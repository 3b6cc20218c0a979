"""What a message of gpt-oss's channels is, by its channel and the function that it goes to, while it is read and when it has ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from planting import catches

from mlxspec.parsers.channels import ChannelParser
from mlxspec.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning, merged

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
BODY = '{"a": 1}'
CALL: list[Piece] = [CallStart(0, "look"), CallArguments(0, BODY)]


def not_to_nobody(right: Callable[[ChannelParser], None]) -> Callable[[ChannelParser], None]:
    def opened(self: ChannelParser) -> None:
        head = self._head or ""
        right(self)
        self._is_thought = self._is_thought and " to=" not in head

    return opened


@catches(
    "a call that the analysis makes is a thought",
    "mlxspec.parsers.channels:ChannelParser._open",
    lambda right: (
        lambda self: (right(self), setattr(self, "_is_thought", self._is_thought or bool(self._name)))[0]
    ),
    case="analysis for a tool",
)
@catches(
    "what the analysis says to an unknown function is content",
    "mlxspec.parsers.channels:ChannelParser._open",
    not_to_nobody,
    case="analysis for nobody",
)
@pytest.mark.parametrize(
    ("head", "is_thinking", "pieces"),
    [
        ("analysis", True, [Reasoning(BODY)]),
        ("analysis to=functions.look", False, CALL),
        ("analysis to=functions.none", True, [Reasoning(BODY)]),
        ("commentary to=functions.look <|constrain|>json", False, CALL),
        ("commentary to=functions.none <|constrain|>json", False, [Content(BODY)]),
        ("final", False, [Content(BODY)]),
    ],
    ids=["analysis", "analysis for a tool", "analysis for nobody", "a call", "a call of nobody", "final"],
)
def test_what_a_message_is(head: str, is_thinking: bool, pieces: list[Piece]) -> None:
    parser = ChannelParser(TOOLS)
    found = parser.push(f"<|channel|>{head}<|message|>{BODY}")
    assert parser.is_thinking == is_thinking
    found += [*parser.push("<|end|>"), *parser.finish()]
    assert merged(found) == pieces
    assert not parser.is_thinking
