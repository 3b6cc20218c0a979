"""However an answer is cut into pieces, it parses to the same; and calls say what mlx-lm's own parsers read in the whole text."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.parsers.formats import CHANNEL, THINK, AnswerParser, ChatFormat, detect
from mlxspec.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning, merged

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "share": {"type": "number"},
                    "yes": {"type": "boolean"},
                    "things": {"type": "array"},
                    "more": {"type": "object"},
                },
            },
        },
    }
    for name in ("look", "write-file")
]
FORMATS = {
    "xml": ChatFormat(thinking=THINK, tools="xml"),
    "json": ChatFormat(thinking=THINK, tools="json"),
    "gemma4": ChatFormat(thinking=CHANNEL, tools="gemma4"),
    "function-gemma": ChatFormat(tools="function-gemma"),
}
# pieces of which hostile and friendly texts are made
FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=look>", "<function=", "</function>",
    "<parameter=text>", "<parameter=count>", "</parameter>", "\n", " ", "null", "12", "true",
    '{"name": "look", ',
    '"arguments": {"text": "a<b}"}}',
    '{"name":"look"}', '"arguments": ', '"parameters": ', '"', "\\", "{", "}", "[", "]", ":", ",", "é", "<",
    "<|tool_call>", "<tool_call|>", "call:look{", "call:", '<|"|>', "text:", "<|channel>thought", "<channel|>", "<start_function_call>",
    "<end_function_call>", "<escape>", "word", "</", "<tool",
]  # fmt: skip


def parse(form: ChatFormat, pieces: list[str], prompt: str = "") -> list[Piece]:
    parser: AnswerParser = form.parser(prompt, TOOLS)
    found: list[Piece] = []
    for piece in pieces:
        found += parser.push(piece)
    return merged(found + parser.finish())


def cut(text: str, places: list[int]) -> list[str]:
    marks = sorted({0, len(text), *(p % (len(text) + 1) for p in places)})
    return [text[a:b] for a, b in zip(marks, marks[1:], strict=False)] or [""]


texts = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join)
places = st.lists(st.integers(0, 10**6), max_size=40)


@given(texts, places, st.sampled_from(sorted(FORMATS)), st.booleans())
def test_any_cut_gives_the_same(text: str, where: list[int], name: str, opened: bool) -> None:
    form = FORMATS[name]
    prompt = form.thinking[0] + "\n" if opened and form.thinking else "assistant\n"
    whole = parse(form, [text], prompt)
    assert parse(form, cut(text, where), prompt) == whole
    assert parse(form, list(text), prompt) == whole


words = st.text("ab <>{}[]:,\"'\\\n/é\u2028", max_size=12)
values = {
    "text": words.filter(lambda w: "<" not in w),
    "count": st.integers(-(10**9), 10**9),
    "share": st.floats(allow_nan=False, allow_infinity=False),
    "yes": st.booleans(),
    "things": st.lists(st.one_of(words.filter(lambda w: "<" not in w), st.integers(-5, 5)), max_size=3),
    "more": st.dictionaries(
        st.text("kxy_", min_size=1, max_size=3), st.one_of(st.integers(0, 9), st.booleans()), max_size=3
    ),
}
arguments = st.fixed_dictionaries({}, optional=values)
calls = st.lists(st.tuples(st.sampled_from(["look", "write-file"]), arguments), min_size=1, max_size=3)


def gemma(value: Any, mark: str) -> str:
    if isinstance(value, str):
        return mark + value + mark
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma(v, mark)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma(v, mark) for v in value) + "]"
    return json.dumps(value)


def written(style: str, name: str, given_: dict[str, Any]) -> str:
    """A call as a model of this style writes it."""
    if style == "json":
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': given_}, ensure_ascii=False)}\n</tool_call>"
    if style == "xml":
        body = "".join(
            f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n"
            for k, v in given_.items()
        )
        return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"
    if style == "gemma4":
        return f"<|tool_call>call:{name}{gemma(given_, '<|' + chr(34) + '|>')}<tool_call|>"
    return f"<start_function_call>call:{name}{gemma(given_, '<escape>')}<end_function_call>"


def read(pieces: list[Piece]) -> list[tuple[str, Any]]:
    """Calls of a parsed answer."""
    out = []
    for place, piece in enumerate(pieces):
        if isinstance(piece, CallStart):
            assert piece.index == len(out)
            arguments_ = pieces[place + 1]
            assert isinstance(arguments_, CallArguments)
            out.append((piece.name, json.loads(arguments_.text)))
    return out


@given(calls, places, st.sampled_from(sorted(FORMATS)), st.sampled_from(["", "Let me see.", "{"]))
def test_calls_are_read_as_they_were_meant(made, where: list[int], style: str, before: str) -> None:
    text = "\n".join([before, *(written(style, n, a) for n, a in made)]) + "\n"
    pieces = parse(FORMATS[style], cut(text, where))
    assert read(pieces) == made
    content = [p for p in pieces if isinstance(p, Content)]
    assert content == ([Content(before)] if before else [])


def mlx_lm_parser(name: str) -> Any:
    """One of mlx-lm's, loaded by itself: the package around it takes seconds to import."""
    package = importlib.util.find_spec("mlx_lm")
    assert package is not None
    path = Path(package.submodule_search_locations[0]) / "tool_parsers" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"mlx_lm_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MLX_LM = {"xml": "qwen3_coder", "json": "json_tools", "gemma4": "gemma4"}


