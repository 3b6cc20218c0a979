"""Recognizes an answer that is nothing but calls in another notation than the model's template has: as JSON, bare or fenced, in Python's
form, or between the tags of other families. Calls of declared tools only; an answer that is anything else is text.

Text is held back as long as it may become such an answer, which its first characters decide for nearly all, and no longer than calls are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlxspec.parsers.foreign_call import LONGEST, read_calls, written
from mlxspec.parsers.pieces import CallArguments, CallStart, merged
from mlxspec.parsers.tools import GEMMA4, QWEN, CallTags, ToolParser
from mlxspec.parsers.values import loads

_SETTLED = 400  # characters behind which the beginning is looked at no more
_KEYS = ("name", "arguments", "parameters", "function", "type")
_FENCE = re.compile(r"```[ \t]*\w*[ \t]*\n(.*)```", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^\s<]+?)(?:<｜tool▁sep｜>|\n)(?:```json\n)?(.*?)(?:\n```)?<｜tool▁call▁end｜>",
    re.DOTALL,
)
# what begins, what ends a call, and the module of mlx_lm.tool_parsers for what is between
_TAGGED = (
    ("[TOOL_CALLS]", "", "mistral"),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "kimi_k2"),
    ("<tool_call>", "</tool_call>", "glm47"),
    ("<minimax:tool_call>", "</minimax:tool_call>", "minimax_m2"),
    ("<function_calls>", "</function_calls>", "minimax_m2"),
    ("<|tool_call_start|>", "<|tool_call_end|>", "pythonic"),
)
_OPENERS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<invoke name=",
    _PYTHON_TAG,
    GEMMA4.open,
    *(t[0] for t in _TAGGED),
)


class WholeCall:
    """An answer from its first character on. own: opening tags that the model's own notation has, whose calls are read as they come."""

    def __init__(self, tools: Sequence[Mapping[str, Any]], own: Sequence[str]) -> None:
        self._tools = tools
        self._names = [str(t["function"]["name"]) for t in tools]
        self._own, self._openers = own, [o for o in _OPENERS if o not in own]
        self._head = ""
        self._rest: list[str] | None = None  # behind a head that may begin a call; None while nobody knows
        self._num_held = 0  # characters of it
        self._is_over = not tools

    def push(self, text: str) -> str:
        """Returns text that is none of a call."""
        if self._is_over:
            return text
        if self._rest is not None:
            self._rest.append(text)
            self._num_held += len(text)
            return self._given_up() if self._num_held > LONGEST else ""
        self._head += text
        if not self._may_begin(self._head.lstrip()):
            return self._given_up()
        if len(self._head) > _SETTLED:
            self._rest = []
        return ""

    def finish(self) -> tuple[list[tuple[str, str]], str]:
        """The answer's calls, or its text."""
        text = self._given_up()
        calls = whole_calls(text.strip(), self._tools) if text else []
        return calls, "" if calls else text

    def _given_up(self) -> str:
        text, self._head, self._rest, self._is_over = self._head + "".join(self._rest or ()), "", None, True
        return text

    def _may_begin(self, text: str, *, is_fenced: bool = False) -> bool:
        openers = _OPENERS if is_fenced else self._openers
        if not text or any(o.startswith(text) or text.startswith(o) for o in openers):
            return True
        for opener in self._own:  # the model's own, behind which GLM writes the name
            if opener.startswith(text) or text.startswith(opener):
                return self._may_be_named(text[len(opener) :].lstrip(), " \n<")
        if text[0] in "[{":
            return self._may_be_listed(text)
        if is_fenced or not text.startswith("`"):
            return False
        mark, newline, inside = text.partition("\n")
        form = r"```[ \t]*\w*[ \t]*" if newline else r"`{1,3}|```[ \t]*\w*[ \t]*"
        return re.fullmatch(form, mark) is not None and self._may_begin(inside.lstrip(), is_fenced=True)

    def _may_be_named(self, text: str, behind: str) -> bool:
        """Whether it may begin with the name of a tool, and one of these characters behind it."""
        return any(
            name.startswith(text) or (text.startswith(name) and text[len(name)] in behind)
            for name in self._names
        )

    def _may_be_listed(self, text: str) -> bool:
        """A JSON object whose first key is a call's, a list of them, or a list of calls in Python's form."""
        if text[0] == "[" and text[1:].lstrip()[:1] not in ("{", ""):
            return self._may_be_named(text[1:].lstrip(), "(")
        key = text.lstrip("[").lstrip().removeprefix("{").lstrip()
        if not key or any(f'"{known}"'.startswith(key) for known in _KEYS):
            return True
        said = re.match(r'"(\w+)"\s*(?::\s*(?:"([^"]*)("?))?)?', key)
        if said is None or said[1] not in _KEYS or said[1] not in ("name", "type") or said[2] is None:
            return said is not None and said[1] in _KEYS
        wanted = self._names if said[1] == "name" else ["function"]
        return said[2] in wanted if said[3] else any(w.startswith(said[2]) for w in wanted)


