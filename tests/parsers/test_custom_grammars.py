"""The grammar of a custom tool holds its text, in every notation that writes texts as they stand; a regex does in JSON, too."""

from __future__ import annotations

import json
import re

import pytest
from test_call_grammars import walk

from mlxspec.errors import GrammarError
from mlxspec.parsers.call_grammar import calls_grammar
from mlxspec.parsers.formats import ChatFormat, ToolStyle
from mlxspec.parsers.lark_regex import regex_of
from mlxspec.parsers.patterns import usable_pattern
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


def test_in_json_a_grammar_without_recursion_is_held_as_an_expression() -> None:
    text = {"type": "string", "pattern": f"^(?:{regex_of(PATCH)})$"}
    tool = {
        **TOOL,
        "function": {
            **TOOL["function"],
            "parameters": {"type": "object", "properties": {"input": text}, "required": ["input"]},
        },
    }
    lark = calls_grammar(ChatFormat(tools="json"), [tool], tokens={}, several=False)
    for seed in range(6):
        assert TEXT.fullmatch(input_of("json", walk("json", lark, seed)))


APPLY_PATCH = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

// a file
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""


@pytest.mark.parametrize(
    ("lark", "good", "bad"),
    [
        (
            APPLY_PATCH,
            '*** Begin Patch\n*** Update File: a.py\n@@ def f():\n-x\n+y "z"\n*** Add File: b\n+\n*** End Patch\n',
            "*** Begin Patch\n*** Update File: a.py\nx\n*** End Patch",
        ),
        ('start: ("a" | B)~2..3\nB: /[x-z]/', "axz", "a"),
        ('start: "a"~2 ["b" "/"]', "aab/", "aab"),
        ('?start.2: x{1,2}\n  | "?"\nx: "\\"" INT "\\n"\n%import common (INT, WS)', '"12"\n'[:3] + "\n", '"'),
    ],
)
def test_the_expression_of_a_grammar_matches_its_texts(lark: str, good: str, bad: str) -> None:
    assert usable_pattern(f"^(?:{regex_of(lark)})$")
    assert re.fullmatch(regex_of(lark), good)
    assert not re.fullmatch(regex_of(lark), bad)


@pytest.mark.parametrize(
    "lark",
    [
        'start: "(" start? ")"',
        'start: a\n%ignore " "',
        'start: "a"i',
        "start: /a/i",
        "start: gone",
        'start: ("a"',
        'start: "a")',
        'start: "a"\n%import common.NAME_OF_NOTHING',
        'begin: "a"',
        'start: ? "a"',
    ],
)
def test_a_grammar_without_such_a_form_is_refused(lark: str) -> None:
    with pytest.raises(GrammarError, match="one regular expression"):
        regex_of(lark)


def test_what_would_end_the_nested_grammar_is_refused() -> None:
    with pytest.raises(GrammarError, match="closing brace"):
        calls_grammar(
            ChatFormat(tools="xml"),
            [TOOL],
            tokens={},
            several=False,
            texts={"apply_patch": 'start: "a"\n}\n'},
        )
