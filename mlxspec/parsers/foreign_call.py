"""Tool calls in notations of other families: mlx-lm's own parsers read what stands between their tags.

A call is given when it is whole. What such a parser cannot read, or reads as anything but a tool's name and an object of arguments, is
text: nothing is lost, and no call is made up.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxspec.parsers.pieces import CallArguments, CallStart, Content, Piece, Scanner, Trimmer

_LONGEST = 1 << 18  # characters of what may be a call


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
        self._form, self._tools = form, [dict(t) for t in tools]
        functions = [t["function"] for t in tools]
        self._parameters = {f["name"]: (f.get("parameters") or {}).get("properties") or {} for f in functions}
        self._scanner, self._space = Scanner(), Trimmer(leading=False)
        self._body: list[str] | None = None  # of a call that is open
        self._num_calls = 0

    def push(self, text: str) -> list[Piece]:
        self._scanner.push(text)
        pieces: list[Piece] = []
        while True:
            if self._body is None:
                before, tag = self._scanner.take((self._form.open,))
                pieces.append(Content(self._space.push(before)))
                if tag is None:
                    return pieces
                self._body = []
            before, tag = (
                self._scanner.take((self._form.close,)) if self._form.close else (self._scanner.rest(), None)
            )
            self._body.append(before)
            if tag is not None:
                pieces += self._read(tag)
            elif sum(map(len, self._body)) > _LONGEST:
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
        if cut and self._form.close:
            return []
        pieces = self._read("", is_end=True)
        return [] if cut and isinstance(pieces[0], Content) else pieces

    def _read(self, close: str, *, is_end: bool = False) -> list[Piece]:
        """The calls of the body, or its text."""
        calls = [] if is_end and self._form.close else self._calls("".join(self._body or ()))
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
        text = self._space.rest() + self._form.open + "".join(self._body or ()) + close
        self._body = None
        return Content(text)

    def _calls(self, body: str) -> list[tuple[str, str]]:
        """Names and arguments as JSON; none where anything of it is no call."""
        try:
            module = importlib.import_module(f"mlx_lm.tool_parsers.{self._form.parser}")
            found = module.parse_tool_call(body, self._tools)
            read = [
                (call["name"], call["arguments"]) for call in (found if isinstance(found, list) else [found])
            ]
            written = [
                (name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)) for name, arguments in read
            ]
        except Exception:  # whatever mlx-lm's parser makes of a text that no call is written in
            return []
        return written if all(self._is_call(name, arguments) for name, arguments in read) else []

    def _is_call(self, name: Any, arguments: Any) -> bool:
        """Whether a tool of the request is called. Some of mlx-lm's parsers make a call of any text, and put what they cannot read under
        `raw`."""
        if name not in self._parameters or not isinstance(arguments, dict):
            return False
        return set(arguments) != {"raw"} or "raw" in self._parameters[name]