def whole_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Names, and arguments as JSON, of an answer that is nothing but calls of `tools`; none for any other."""
    fenced = _FENCE.fullmatch(text)
    text = (text if fenced is None else fenced[1]).strip().removeprefix(_PYTHON_TAG).strip()
    if text[:1] in ("{", "[") and not text.startswith(_TAGGED[0][0]):
        return _listed(text, tools) or (read_calls("pythonic", text, tools) if text[:1] == "[" else [])
    if text.startswith("<｜tool▁call"):
        inner = text.removeprefix("<｜tool▁calls▁begin｜>").removesuffix("<｜tool▁calls▁end｜>")
        is_whole = not _DEEPSEEK.sub("", inner).strip()
        return written([(m[1], loads(m[2])) for m in _DEEPSEEK.finditer(inner)], tools) if is_whole else []
    if text.startswith("<invoke "):
        return read_calls("minimax_m2", text, tools) if text.endswith("</invoke>") else []
    for tags in (QWEN, GEMMA4):
        if text.startswith(tags.open) and text.endswith(tags.close) and (calls := _ours(text, tags, tools)):
            return calls
    for opener, closer, parser in _TAGGED:
        if text.startswith(opener) and (calls := _tagged(text, opener, closer, parser, tools)):
            return calls
    return []


def _ours(text: str, tags: CallTags, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Calls in one of our own notations, where there is nothing beside them."""
    parser, calls = ToolParser(tags, tools), list[tuple[str, str]]()
    for piece in merged([*parser.push(text), *parser.finish()]):
        if isinstance(piece, CallStart):
            calls.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
        else:
            return []
    return calls


def _tagged(
    text: str, opener: str, closer: str, parser: str, tools: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for body in filter(None, (part.strip() for part in text.split(opener))):
        calls = read_calls(parser, body.removesuffix(closer).strip(), tools) if body.endswith(closer) else []
        if not calls:
            return []
        found += calls
    return found


def _listed(text: str, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Calls as JSON objects: one, a list, or one after the other."""
    decoder, calls, at = json.JSONDecoder(), list[tuple[Any, Any]](), 0
    try:
        while at < len(text):
            value, at = decoder.raw_decode(text, at)
            at += len(text[at:]) - len(text[at:].lstrip(" \n\r\t;"))
            calls += [_call_of(one) for one in (value if isinstance(value, list) else [value])]
    except (ValueError, RecursionError):
        return []
    return written(calls, tools)


def _call_of(value: Any) -> tuple[Any, Any]:
    """Name and arguments of an object that says them in one of the published forms."""
    if not isinstance(value, dict):
        return None, None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    arguments = value.get("arguments", value.get("parameters"))
    arguments = loads(arguments) if isinstance(arguments, str) else arguments
    return value.get("name", value.get("function")), arguments
