"""A long tool call that comes a few characters at a time: each character is handled a bounded number of times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from time import process_time
from typing import Any, SupportsIndex

import pytest

from mlxspec.parsers.formats import ChatFormat
from mlxspec.parsers.pieces import CallArguments, CallStart, Content, Piece, merged

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {"properties": {"text": {"type": "string"}, "rows": {"type": "array"}}},
        },
    }
]
TEXT = 'a line of \\ "text" that says little\n'
STEP = 5  # characters at a time
PER_CHARACTER = 6  # that may be written for each one read, in strings of any kind


class Counted(str):
    """Text that counts the characters of every string made from it, and gives the same to what is made."""

    written = 0

    def _made(self, text: str) -> Counted:
        Counted.written += len(text)
        return Counted(text)

    def __add__(self, other: str) -> Counted:
        return self._made(str(self) + str(other))

    def __radd__(self, other: str) -> Counted:
        return self._made(str(other) + str(self))

    def __getitem__(self, key: SupportsIndex | slice) -> Counted:
        return self._made(str(self)[key])

    def __iter__(self) -> Iterator[Counted]:
        return map(self._made, str(self))

    def strip(self, *given: Any) -> Counted:
        return self._made(str(self).strip(*given))

    def lstrip(self, *given: Any) -> Counted:
        return self._made(str(self).lstrip(*given))

    def rstrip(self, *given: Any) -> Counted:
        return self._made(str(self).rstrip(*given))

    def removeprefix(self, prefix: str, /) -> Counted:
        return self._made(str(self).removeprefix(prefix))

    def removesuffix(self, suffix: str, /) -> Counted:
        return self._made(str(self).removesuffix(suffix))


def cut(text: str) -> list[Counted]:
    return [Counted(text[i : i + STEP]) for i in range(0, len(text), STEP)]


def written(style: str, num_lines: int) -> str:
    value = {"text": TEXT * num_lines, "rows": [TEXT] * num_lines}
    one, rows = json.dumps(value), json.dumps(value["rows"])
    return {
        "json": f'<tool_call>\n{{"name": "write", "arguments":  {one}}}\n</tool_call>',
        "arguments first": f'<tool_call>\n{{"arguments":  {one}, "name": "write"}}\n</tool_call>',
        "arguments as text": f'<tool_call>\n{{"name": "write", "arguments": {json.dumps(one)}}}\n</tool_call>',
        "xml": f"<tool_call>\n<function=write>\n<parameter=text>\n{value['text']}\n</parameter>\n<parameter=rows>\n{rows}\n</parameter>\n"
        "</function>\n</tool_call>",
        "never a call": f'<tool_call>\n{{"arguments": {one}, "other": 1}}',
    }[style]


STYLES = ["json", "arguments first", "arguments as text", "xml", "never a call"]


def parse(style: str, pieces: list[Counted]) -> list[Piece]:
    parser = ChatFormat(tools="xml" if style == "xml" else "json").parser("assistant\n", TOOLS)
    found: list[Piece] = []
    for piece in pieces:
        found += parser.push(piece)
    return merged(found + parser.finish())


@pytest.mark.parametrize("style", STYLES)
def test_each_character_is_handled_a_bounded_number_of_times(style: str) -> None:
    for num_lines in (20, 200):
        text = written(style, num_lines)
        pieces, Counted.written = cut(text), 0
        found = parse(style, pieces)
        assert Counted.written <= PER_CHARACTER * len(text), (num_lines, Counted.written / len(text))
        if style == "never a call":
            assert found == [Content(text)]
        else:
            start, arguments = found
            assert start == CallStart(0, "write")
            assert isinstance(arguments, CallArguments)
            assert json.loads(arguments.text) == {"text": TEXT * num_lines, "rows": [TEXT] * num_lines}


def test_the_count_sees_text_that_is_copied_for_each_piece() -> None:
    """Otherwise the test above could not fail."""
    pieces, Counted.written = cut(written("json", 20)), 0
    whole = ""
    for piece in pieces:
        whole += piece
    assert Counted.written > len(pieces) * len(whole) / 3


@pytest.mark.parametrize("before", ['[write(text="")', '```json\n{"arguments": 1', "[TOOL_CALLS][1]"])
def test_endless_white_space_takes_little_time(before: str) -> None:
    """An expression that looks at the rest again from each character would take most of a minute."""
    text = before + " " * 300_000 + "x"
    parser = ChatFormat(tools="xml").parser("", TOOLS)
    began = process_time()
    assert merged([*parser.push(text), *parser.finish()]) == [Content(text)]
    assert process_time() - began < 5


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ("xml", '<|tool_call>call:write{text:<|"|>' + "a, b: {c} " * 20_000 + '<|"|>}<tool_call|>'),
        (
            "gemma4",
            '<tool_call>{"name": "write", "arguments": {"text": "'
            + "a, b: {c} " * 20_000
            + '"}}</tool_call>',
        ),
    ],
)
def test_a_long_call_in_a_foreign_notation_takes_little_time(own: Any, text: str) -> None:
    """mlx-lm's own parser of Gemma's notation takes time as the square of the length."""
    parser = ChatFormat(tools=own).parser("", TOOLS)
    began = process_time()
    start, arguments = merged([*parser.push(text), *parser.finish()])
    assert process_time() - began < 5
    assert start == CallStart(0, "write")
    assert isinstance(arguments, CallArguments)
    assert json.loads(arguments.text) == {"text": "a, b: {c} " * 20_000}


def test_what_may_be_a_whole_answer_of_calls_is_held_back_so_long_at_most() -> None:
    parser = ChatFormat(tools="xml").parser("", TOOLS)
    text = '{"name": "write", "arguments": {"text": "' + "x" * 300_000
    assert merged(parser.push(text[:1000])) == []
    assert merged([*parser.push(text[1000:])]) == [Content(text)]
    assert merged([*parser.push("y"), *parser.finish()]) == [Content("y")]
