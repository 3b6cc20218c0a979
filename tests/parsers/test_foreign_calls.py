"""Tool calls that mlx-lm's parsers read, and gpt-oss's channels: any cut gives the same, nothing is lost, and no call is made up."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planting import catches

from mlxspec.parsers.formats import ChatFormat, detect
from mlxspec.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning, merged

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
        },
    }
    for name in ("look", "search")
]
CALL = {"text": "a b"}
# a template that shows the notation, and an answer with one call of `look`
NOTATIONS = {
    "minimax_m2": (
        "{{ tools }} <minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="text">a b</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    "glm47": (
        "{{ tools }} <tool_call> <arg_key>",
        "<tool_call>look<arg_key>text</arg_key><arg_value>a b</arg_value></tool_call>",
    ),
    "pythonic": ("{{ tools }} <|tool_call_start|>", '<|tool_call_start|>[look(text="a b")]<|tool_call_end|>'),
    "kimi_k2": (
        "{{ tools }} <|tool_calls_section_begin|>",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"text": "a b"}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
    ),
    "longcat": (
        "{{ tools }} <longcat_tool_call>",
        "<longcat_tool_call>look\n<longcat_arg_key>text</longcat_arg_key>\n"
        "<longcat_arg_value>a b</longcat_arg_value>\n</longcat_tool_call>",
    ),
    "mistral": ("{{ tools }} [TOOL_CALLS]", '[TOOL_CALLS]look[ARGS]{"text": "a b"}'),
    "channels": (
        "{{ tools }} <|channel|> <|message|>",
        '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"text": "a b"}<|call|>',
    ),
}


def parse(form: ChatFormat, pieces: list[str], tools: Any = TOOLS, **more: Any) -> list[Piece]:
    parser = form.parser("", tools)
    found: list[Piece] = []
    for piece in pieces:
        found += parser.push(piece)
    return merged(found + parser.finish(**more))


def form_of(name: str) -> ChatFormat:
    return detect(NOTATIONS[name][0])


def whatever(_: Any) -> Any:
    """Calls of any tool, also of one that nobody has."""
    return lambda name, arguments, known: True


@pytest.mark.parametrize("name", NOTATIONS)
def test_a_call_is_read_and_text_around_it_stays(name: str) -> None:
    form, (_, text) = form_of(name), NOTATIONS[name]
    assert form.takes_tools
    assert form.tools is None
    before = "" if name == "channels" else "I look.\n"
    found = parse(form, [before + text])
    calls = [p for p in found if isinstance(p, CallStart)]
    assert [(c.index, c.name) for c in calls] == [(0, "look")]
    (arguments,) = (p.text for p in found if isinstance(p, CallArguments))
    assert json.loads(arguments) == CALL
    assert "".join(p.text for p in found if isinstance(p, Content)) == before.rstrip()


@catches("a call is made up", "mlxspec.parsers.foreign_call:_is_call", whatever, case="glm47")
@pytest.mark.parametrize("name", ["glm47", "pythonic", "kimi_k2", "minimax_m2"])
def test_what_is_no_call_is_text(name: str) -> None:
    form = form_of(name)
    assert form.foreign is not None
    for inside in ("no call at all ", "look at this"):
        text = f"so {form.foreign.open}{inside}{form.foreign.close} behind"
        assert parse(form, [text]) == [Content(text)]


@catches("a call is looked for anywhere", "mlxspec.parsers.foreign_call:_NOTHING_ELSE", lambda right: {})
@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("pythonic", '[look("a b")]'),
        ("pythonic", '[look(text="a b"), look("a b")]'),
        ("pythonic", '[look(text="a b")][look(text="c")]'),
        ("pythonic", 'I use [look(text="a b")] now'),
        ("mistral", 'look[ARGS]{"text": "a b"} and then I wait.'),
        ("mistral", ' by look[ARGS]{"text": "a b"}'),
    ],
)
def test_a_call_beside_anything_else_is_text_and_loses_nothing(name: str, inside: str) -> None:
    form = form_of(name)
    assert form.foreign is not None
    text = f"{form.foreign.open}{inside}{form.foreign.close}"
    for found in (parse(form, [text]), parse(ChatFormat(tools="xml"), [text])):
        assert found == [Content(text)]


@pytest.mark.parametrize("name", NOTATIONS)
def test_without_tools_and_for_other_tools_there_are_no_calls(name: str) -> None:
    form, (_, text) = form_of(name), NOTATIONS[name]
    for tools in ([], TOOLS[1:]):
        found = parse(form, [text], tools)
        assert not any(isinstance(p, CallStart | CallArguments) for p in found)
        assert any(isinstance(p, Content) and "a b" in p.text for p in found)


@pytest.mark.parametrize("name", NOTATIONS)
def test_a_call_that_a_limit_cuts_is_left_out(name: str) -> None:
    text = NOTATIONS[name][1]
    found = parse(form_of(name), [text[: len(text) - 14]], cut=True)
    assert not any(isinstance(p, CallStart) for p in found)


FRAGMENTS = [
    *sorted({part for _, text in NOTATIONS.values() for part in (text, text[:12], text[-10:], text[5:30])}),
    "<|channel|>analysis<|message|>thought<|end|><|start|>assistant", "<|channel|>final<|message|>", "<|end|>", "word", " ", "\n", "<",
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join)


@given(texts, st.lists(st.integers(0, 10**6), max_size=20), st.sampled_from(sorted(NOTATIONS)))
def test_any_cut_gives_the_same(text: str, places: list[int], name: str) -> None:
    form = form_of(name)
    whole = parse(form, [text])
    marks = sorted({0, len(text), *(p % (len(text) + 1) for p in places)})
    assert parse(form, [text[a:b] for a, b in zip(marks, marks[1:], strict=False)]) == whole
    assert parse(form, list(text)) == whole


def test_channels_are_reasoning_content_and_calls() -> None:
    text = (
        "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json"
        '<|message|>{"text": "x"}<|call|><|start|>assistant<|channel|>final<|message|>Done.<|return|>'
    )
    found = parse(form_of("channels"), [text])
    assert found == [
        Reasoning("I think."),
        CallStart(0, "look"),
        CallArguments(0, '{"text": "x"}'),
        Content("Done."),
    ]
    assert parse(form_of("channels"), ["no channels"]) == [Content("no channels")]


def test_a_template_with_tools_of_an_unknown_notation_is_known_as_such() -> None:
    assert detect("{{ tools | tojson }} answer with a call").is_unknown
    assert not detect("{{ messages }}").is_unknown
    assert not any(form_of(name).is_unknown for name in NOTATIONS)
