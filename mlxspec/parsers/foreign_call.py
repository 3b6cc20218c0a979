"""Reads tool calls in notations of other families: mlx-lm's own parsers read the text between their tags.

Text that such a parser cannot read, or reads as anything but a tool's name and an object of arguments, is no call.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxspec.parsers.readers import Calls
from mlxspec.parsers.tool_schemas import ToolSchemas
from mlxspec.parsers.values import as_json

_TEXT = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
_PYTHON = rf"""\s*[\w.]+\((?:\s*\w+\s*=(?:{_TEXT}|[^"'()])*)?\)"""  # a call whose arguments all have names
# modules of mlx_lm.tool_parsers that look for calls anywhere in a text, and what a text of nothing but calls is to them
_NOTHING_ELSE = {
    "pythonic": re.compile(rf"\s*\[{_PYTHON}(?:\s*,{_PYTHON})*(?:\s*,)?\s*\]\s*", re.DOTALL),
    "mistral": re.compile(r"\s*(?:\[.*\]|[\w-]+\s*\[ARGS\]\s*\{.*\})\s*", re.DOTALL),
}


@dataclass(frozen=True, kw_only=True)
class ForeignCalls:
    """A notation of calls that a parser of mlx-lm reads. parser: the name of its module in mlx_lm.tool_parsers. open, close: the tags
    that enclose calls; close is empty where calls extend to the end of the answer. inner: tags inside a call that may be special
    tokens."""

    parser: str
    open: str
    close: str
    inner: tuple[str, ...] = ()

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(tag for tag in (self.open, self.close, *self.inner) if tag)

    def may_begin(self, text: str, schemas: ToolSchemas) -> bool:
        return True

    def read(self, text: str, schemas: ToolSchemas, *, is_closed: bool) -> Calls | None:
        return read_calls(self.parser, text, schemas) if is_closed or not self.close else None


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
    """Return the notation of calls of a model with this chat template; None where mlxspec reads the notation itself, or where no known
    tag is in the template."""
    return next((form for mark, form in _BY_MARK.items() if mark in template), None)


def read_calls(parser: str, body: str, schemas: ToolSchemas) -> Calls | None:
    """Return the calls that a parser of mlx-lm reads in a text; None unless the whole text is calls of declared tools. parser: the name
    of the module in mlx_lm.tool_parsers."""
    if parser in _NOTHING_ELSE and not _NOTHING_ELSE[parser].fullmatch(body):
        return None
    try:
        module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
        found = module.parse_tool_call(body, [dict(t) for t in schemas.tools])
        read = [(call["name"], call["arguments"]) for call in (found if isinstance(found, list) else [found])]
    except Exception:  # whatever mlx-lm's parser makes of a text that no call is written in
        return None
    return checked(read, schemas)


def checked(calls: Sequence[tuple[Any, Any]], schemas: ToolSchemas) -> Calls | None:
    """Return these (name, arguments) pairs as a list; None where there are none, where a pair is no call of a declared tool, or where
    arguments cannot be written as JSON."""
    try:
        as_json({str(number): given for number, (_, given) in enumerate(calls)})
    except (TypeError, ValueError, RecursionError):
        return None
    return list(calls) if calls and all(_is_call(*call, schemas) for call in calls) else None


def _is_call(name: Any, arguments: Any, schemas: ToolSchemas) -> bool:
    """Return whether a name is that of a declared tool and the arguments are an object. An object with the only member `raw` is refused
    unless the tool declares it: some of mlx-lm's parsers return text there that they cannot read."""
    if not isinstance(name, str) or name not in schemas or not isinstance(arguments, dict):
        return False
    return set(arguments) != {"raw"} or schemas.declares(name, "raw")
