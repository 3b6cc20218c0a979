"""Reasoning and the rest, where what looks like a call in thinking is none, or thinking never ends; however the text is cut."""

from __future__ import annotations

from typing import Any

import pytest
from planting import catches

from mlxspec.parsers.pieces import Content, Piece, Reasoning
from mlxspec.parsers.reasoning import ReasoningParser

TAGS, CALL = ("<think>", "</think>"), "<tool_call>"


def begins_call(inner: str) -> bool:
    return not inner.strip() or inner.lstrip().startswith("{")


def parsed(pieces: list[str], *, cut: bool) -> tuple[str, str]:
    """Reasoning and content."""
    parser = ReasoningParser(TAGS, opened=True, call=(CALL, begins_call))
    found: list[Piece] = [piece for text in pieces for piece in parser.push(text)]
    found += parser.finish(cut=cut)
    thought = "".join(p.text for p in found if isinstance(p, Reasoning))
    return thought, "".join(p.text for p in found if isinstance(p, Content))


def without_tag(right: Any) -> Any:
    """A scanner that is given back all but a tag at the end."""
    return lambda self, text: right(self, text.removesuffix(TAGS[1]))


@catches(
    "a closing tag behind what was no call is lost",
    "mlxspec.parsers.pieces:Scanner.put_back",
    without_tag,
    case="no call",
)
@pytest.mark.parametrize(
    ("text", "cut", "thought", "content"),
    [
        (f"so\n{CALL}\nit is none</think>\nyes", False, f"so\n{CALL}\nit is none", "yes"),
        (f'so\n{CALL}{{"a": 1}}</think>yes', False, f'so\n{CALL}{{"a": 1}}', "yes"),
        (f'so\n{CALL}{{"a": 1}}</thi', False, "so", f'{CALL}{{"a": 1}}</thi'),
        (f'so\n{CALL}{{"a": 1}}</thi', True, f'so\n{CALL}{{"a": 1}}', ""),
        ("so</thi", False, "so</thi", ""),
        ("so</thi", True, "so", ""),
    ],
    ids=["no call", "a thought", "not closed", "a limit in a call", "a tag begun", "a limit in a tag"],
)
def test_what_was_held_back_is_given(text: str, cut: bool, thought: str, content: str) -> None:
    for at in range(len(text) + 1):
        assert parsed([text[:at], text[at:]], cut=cut) == (thought, content), at
    assert parsed(list(text), cut=cut) == (thought, content)
