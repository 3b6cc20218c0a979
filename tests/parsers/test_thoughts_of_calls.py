"""A call in thinking: only thought of where thinking is closed behind it, made where it never is. And tags that close nothing."""

from __future__ import annotations

import random

import pytest
from planting import catches
from said_of_calls import STYLES, TOOLS, _whole

from mlxspec.parsers.formats import THINK, ChatFormat, ToolStyle
from mlxspec.parsers.pieces import CallStart, Content, Piece, Reasoning, merged

CALLS = {style: _whole(random.Random(1), style, "read") for style in STYLES}


def read(style: ToolStyle, parts: list[str], *, opened: bool = True, cut: bool = False) -> list[Piece]:
    parser = ChatFormat(thinking=THINK, tools=style).parser("", TOOLS, is_thinking=opened)
    return merged([*(p for part in parts for p in parser.push(part)), *parser.finish(cut=cut)])


@catches(
    "a call that is only thought of is made",
    "mlxspec.parsers.reasoning:ReasoningParser._go_on_held",
    lambda right: (
        lambda self, held, pieces: (
            setattr(self, "_held", None),
            setattr(self, "_state", "content"),
            self._scanner.put_back(held[0]),
        )[0]
    ),
)
@pytest.mark.parametrize("style", STYLES)
def test_a_call_that_is_only_thought_of_is_not_made(style: ToolStyle) -> None:
    text = f"I could do\n{CALLS[style]}\nbut no.\n</think>\n\nDone."
    for parts in ([text], list(text)):
        assert read(style, parts) == [Reasoning(text[: text.index("\n</think>")]), Content("Done.")]


@pytest.mark.parametrize("style", STYLES)
def test_a_call_in_thinking_that_is_never_closed_is_made(style: ToolStyle) -> None:
    text = f"I look.\n{CALLS[style]}"
    for parts in ([text], list(text)):
        first, start, *_ = read(style, parts)
        assert first == Reasoning("I look.")
        assert start == CallStart(0, "read")
    assert read(style, [text], cut=True) == [Reasoning(text)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("</think>\n\nok", "ok"),
        ("Hello\n</think>\n\nok", "Hello\nok"),
        ("The tag `</think>` and </think> stay.", "The tag `</think>` and </think> stay."),
        ("```\n</think>\n```", "```\n</think>\n```"),
        ("a </thi", "a </thi"),
    ],
)
def test_a_closing_tag_that_closes_nothing_is_dropped(text: str, wanted: str) -> None:
    for parts in ([text], list(text)):
        assert read("xml", parts, opened=False) == [Content(wanted)]


def test_a_closing_tag_in_arguments_stays() -> None:
    text = CALLS["xml"].replace("\na\n", "\nx\n</think>\ny\n")
    for parts in ([text], list(text)):
        (start, arguments) = read("xml", parts, opened=False)
        assert start == CallStart(0, "read")
        assert getattr(arguments, "text", "") == '{"path": "x\\n</think>\\ny"}'