@given(calls, st.sampled_from(sorted(MLX_LM)))
def test_mlx_lm_reads_the_same(made, style: str) -> None:
    module = mlx_lm_parser(MLX_LM[style])
    for name, given_ in made:
        text = written(style, name, given_)
        inner = text[len(module.tool_call_start) : -len(module.tool_call_end)].strip("\n")
        if style == "gemma4" and (
            "\\" in inner or any("\n" in str(v) or ":" in str(v) for v in given_.values())
        ):
            continue  # its rewriting by regular expressions has gaps there
        theirs = module.parse_tool_call(inner, TOOLS)
        assert read(parse(FORMATS[style], [text])) == [(theirs["name"], theirs["arguments"])]


@pytest.mark.parametrize(
    ("style", "text", "wanted"),
    [
        ("xml", "<function=look>\n<parameter=text>\nx\n</parameter>\n</function>", [("look", {"text": "x"})]),
        ("xml", "<tool_call><function=look></function></tool_call>", [("look", {})]),
        ("xml", "<tool_call>\n<function=look>\n<parameter=count>\n3\n</parameter>\n</tool_call>", [("look", {"count": 3})]),
        ("xml", "<tool_call><function=look>\n<parameter=text>\nNULL\n</parameter>\n</function></tool_call>", [("look", {"text": "NULL"})]),
        ("xml", "<tool_call><function=look>\n<parameter=other>\n[1]\n</parameter>\n</function></tool_call>", [("look", {"other": "[1]"})]),
        ("xml", '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', [("look", {})]),
        ("json", '<tool_call>{"name": "look"}</tool_call>', [("look", {})]),
        ("json", '<tool_call>{"arguments": {"count": 1}, "name": "look"}</tool_call>', [("look", {"count": 1})]),
        ("json", '<tool_call>{"name": "look", "arguments": "{\\"count\\": 1}"}</tool_call>', [("look", {"count": 1})]),
        ("json", '<tool_call>{"name": "look", "arguments": null}</tool_call>', [("look", {})]),
        ("gemma4", '<|tool_call>call:look{text:<|"|>a:{b<|"|>}call:look{}<tool_call|>', [("look", {"text": "a:{b"}), ("look", {})]),
    ],
)  # fmt: skip
def test_calls_with_manners_of_their_own(style: str, text: str, wanted: list) -> None:
    assert read(parse(FORMATS[style], [text])) == wanted


