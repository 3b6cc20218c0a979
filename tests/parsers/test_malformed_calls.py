"""Tool calls that models write badly: the arguments are one JSON object all the same, and what was said is not lost.

Every text is read whole and character by character, and cut at every place.
"""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planting import catches, rewritten

from mlxspec.parsers.formats import THINK, ChatFormat
from mlxspec.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning, merged
from mlxspec.parsers.values import convert

pytestmark = pytest.mark.smoke

PARAMETERS = {
    "type": "object",
    "properties": {
        "cmd": {"type": "string"}, "d": {"type": "string"}, "n": {"type": "integer"}, "x": {"type": "number"},
        "a": {"type": "array", "items": {"type": "string"}}, "o": {"type": "object"}, "b": {"type": "boolean"},
        "m": {"type": ["string", "null"]},
    },
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
STYLES = ("json", "xml", "gemma4", "function-gemma")


def parse(style: str, parts: list[str], *, cut: bool = False, thinking: bool = False) -> list[Piece]:
    form = ChatFormat(tools=style, thinking=THINK if thinking else None)  # type: ignore[arg-type]
    parser = form.parser("", TOOLS, is_thinking=thinking)
    return merged([piece for part in parts for piece in parser.push(part)] + parser.finish(cut=cut))


def calls(pieces: list[Piece]) -> list[dict]:
    """Arguments of each call; each must be an object."""
    texts: list[str] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            texts.append("")
        elif isinstance(piece, CallArguments):
            texts[-1] += piece.text
    found = [json.loads(text, parse_constant=pytest.fail) for text in texts]
    assert all(isinstance(value, dict) for value in found), texts
    return found


def xml(inner: str) -> str:
    return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"


def gemma(inner: str) -> str:
    return f"<|tool_call>call:f{{{inner}}}<tool_call|>"


@catches(
    "every end of a function ends it",
    "mlxspec.parsers.readers:_END",
    lambda right: re.compile("</function>"),
    case="echo </function>",
)
@pytest.mark.parametrize(
    ("style", "text", "wanted"),
    [
        # a parameter's end is missing
        ("xml", xml("<parameter=cmd>\nls -la\n"), {"cmd": "ls -la"}),
        ("xml", xml("<parameter=cmd>\nls -la\n<parameter=d>\nq\n</parameter>\n"), {"cmd": "ls -la", "d": "q"}),
        ("xml", xml("<parameter=n>\n5\n"), {"n": 5}),
        ("xml", "<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n</tool_call>", {"n": 5}),
        # the end of a header is missing
        ("xml", xml("<parameter=cmd\nls\n</parameter>\n"), {"cmd": "ls"}),
        # tags in a value
        ("xml", xml("<parameter=cmd>\na</parameter>b\n</parameter>\n"), {"cmd": "a</parameter>b"}),
        ("xml", xml("<parameter=cmd>\necho </function> x\n</parameter>\n"), {"cmd": "echo </function> x"}),
        ("xml", xml("<parameter=cmd>\n<parameter=other>\n</parameter>\n"), {"cmd": "<parameter=other>"}),
        # null where the type allows it, and not where it says text
        ("xml", xml("<parameter=cmd>\nnull\n</parameter>\n<parameter=m>\nNone\n</parameter>\n"), {"cmd": "null", "m": None}),
        # numbers that JSON does not have
        ("xml", xml("<parameter=x>\nnan\n</parameter>\n<parameter=a>\n[1, NaN]\n</parameter>\n"), {"x": "nan", "a": "[1, NaN]"}),
        ("xml", xml("<parameter=x>\n1e400\n</parameter>\n"), {"x": 1.7976931348623157e308}),
        # Python's spelling
        ("xml", xml("<parameter=o>\n{'k': True}\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n"), {"o": {"k": True}, "b": True}),
        # a brace is missing, or one is too much, or a comma
        ("json", '<tool_call>\n{"name": "f", "arguments": {"cmd": "a"}\n</tool_call>', {"cmd": "a"}),
        ("json", '<tool_call>\n{"name": "f", "arguments": {"cmd": "a"\n</tool_call>', {"cmd": "a"}),
        ("json", '<tool_call>\n{"name": "f", "arguments": {"cmd": "a",}}\n</tool_call>', {"cmd": "a"}),
        ("json", '<tool_call>\n{"name": "f", "arguments": {"cmd": "a\nb"}}\n</tool_call>', {"cmd": "a\nb"}),
        ("json", '<tool_call>\n{"name": "f", "arguments": {"cmd": "a"}}}\n</tool_call>', {"cmd": "a"}),
        ("json", '<tool_call>\n{"name": "f", "arguments": {"a": ["x"}}\n</tool_call>', {"a": ["x"]}),
        ("json", '<tool_call>\n{"name": "f", "arguments": {"b": True, "cmd": "C:\\d"}}\n</tool_call>', {"b": True, "cmd": "C:\\d"}),
        # a value that holds the closing tag, or a whole call
        ("json", '<tool_call>\n{"name": "f", "arguments": {"cmd": "echo </tool_call> x"}}\n</tool_call>', {"cmd": "echo </tool_call> x"}),
        ("gemma4", gemma('cmd:<|"|>a<tool_call|>b<|"|>'), {"cmd": "a<tool_call|>b"}),
        ("xml", xml(f"<parameter=cmd>\nDocs:\n{xml('<parameter=d>' + chr(10) + 'x' + chr(10) + '</parameter>' + chr(10))}\n</parameter>\n"),
         {"cmd": "Docs:\n<tool_call>\n<function=f>\n<parameter=d>\nx\n</parameter>\n</function>\n</tool_call>"}),
        ("json", '<tool_call>\n{"name": "f", "arguments": {"cmd": "\\ud800"}}\n</tool_call>', {"cmd": "\ufffd\ufffd\ufffd"}),
        # plain JSON between Gemma's braces, and words without marks
        ("gemma4", gemma('a:["x","y,z"]'), {"a": ["x", "y,z"]}),
        ("gemma4", gemma("a:['x',]"), {"a": ["x"]}),
        ("gemma4", gemma('o:{"mode": "a, b"}'), {"o": {"mode": "a, b"}}),
        ("gemma4", gemma('cmd:"hello, world"'), {"cmd": "hello, world"}),
        ("gemma4", gemma("cmd:https://x.org/a,b:True"), {"cmd": "https://x.org/a", "b": True}),
        ("gemma4", gemma("cmd:one, two,n:3"), {"cmd": "one, two", "n": 3}),
        ("gemma4", gemma("cmd:123"), {"cmd": "123"}),
        ("gemma4", gemma("n:1,"), {"n": 1}),
        ("gemma4", gemma("n:1,a key:1"), {"n": 1, "a key": 1}),
        ("gemma4", gemma("n:"), {"n": ""}),
        ("gemma4", gemma('n:<|"|>5<|"|>,cmd:<|"|>5<|"|>'), {"n": 5, "cmd": "5"}),
        ("gemma4", gemma('o:{k:[1,{j:<|"|>}<|"|>}]}'), {"o": {"k": [1, {"j": "}"}]}}),
    ],
)  # fmt: skip
def test_a_bad_call_is_read_as_it_was_meant(style: str, text: str, wanted: dict) -> None:
    found = parse(style, [text])
    assert calls(found) == [wanted]
    assert parse(style, list(text)) == found
    for end in range(len(text)):
        assert calls(parse(style, [text[:end]], cut=True)) in ([], [wanted])
        calls(parse(style, [text[:end]]))


_FRAGMENTS = {
    "xml": ["<parameter=", "cmd", "n", "other", ">", "\n", "</parameter>", "</function>", "</tool_call>", "5", "a b", "null", "<", '"'],
    "json": ['{"name": "f"', ', "arguments": ', "{", "}", "[", "]", ",", ":", '"', '"cmd"', "a", "\\", "\n", "5", "tru", "-", " "],
    "gemma4": ["cmd", "n", "o", ":", ",", "{", "}", "[", "]", '<|"|>', '"', "'", "a b", "5", "True", "\\", "<|", "\n"],
    "function-gemma": ["cmd", "n", "o", ":", ",", "{", "}", "[", "]", "<escape>", '"', "a b", "5", "<esc", "\n"],
}  # fmt: skip
_HEADS = {
    "xml": "<tool_call>\n<function=f>\n<parameter=cmd>\n",
    "json": '<tool_call>\n{"name": "f", "arguments": {"',
    "gemma4": "<|tool_call>call:f{cmd:",
    "function-gemma": "<start_function_call>call:f{cmd:",
}


@pytest.mark.parametrize("style", STYLES)
@given(data=st.data())
def test_arguments_are_one_object_whatever_the_model_writes(style: str, data: st.DataObject) -> None:
    text = _HEADS[style] + "".join(data.draw(st.lists(st.sampled_from(_FRAGMENTS[style]), max_size=20)))
    is_cut = data.draw(st.booleans())
    found = parse(style, [text], cut=is_cut)
    calls(found)
    assert parse(style, list(text), cut=is_cut) == found


def test_arguments_that_come_twice_count_once() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}, "arguments": {"name": "f"}}\n</tool_call>'
    for parts in ([text], list(text)):
        assert calls(parse("json", parts)) == [{"name": "f"}]


