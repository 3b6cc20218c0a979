"""Forty calls in four notations, cut at every character: no API gives a call that differs from the whole one, streamed or not."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from mlxspec.engine.stats import RequestStats
from mlxspec.parsers.formats import ChatFormat, ToolStyle
from mlxspec.server.job_run import Delta, End
from tests.server.api_forms import FORMS, Result, streamed
from tests.server.test_forms import protocols

STYLES: tuple[ToolStyle, ...] = ("json", "xml", "gemma4", "function-gemma")
_PROPERTIES = {
    "command": {"type": "string"},
    "amount": {"type": "integer"},
    "files": {"type": "array", "items": {"type": "string"}},
    "force": {"type": ["boolean", "null"]},
    "more": {"type": "object"},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "bash", "parameters": {"type": "object", "properties": _PROPERTIES}},
    }
]
_TEXTS = (
    "rm -rf /srv/build/cache/old", "echo '}' && ls", 'say "a, b: c"', "a\n\nb", "null", "", "</parameter>", "echo </function> x",
    "{", "[1, 2", "x</tool_call>y", "5", "<tool_call>\n{", "é€😀",
)  # fmt: skip


def made(number: int) -> dict[str, Any]:
    """Arguments of a call."""
    rng = random.Random(number)
    values = {
        "command": rng.choice(_TEXTS),
        "amount": rng.choice([0, 1, 123456, -7]),
        "files": [rng.choice(["a.py", "b c.py", "é"]) for _ in range(rng.randrange(4))],
        "force": rng.choice([True, False, None]),
        "more": {"path": "/a/b", "deep": {"all": False, "n": 10}},
    }
    chosen = rng.sample(sorted(values), rng.randrange(1, 4))
    return {name: values[name] for name in chosen}


def _gemma(value: Any, mark: str) -> str:
    if isinstance(value, str):
        return mark + value + mark
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_gemma(v, mark)}" for k, v in value.items()) + "}"
    return (
        "[" + ",".join(_gemma(v, mark) for v in value) + "]" if isinstance(value, list) else json.dumps(value)
    )


def written(style: str, said: dict[str, Any]) -> str:
    if style == "json":
        return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': said}, ensure_ascii=False)}\n</tool_call>"
    if style == "gemma4":
        return f"<|tool_call>call:bash{_gemma(said, '<|' + chr(34) + '|>')}<tool_call|>"
    if style == "function-gemma":
        return f"<start_function_call>call:bash{_gemma(said, '<escape>')}<end_function_call>"
    texts = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in said.items()}
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in texts.items())
    return f"<tool_call>\n<function=bash>\n{body}</function>\n</tool_call>"


def answers(style: ToolStyle, text: str, *, cut: bool) -> list[tuple[str, Result]]:
    """What each API says of this answer, whole and streamed."""
    parser, stats = (
        ChatFormat(tools=style).parser("", TOOLS),
        RequestStats(num_prompt=7, num_generated=len(text)),
    )
    pieces = [parser.push(text), parser.finish(cut=cut)]
    has_calls = any("CallStart" in type(p).__name__ for part in pieces for p in part)
    told: list[Any] = [Delta(choice=0, pieces=part, stats=stats, tokens=(1,)) for part in pieces]
    reason: Any = "length" if cut else "tool_calls" if has_calls else "stop"
    told.append(End(choice=0, reason=reason, cause="limit" if cut else "end", stats=stats))
    found = []
    for form in FORMS:
        stream, whole = protocols()[form.name](), protocols()[form.name]()
        data = b"".join(map(stream.wire.frame, stream.begin()))
        for update in told:
            data += b"".join(map(stream.wire.frame, stream.chunks(update)))
            whole.take(update)
        data += b"".join(map(stream.wire.frame, stream.end())) + stream.wire.last
        found += [
            (form.name, streamed(form, data)),
            (form.name, form.whole(json.loads(json.dumps(whole.whole())))),
        ]
    return found


def check(number: int, step: int) -> None:
    for style in STYLES:
        text = written(style, made(number))
        results = answers(style, text, cut=False)
        (calls,) = {json.dumps(result.calls) for _, result in results}
        for end in range(1, len(text), step):
            for name, result in answers(style, text[:end], cut=True):
                assert json.dumps(result.calls) in ("[]", calls), (name, text[:end], result)
                assert result.reason == "length", (name, text[:end])


@pytest.mark.parametrize("number", range(0, 40, 5))
def test_a_call_that_is_cut_is_none(number: int) -> None:
    check(number, 9)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_a_call_that_is_cut_at_any_character_is_none(number: int) -> None:
    check(number, 1)


@pytest.mark.parametrize("style", STYLES)
def test_the_whole_call_is_what_was_said(style: ToolStyle) -> None:
    """Where a notation can say it: Qwen's tags cannot say all of its own tags, and Gemma's no empty marks."""
    for number in range(40):
        said = made(number)
        if style == "xml" and "</" in str(said.get("command")):
            continue
        for name, result in answers(style, written(style, said), cut=False):
            assert result.calls == (("bash", said),), (name, written(style, said))