@pytest.mark.parametrize("style", sorted(FORMATS))
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>{",
        "a <tool_call> b",
        "<tool_call></tool_call>",
        "<|tool_call>call",
        "a < b",
    ],
)
def test_what_is_no_call_is_text(style: str, text: str) -> None:
    assert parse(FORMATS[style], [text]) == [Content(text)]


@pytest.mark.parametrize(
    ("text", "opened", "wanted"),
    [
        ("hello </think>", False, [Content("hello </think>")]),
        ("\n<think>\nso\n</think>\n\nhello", False, [Reasoning("so"), Content("hello")]),
        ("so\n</think>\n\nhello", True, [Reasoning("so"), Content("hello")]),
        ("so\n</thi", True, [Reasoning("so\n</thi")]),
        ("</think>x", True, [Content("x")]),
        ("  hello ", False, [Content("  hello ")]),
        ("", True, []),
    ],
)
def test_reasoning(text: str, opened: bool, wanted: list[Piece]) -> None:
    prompt = "<|im_start|>assistant\n<think>\n" if opened else "<|im_start|>assistant\n"
    assert parse(FORMATS["xml"], [text], prompt) == wanted
    assert parse(FORMATS["xml"], list(text), prompt) == wanted


def test_formats_of_templates() -> None:
    assert detect(None) == ChatFormat()
    assert detect("{{ messages }}") == ChatFormat()
    assert detect("{% if tools %}<tool_call>{{ '<function=' }}{% endif %}</think>") == FORMATS["xml"]
    assert detect("{% if tools %}<tool_call>{% endif %}</think>") == FORMATS["json"]
    assert detect("{% if tools %}<|tool_call>{% endif %}<|channel>") == FORMATS["gemma4"]
    assert detect("{% if tools %}<start_function_call>{% endif %}") == FORMATS["function-gemma"]


@pytest.mark.parametrize("style", sorted(FORMATS))
@pytest.mark.parametrize("calling", [False, True])
def test_an_answer_cut_anywhere_shows_no_part_of_a_tag(style: str, calling: bool) -> None:
    """At the token limit a tag may be half written. What stands before it is given, the half tag is not."""
    form = FORMATS[style]
    thought, said = ("I think.", "Well then:") if form.thinking else ("", "Well then:")
    before = f"{form.thinking[0]}\n{thought}\n{form.thinking[1]}\n\n" if form.thinking else ""
    call = written(style, "look", {"text": "x", "count": 3})
    text = before + said + ("\n" + call if calling else "")
    for end in range(len(text) + 1):
        parser = form.parser("assistant\n", TOOLS)
        found = merged([*parser.push(text[:end]), *parser.finish(cut=True)])
        shown = "".join(p.text for p in found if isinstance(p, Content))
        assert said.startswith(shown.rstrip("\n")), (text[:end], found)
        assert thought.startswith("".join(p.text for p in found if isinstance(p, Reasoning))), (
            text[:end],
            found,
        )
        if end >= len(before) + len(said):
            assert shown.rstrip("\n") == said
    for end in (len(text), len(before) + len(said)):
        parser = form.parser("assistant\n", TOOLS)
        whole = merged([*parser.push(text[:end]), *parser.finish()])
        parser = form.parser("assistant\n", TOOLS)
        assert merged([*parser.push(text[:end]), *parser.finish(cut=True)]) == whole


def test_an_answer_that_ends_by_itself_keeps_what_looks_like_a_tag() -> None:
    for text in ("a <", "a <tool_c", "<thi"):
        assert parse(FORMATS["json"], [text]) == [Content(text)]


def test_an_answer_that_goes_on_with_thinking_begins_inside_it() -> None:
    """Whatever the prompt ends with: its end is in the middle of a message."""
    for is_thinking, kind in ((True, Reasoning), (False, Content)):
        parser = FORMATS["json"].parser("... <think> about", is_thinking=is_thinking)
        assert merged([*parser.push("so"), *parser.finish()]) == [kind("so")]