def test_a_broken_call_in_small_pieces_is_the_same_text() -> None:
    """Where it turns out to be none, what stands behind it may have come in an earlier piece."""
    text = '<tool_call>{, "arguments": tru{"name": "f"'
    assert parse("json", list(text)) == parse("json", [text]) == [Content(text)]


@pytest.mark.parametrize(
    ("style", "call"),
    [
        ("xml", xml("<parameter=n>\n5\n</parameter>\n")),
        ("json", '<tool_call>\n{"name": "f", "arguments": {"n": 5}}\n</tool_call>'),
    ],
)
def test_a_call_of_a_known_tool_ends_thinking_that_was_not_closed(style: str, call: str) -> None:
    text = f"I should look.\n{call}"
    found = parse(style, [text], thinking=True)
    assert calls(found) == [{"n": 5}]
    assert "".join(p.text for p in found if isinstance(p, Reasoning)) == "I should look."
    assert parse(style, list(text), thinking=True) == found


def test_other_tags_in_thinking_are_thoughts() -> None:
    text = "A <tool_call> would need <function=g> and <tool_call>\n<function=g>.\n</think>\n\nDone."
    found = parse("xml", [text], thinking=True)
    assert found[-1] == Content("Done.")
    assert calls(found) == []
    assert parse("xml", list(text), thinking=True) == found


@catches(
    "a whole number with a point stays a float",
    "mlxspec.parsers.values:convert",
    lambda right: lambda text, kinds: float(text) if "." in text else right(text, kinds),
)
@catches(
    "a whole number with an exponent stays a float",
    "mlxspec.parsers.values:_number",
    rewritten("return int(value) if value.is_integer() else value", "return value"),
)
@pytest.mark.parametrize("kinds", [{"integer"}, {"number"}, {"integer", "null"}, {"string", "integer"}])
@given(st.integers(-(10**6), 10**6), st.sampled_from(["{}", " {}\n", "{}.0", "{}.", "{}e0", "{}.00E+0"]))
def test_a_whole_number_is_one_however_it_is_written(kinds: set[str], number: int, form: str) -> None:
    """Clients whose schema asks for an integer refuse 5.0."""
    found = convert(form.format(number), kinds)
    assert (type(found), found) == (int, number)
