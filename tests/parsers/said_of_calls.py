"""Sentences about tools, code and XML, in which no call is made: `sentence(rng, style)` makes one in the notation of a style.

They name tools, declared ones and others, quote tags whole and in part, in prose, in code and in lists, and show calls that are not closed,
lack their body, or are somebody else's. `python -m tests.parsers.said_of_calls 10000` parses so many of each style whole and in pieces.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

from mlxspec.parsers.formats import ChatFormat, ToolStyle
from mlxspec.parsers.pieces import Content, Piece, merged

STYLES: tuple[ToolStyle, ...] = ("json", "xml", "gemma4", "function-gemma")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("read", "f", "run-tests")
]
_DECLARED = ("read", "f", "run-tests")
_OTHERS = ("name", "NAME", "function_name", "write", "(\\w+)", "...", "$1", "tool", "get_weather", "x.y", "")
_TAGS = {
    "json": ("<tool_call>", "</tool_call>"),
    "xml": ("<tool_call>", "</tool_call>"),
    "gemma4": ("<|tool_call>", "<tool_call|>"),
    "function-gemma": ("<start_function_call>", "<end_function_call>"),
}
_FRAMES = (
    "Write {} and then the parameters.", "The form {} is Qwen's, not ours.", "A regex for it is `{}`; shall I go on?", "Use {} in a call.",
    "1. The model writes {}\n2. The parser reads it.", "* {} begins it", "> {} was what you said.", "In `parser.py` the tag is `{}`.",
    "```xml\n{}\n```\nThat is how it looks.", "~~~\n{}\n~~~", "| tag | means |\n| --- | --- |\n| `{}` | a call |",
    "Why does {} fail? It is not closed.",
    "```python\nOPEN = {!r}\n```", "See ``{}`` in the docs.", "The answer ended with {}", 'He said "{}" and left.',
    "  {} is indented here.",
    "I would not call it: {} is only text.\n\nDone.", "{} is how one would begin, but", "Two of them: {} and {}.",
)  # fmt: skip
_PLAIN = (
    "<function", "</function>", "<parameter=path>", "</parameter>", "`</tool_call>`", "<?xml version='1.0'?>", "<a href='x'>y</a>",
    "if a < b and c > d:",
    "List<Map<String, Integer>>", "def f(path): return read(path)", "call: me", "call:", "{\"a\": 1}", "[1, 2]", "f(path='x')",
)  # fmt: skip


def _head(rng: random.Random, style: str, name: str) -> str:
    if style == "json":
        return f'{{"name": "{name}", "arguments": '
    return f"<function={name}>" if style == "xml" else f"call:{name}{{"


def _whole(rng: random.Random, style: str, name: str) -> str:
    """A call that is complete."""
    opener, closer = _TAGS[style]
    if style == "json":
        return f'{opener}\n{{"name": "{name}", "arguments": {{"path": "a"}}}}\n{closer}'
    if style == "xml":
        return f"{opener}\n<function={name}>\n<parameter=path>\na\n</parameter>\n</function>\n{closer}"
    mark = '<|"|>' if style == "gemma4" else "<escape>"
    return f"{opener}call:{name}{{path:{mark}a{mark}}}{closer}"


def quoted(rng: random.Random, style: str) -> str:
    """What a sentence says of a call: a tag, its head, the whole call of a tool that is not there, or plain code."""
    opener, closer = _TAGS[style]
    name = rng.choice(_DECLARED + _OTHERS)
    return rng.choice(
        [
            opener,
            closer,
            f"{opener}...{closer}",
            f"{opener}{closer}",
            f"<function={name}>",
            f"<function={name}",
            _head(rng, style, name),
            f"{opener} {_head(rng, style, name)}",
            f"{opener}{_head(rng, style, name)}",
            _whole(rng, style, rng.choice(_OTHERS)),
            rng.choice(_PLAIN),
        ]
    )


def sentence(rng: random.Random, style: str) -> str:
    frame = rng.choice(_FRAMES)
    parts = [quoted(rng, style) for _ in range(frame.count("{"))]
    if rng.random() < 0.15:  # a whole call of a declared tool, shown in code
        shown = _whole(rng, style, rng.choice(_DECLARED))
        return rng.choice(
            [
                "So it looks:\n```\n{}\n```\nIs that clear?",
                "It is `{}` in one line.",
                "As in\n~~~xml\n{}\n~~~",
            ]
        ).format(shown)
    text = frame.format(*parts)
    return text if rng.random() < 0.7 else f"{text}\n{sentence(rng, style)}"


def pieces_of(style: ToolStyle, parts: list[str]) -> list[Piece]:
    parser = ChatFormat(tools=style).parser("", TOOLS)
    return merged([piece for part in parts for piece in parser.push(part)] + parser.finish())


def faults(num: int, style: ToolStyle, seed: int, cut: Callable[[str], list[str]] = list) -> list[str]:
    """Sentences of which anything became a call, or was lost."""
    rng = random.Random(f"{seed} {style}")
    texts = [sentence(rng, style) for _ in range(num)]
    return [
        t for t in texts if pieces_of(style, [t]) != [Content(t)] or pieces_of(style, cut(t)) != [Content(t)]
    ]


if __name__ == "__main__":
    wrong = {style: faults(int(sys.argv[1]), style, 1) for style in STYLES}
    print(
        {style: len(texts) for style, texts in wrong.items()},
        *(t for texts in wrong.values() for t in texts[:3]),
        sep="\n",
    )
