"""Tool calls in notations of other families: mlx-lm's own parsers read what stands between their tags.

A call is given when it is whole. What such a parser cannot read, or reads as anything but a tool's name and an object of arguments, is
text: nothing is lost, and no call is made up.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxspec.parsers.pieces import CallArguments, CallStart, Content, Piece, Scanner, Trimmer
from mlxspec.parsers.place import Place

LONGEST = 1 << 18  # characters of what may be a call
_TEXT = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
_PYTHON = rf"""\s*[\w.]+\((?:\s*\w+\s*=(?:{_TEXT}|[^"'()])*)?\)"""  # a call whose arguments all have names
# modules of mlx_lm.tool_parsers that look for calls anywhere in a text, and what a text of nothing but calls is to them
_NOTHING_ELSE = {
    "pythonic": re.compile(rf"\s*\[{_PYTHON}(?:\s*,{_PYTHON})*(?:\s*,)?\s*\]\s*", re.DOTALL),
    "mistral": re.compile(r"\s*(?:\[.*\]|[\w-]+\s*\[ARGS\]\s*\{.*\})\s*", re.DOTALL),
}


@dataclass(frozen=True, kw_only=True)
class ForeignCalls:
    """A notation. parser: a module of mlx_lm.tool_parsers. open, close: its tags; close empty: calls go on to the end of the answer. inner:
    tags inside a call that may be special tokens."""

    parser: str
    open: str
    close: str
    inner: tuple[str, ...] = ()

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(tag for tag in (self.open, self.close, *self.inner) if tag)


_KIMI = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
_GLM = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
# by what a chat template holds; the first that it holds counts
_BY_MARK = {
    "<minimax:tool_call>": ForeignCalls(
        parser="minimax_m2", open="<minimax:tool_call>", close="</minimax:tool_call>"
    ),
    "<longcat_tool_call>": ForeignCalls(
        parser="longcat", open="<longcat_tool_call>", close="</longcat_tool_call>"
    ),
    "<arg_key>": ForeignCalls(parser="glm47", open="<tool_call>", close="</tool_call>", inner=_GLM),
    "<|tool_call_start|>": ForeignCalls(
        parser="pythonic", open="<|tool_call_start|>", close="<|tool_call_end|>"
    ),
    "<|tool_list_start|>": ForeignCalls(
        parser="pythonic", open="<|tool_call_start|>", close="<|tool_call_end|>"
    ),
    "<|tool_calls_section_begin|>": ForeignCalls(
        parser="kimi_k2", open="<|tool_calls_section_begin|>", close="<|tool_calls_section_end|>", inner=_KIMI
    ),
    "[TOOL_CALLS]": ForeignCalls(parser="mistral", open="[TOOL_CALLS]", close="", inner=("[ARGS]",)),
    "<atem:function_calls>": ForeignCalls(
        parser="muse_spark", open="<atem:function_calls>", close="</atem:function_calls>"
    ),
}


def foreign_calls(template: str) -> ForeignCalls | None:
    """The notation of a model with this chat template, None where it is one of ours or nobody knows it."""
    return next((form for mark, form in _BY_MARK.items() if mark in template), None)


class ForeignToolParser:
    """Content and calls of `tools`, the request's in OpenAI's form; calls of other tools are text."""

    def __init__(self, form: ForeignCalls, tools: Sequence[Mapping[str, Any]]) -> None:
        self._form, self._tools = form, tools
        self._scanner, self._space, self._place = Scanner(), Trimmer(leading=False), Place()
        self._body: list[str] | None = None  # of a call that is open
        self._num_calls = 0
        self.cut_call = ""  # text of a call that a limit cut

    def push(self, text: str) -> list[Piece]:
        self._scanner.push(text)
        pieces: list[Piece] = []
        while True:
            if self._body is None:
                before, tag = self._scanner.take((self._form.open,))
                pieces.append(self._said(before))
                if tag is None:
                    return pieces
                if self._place.is_code:
                    pieces.append(self._said(tag))
                    continue
                self._body = []
            before, tag = (
                self._scanner.take((self._form.close,)) if self._form.close else (self._scanner.rest(), None)
            )
            self._body.append(before)
            if tag is not None:
                pieces += self._read(tag)
            elif sum(map(len, self._body)) > LONGEST:
                pieces.append(self._given_back(""))
            else:
                return pieces

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """cut: the answer ended at a limit; a call that is not whole is left out then."""
        if self._body is None:
            if cut and self._scanner:
                return []
            text = self._space.push(self._scanner.rest())
            return [Content(text + (self._space.rest() if text or not self._num_calls else ""))]
        self._body.append(self._scanner.rest())
        written = self._form.open + "".join(self._body)
        pieces = [] if cut and self._form.close else self._read("", is_end=True)
        if cut and (not pieces or isinstance(pieces[0], Content)):
            self.cut_call = written
            return []
        return pieces

    def _read(self, close: str, *, is_end: bool = False) -> list[Piece]:
        """The calls of the body, or its text."""
        body = "".join(self._body or ())
        calls = [] if is_end and self._form.close else read_calls(self._form.parser, body, self._tools)
        if not calls:
            return [self._given_back(close)]
        self._body = None
        self._space.rest()
        pieces: list[Piece] = []
        for name, arguments in calls:
            pieces += [CallStart(self._num_calls, name), CallArguments(self._num_calls, arguments)]
            self._num_calls += 1
        return pieces

    def _given_back(self, close: str) -> Content:
        text = self._form.open + "".join(self._body or ()) + close
        self._body = None
        return self._said(text)

    def _said(self, text: str) -> Content:
        self._place.push(text)
        return Content(self._space.push(text))


def read_calls(parser: str, body: str, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Names, and arguments as JSON, of what a module of mlx_lm.tool_parsers reads in a text; none where anything of it is no call of
    `tools`."""
    if parser in _NOTHING_ELSE and not _NOTHING_ELSE[parser].fullmatch(body):
        return []
    try:
        module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
        found = module.parse_tool_call(body, [dict(t) for t in tools])
        read = [(call["name"], call["arguments"]) for call in (found if isinstance(found, list) else [found])]
    except Exception:  # whatever mlx-lm's parser makes of a text that no call is written in
        return []
    return written(read, tools)


def written(calls: Sequence[tuple[Any, Any]], tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Names, and arguments as JSON; none where one of them is no call of `tools`."""
    known = {t["function"]["name"]: t["function"].get("parameters") or {} for t in tools}
    if not all(_is_call(name, arguments, known) for name, arguments in calls):
        return []
    try:
        return [(name, json.dumps(given, ensure_ascii=False, allow_nan=False)) for name, given in calls]
    except (TypeError, ValueError, RecursionError):
        return []


def _is_call(name: Any, arguments: Any, known: Mapping[str, Any]) -> bool:
    """Whether a tool of the request is called. Some of mlx-lm's parsers make a call of any text, and put what they cannot read under
    `raw`."""
    if not isinstance(name, str) or name not in known or not isinstance(arguments, dict):
        return False
    return set(arguments) != {"raw"} or "raw" in (known[name].get("properties") or {})
