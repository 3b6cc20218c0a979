"""What is only said of calls is text, and none of it is lost; what is a call is one, in the model's own notation and in others'."""

from __future__ import annotations

import json
from typing import Any

import pytest
from planting import catches
from said_of_calls import STYLES, TOOLS, faults, pieces_of

from mlxspec.parsers.formats import ChatFormat, ToolStyle
from mlxspec.parsers.pieces import CallArguments, CallStart, Content, Piece, merged

CALL = {"path": "a b"}
OTHER_FORMS = {
    "bare": '{"name": "read", "arguments": {"path": "a b"}}',
    "fenced": '```json\n{"name": "read", "arguments": {"path": "a b"}}\n```',
    "with parameters": '\n{"name": "read", "parameters": {"path": "a b"}}\n',
    "OpenAI's": '{"type": "function", "function": {"name": "read", "arguments": "{\\"path\\": \\"a b\\"}"}}',
    "Llama's": '<|python_tag|>{"name": "read", "parameters": {"path": "a b"}}',
    "Python's": "[read(path='a b')]",
    "Mistral's list": '[TOOL_CALLS][{"name": "read", "arguments": {"path": "a b"}}]',
    "Mistral's": '[TOOL_CALLS]read[ARGS]{"path": "a b"}',
    "DeepSeek's": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>read\n```json\n{"path": "a b"}\n```<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "DeepSeek's later": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>read<｜tool▁sep｜>{"path": "a b"}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "Kimi's": '<|tool_calls_section_begin|><|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>{"path": "a b"}<|tool_call_end|>'
    "<|tool_calls_section_end|>",
    "GLM's": "<tool_call>read\n<arg_key>path</arg_key>\n<arg_value>a b</arg_value>\n</tool_call>",
    "invoke": '<function_calls>\n<invoke name="read">\n<parameter name="path">a b</parameter>\n</invoke>\n</function_calls>',
    "Qwen's": "<tool_call>\n<function=read>\n<parameter=path>\na b\n</parameter>\n</function>\n</tool_call>",
    "Qwen's as JSON": '<tool_call>\n{"name": "read", "arguments": {"path": "a b"}}\n</tool_call>',
    "Gemma's": '<|tool_call>call:read{path:<|"|>a b<|"|>}<tool_call|>',
}


def calls(pieces: list[Piece]) -> list[tuple[str, Any]]:
    names = [p.name for p in pieces if isinstance(p, CallStart)]
    texts = [
        "".join(p.text for p in pieces if isinstance(p, CallArguments) and p.index == i)
        for i in range(len(names))
    ]
    return [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]


def text_of(pieces: list[Piece]) -> str:
    return "".join(p.text for p in pieces if isinstance(p, Content))


@catches(
    "a call is read in code too",
    "mlxspec.parsers.place:Place._count",
    lambda right: lambda self, part: None,
)
@catches(
    "every place begins a line",
    "mlxspec.parsers.tools:ToolParser._go_on",
    lambda right: (
        lambda self, pieces: (
            right(self, pieces) if setattr(self._place, "begins_line", True) is None else False
        )
    ),
    case="xml",
)
@pytest.mark.parametrize("style", STYLES)
def test_what_is_said_of_calls_is_text(style: ToolStyle) -> None:
    assert faults(300, style, 0) == []


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_ten_thousand_sentences_hold_no_call(style: ToolStyle) -> None:
    assert faults(2500, style, 1) == []


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("before", ["", "I look.\n", "I look. ", "See `x`. ", "```sh\nls\n```\n"])
def test_a_closed_call_of_a_declared_tool_is_a_call(style: ToolStyle, before: str) -> None:
    """Also one within a line. One that is not closed is text."""
    text = {
        "json": '<tool_call>\n{"name": "read", "arguments": {"path": "a b"}}\n</tool_call>',
        "xml": OTHER_FORMS["Qwen's"],
        "gemma4": OTHER_FORMS["Gemma's"],
        "function-gemma": "<start_function_call>call:read{path:<escape>a b<escape>}<end_function_call>",
    }[style]
    for parts in ([before + text], list(before + text)):
        found = pieces_of(style, parts)
        assert (calls(found), text_of(found)) == ([("read", CALL)], before.rstrip())
    open_ended = before + text[: text.index("a b")]
    assert pieces_of(style, [open_ended]) == [Content(open_ended)]


@pytest.mark.parametrize(("style", "is_call"), [("xml", True), ("json", True), ("gemma4", False)])
def test_without_the_tag_a_call_begins_a_line_and_is_closed(style: ToolStyle, is_call: bool) -> None:
    call = "<function=read>\n<parameter=path>\na b\n</parameter>\n</function>"
    assert (calls(pieces_of(style, [f"I look.\n{call}\n"])) == [("read", CALL)]) is is_call
    for text in (
        f"I look. {call}",
        "I look.\n" + call.removesuffix("</function>"),
        call.replace("read", "other"),
    ):
        assert pieces_of("xml", list(text)) == [Content(text)]


def test_a_call_behind_one_that_is_not_closed_counts() -> None:
    text = (
        f"So <tool_call>\n<function=f>\n<parameter=path>\nand so on.\n\n{OTHER_FORMS['Qwen' + chr(39) + 's']}"
    )
    for parts in ([text], list(text)):
        found = pieces_of("xml", parts)
        assert [name for name, _ in calls(found)] == ["read"]
        assert text_of(found) == text[: text.index("\n\n<tool_call>")]


@pytest.mark.parametrize("style", ["xml", "json", "gemma4"])
@pytest.mark.parametrize("name", OTHER_FORMS)
def test_an_answer_that_is_nothing_but_a_call_of_another_notation_is_a_call(
    style: ToolStyle, name: str
) -> None:
    text = OTHER_FORMS[name]
    for parts in ([text], list(text)):
        assert calls(pieces_of(style, parts)) == [("read", CALL)]
    other = text.replace("read", "other")
    for none in (other, f"{text} is it.", text[:-1] if not text.endswith("\n") else text[:-2]):
        parser = ChatFormat(tools="json" if style == "gemma4" else "gemma4").parser("", TOOLS)
        found = merged([*parser.push(none), *parser.finish()])
        if not any(isinstance(p, CallStart) for p in found):
            assert found == [Content(none)]


def test_text_that_can_be_no_call_is_not_held_back() -> None:
    for text in (
        '{"answer": 1',
        "[1, 2",
        "```python\nprint(",
        '{"name": "Bob"',
        "[link](",
        '{"type": "object"',
        "`x`",
        "<a",
    ):
        parser = ChatFormat(tools="xml").parser("", TOOLS)
        assert text_of(parser.push(text)) == text


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('Call it so: {"name": "read", "arguments": {"path": "a"}}', "read"),
        ('{"name": "other", "arguments": {}}', "other"),
        (
            "<tool_call>\n<function=other>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>",
            "other",
        ),
        ('So: <invoke name="read">', "read"),
        ("<|tool_call_start|>[other(path='a')]<|tool_call_end|>", "other"),
        ("<tool_call>other\n<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n</tool_call>", "other"),
        ("Nothing of the kind, read(path).", None),
        ("The `<function=name>` form.", None),
        ("[read(path)](https://example.com) is a link.", None),
    ],
)
def test_what_looks_like_a_call_and_is_text_is_told(text: str, name: str | None) -> None:
    parser = ChatFormat(tools="xml").parser("", TOOLS)
    found = merged([*parser.push(text), *parser.finish()])
    assert found == [Content(text)]
    assert [notice.split(" is text")[0] for notice in parser.notices] == (
        [f"What looks like a call of {name}"] if name else []
    )
