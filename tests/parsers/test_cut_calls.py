"""A call that a limit cuts is no call: what an answer says at any place is a call of the whole answer, or none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from planting import catches

from mlxspec.parsers.foreign_call import foreign_calls
from mlxspec.parsers.formats import ChatFormat, ToolStyle
from mlxspec.parsers.pieces import CallArguments, CallStart, Content, Piece, merged

PARAMETERS = {
    "type": "object",
    "properties": {
        "command": {"type": "string"},
        "amount": {"type": "integer"},
        "files": {"type": "array", "items": {"type": "string"}},
        "dry": {"type": ["boolean", "null"]},
        "more": {"type": "object"},
    },
}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}]
SAID: list[dict[str, Any]] = [
    {},
    {"command": "rm -rf /srv/build/cache/old"},
    {"amount": 123456},
    {"files": ["a.py", "b.py", "c.py"]},
    {"command": "rm -rf /srv/x", "dry": True},
    {"command": "echo '</parameter>' && ls", "dry": None},
    {"command": 'echo "}}" > a\ncat <<EOF\n{"a": [1, 2]}\nEOF\n'},
    {"more": {"remove": {"path": "/a/b", "all": False}}, "amount": -12},
    {"command": "echo </function> && ls"},
    {"command": "null"},
    {"files": []},
]
STYLES: tuple[ToolStyle, ...] = ("json", "xml", "gemma4", "function-gemma")


def _gemma(value: Any, mark: str) -> str:
    if isinstance(value, str):
        return mark + value + mark
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_gemma(v, mark)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(v, mark) for v in value) + "]"
    return json.dumps(value)


def written(style: str, said: dict[str, Any]) -> str:
    if style == "json":
        return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': said})}\n</tool_call>"
    if style == "gemma4":
        return f"<|tool_call>call:bash{_gemma(said, '<|' + chr(34) + '|>')}<tool_call|>"
    if style == "function-gemma":
        return f"<start_function_call>call:bash{_gemma(said, '<escape>')}<end_function_call>"
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in said.items()}
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in texts.items())
    return f"<tool_call>\n<function=bash>\n{body}</function>\n</tool_call>"


def calls(pieces: list[Piece]) -> list[dict[str, Any]]:
    texts: list[str] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            texts.append("")
        elif isinstance(piece, CallArguments):
            texts[-1] += piece.text
    return [json.loads(text, parse_constant=pytest.fail) for text in texts]


def content(pieces: list[Piece]) -> str:
    return "".join(p.text for p in pieces if isinstance(p, Content))


@catches(
    "an answer that was cut ends as one that ended by itself",
    "mlxspec.parsers.tools:ToolParser.finish",
    lambda right: lambda self, *, cut=False: right(self, cut=False),
    case="n-xml",
)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("before", ["", "I look.\n", "I look. "])
def test_a_call_that_is_cut_anywhere_is_none_or_the_whole(style: ToolStyle, before: str) -> None:
    for said in SAID:
        text = before + written(style, said) + "\n" + written(style, {"amount": 7})
        for end in range(len(text) + 1):
            parser = ChatFormat(tools=style).parser("", TOOLS)
            found = merged([*parser.push(text[:end]), *parser.finish(cut=True)])
            assert calls(found) in ([], [said], [said, {"amount": 7}]), (text[:end], found)
            if before != "I look. ":
                assert before.startswith(content(found).rstrip()), found
        assert calls(found) == [said, {"amount": 7}]


@pytest.mark.parametrize("style", STYLES)
def test_what_was_written_of_a_cut_call_is_told(style: ToolStyle) -> None:
    text = written(style, SAID[1])
    cut = text[: text.index("cache")]
    parser = ChatFormat(tools=style).parser("", TOOLS)
    assert merged([*parser.push(f"So.\n{cut}"), *parser.finish(cut=True)]) == [Content("So.")]
    (notice,) = parser.notices
    assert notice.startswith("a call was cut")
    assert notice.endswith(cut)


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("json", '<tool_call>\n{"name": "bash", "arguments": {"command": "rm -rf /srv/'),
        ("json", '<tool_call>\n{"name": "bash", "arguments": {"amount": 12'),
        ("json", '<tool_call>\n{"name": "bash", "arguments": {"files": ["a.py", "'),
        ("json", '<tool_call>\n{"name": "bash", "arguments": {"files": ["a.py"'),
        ("json", '<tool_call>\n{"name": "bash", "arguments": {"comm'),
        ("json", '<tool_call>\n{"name": "bash", "arguments": {"command":\n</tool_call>'),
        ("json", '<tool_call>\n{"name": "bash", "arguments": {"dry": tru\n</tool_call>'),
        ("json", '<tool_call>\n{"name": "bash", "arguments": {"command": "a"} and so on'),
        ("xml", "<tool_call>\n<function=bash>\n<parameter=command>\nrm -rf /srv/"),
        ("xml", "<tool_call>\n<function=bash>\n<parameter=command>\nrm -rf /srv/\n</parameter>\n"),
        ("xml", "<tool_call>\n<function=bash>\n<parameter=comm"),
        ("gemma4", '<|tool_call>call:bash{command:<|"|>rm -rf /srv/'),
        ("gemma4", '<|tool_call>call:bash{command:<|"|>rm -rf /srv/<|"|>'),
        ("gemma4", "<|tool_call>call:bash{amount:12"),
        ("function-gemma", "<start_function_call>call:bash{command:<escape>rm -rf /srv/"),
    ],
)
def test_an_answer_that_ends_by_itself_inside_a_call_has_none(style: ToolStyle, text: str) -> None:
    for parts in ([text], list(text)):
        parser = ChatFormat(tools=style).parser("", TOOLS)
        found = merged([*(p for part in parts for p in parser.push(part)), *parser.finish()])
        assert found == [Content(text)]
        assert parser.notices or "name" not in text


_FOREIGN = {
    "GLM's": ("<arg_key>", "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>rm -rf /a/b</arg_value>\n</tool_call>"),
    "Kimi's": (
        "<|tool_calls_section_begin|>",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>{"command": "rm -rf /a/b"}'
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "Mistral's": ("[TOOL_CALLS]", '[TOOL_CALLS]bash[ARGS]{"command": "rm -rf /a/b"}'),
    "Mistral's list": ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "bash", "arguments": {"command": "rm -rf /a/b"}}]'),
    "LFM's": ("<|tool_call_start|>", "<|tool_call_start|>[bash(command='rm -rf /a/b')]<|tool_call_end|>"),
    "MiniMax's": (
        "<minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="bash">\n<parameter name="command">rm -rf /a/b</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _FOREIGN)
@pytest.mark.parametrize("own", [True, False])
def test_a_cut_call_of_another_family_is_none(name: str, own: bool) -> None:
    """In the model's notation, and as a whole answer of a model with another one."""
    mark, text = _FOREIGN[name]
    form = ChatFormat(foreign=foreign_calls(mark)) if own else ChatFormat(tools="gemma4")
    for end in range(len(text) + 1):
        parser = form.parser("", TOOLS)
        found = calls(merged([*parser.push(text[:end]), *parser.finish(cut=True)]))
        assert found in ([], [{"command": "rm -rf /a/b"}]), (text[:end], found)
    assert found


def test_a_cut_call_in_a_channel_is_none() -> None:
    text = '<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{"command": "rm -rf /a/b"}<|call|>'
    for end in range(len(text) + 1):
        parser = ChatFormat(channels=True).parser("", TOOLS)
        found = calls(merged([*parser.push(text[:end]), *parser.finish(cut=True)]))
        assert found in ([], [{"command": "rm -rf /a/b"}])
        told = "<|message|>" in text[:end] and not found
        assert bool(parser.notices) is told
