"""The grammar of a custom tool holds its text, in every notation that writes texts as they stand; a regex does in JSON, too."""

from __future__ import annotations

import json
import re

import pytest
from test_call_grammars import walk

from mlxspec.errors import GrammarError
from mlxspec.parsers.call_grammar import calls_grammar
from mlxspec.parsers.formats import ChatFormat, ToolStyle
from mlxspec.parsers.pieces import CallArguments, CallStart, merged

PATCH = """start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch"
hunk: "*** Delete File: " /[a-z]{1,8}/ LF

%import common.LF
"""
TEXT = re.compile(r"\*\*\* Begin Patch\n(\*\*\* Delete File: [a-z]{1,8}\n)+\*\*\* End Patch")
TOOL = {
    "type": "function",
    "function": {
        "name": "apply_patch",
        "parameters": {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]},
    },
}


def input_of(style: ToolStyle, text: str) -> str:
    """The text that the only call of an answer has."""
    parser = ChatFormat(tools=style).parser("", [TOOL])
    pieces = merged([*parser.push(text), *parser.finish()])
    assert [p.name for p in pieces if isinstance(p, CallStart)] == ["apply_patch"], text
    found = json.loads("".join(p.text for p in pieces if isinstance(p, CallArguments)))
    assert found.keys() == {"input"}
    return str(found["input"])


@pytest.mark.parametrize("style", ["xml", "gemma4", "function-gemma"])
def test_a_text_follows_the_tools_own_grammar(style: ToolStyle) -> None:
    lark = calls_grammar(
        ChatFormat(tools=style), [TOOL], tokens={}, several=False, texts={"apply_patch": PATCH}
    )
    for seed in range(6):
        assert TEXT.fullmatch(input_of(style, walk(style, lark, seed)))


def test_what_would_end_the_nested_grammar_is_refused() -> None:
    with pytest.raises(GrammarError, match="closing brace"):
        calls_grammar(
            ChatFormat(tools="xml"),
            [TOOL],
            tokens={},
            several=False,
            texts={"apply_patch": 'start: "a"\n}\n'},
        )
