"""Recognizes an answer that is nothing but calls in another notation than the model's template has: as JSON, bare or fenced, in Python's
form, or between the tags of other families. The calls must be of declared tools; any other answer is text.

Text is held back while it may become such an answer, at most up to LONGEST characters. For nearly all answers the first characters
decide.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlxspec.parsers.foreign_call import ForeignCalls, checked, read_calls
from mlxspec.parsers.readers import Calls, call_of
from mlxspec.parsers.tool_schemas import ToolSchemas
from mlxspec.parsers.tools import GEMMA4, QWEN, Notation
from mlxspec.parsers.values import loads

LONGEST = 1 << 18  # characters of what may be an answer of calls

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
    """A parser of an answer that may be nothing but calls in a notation other than the model's own. own: opening tags of the model's own
    notation; calls after these are left to ToolParser."""

    def __init__(self, tools: Sequence[Mapping[str, Any]], own: Sequence[str]) -> None:
        self._schemas = ToolSchemas(tools)
        self._names = [str(name) for name in self._schemas]
        self._own, self._openers = own, [o for o in _OPENERS if o not in own]
        self._head = ""
        self._rest: list[str] | None = None  # behind a head that may begin a call; None while nobody knows
        self._num_held = 0  # characters of it
        self._is_over = not tools

    def push(self, text: str) -> str:
        """Add text of the answer, and return the text that is certainly no call for this parser. All other text is held back."""
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

    def finish(self) -> tuple[Calls, str]:
        """End the answer, and return its calls and an empty text; or no calls and the text that was held back."""
        text = self._given_up()
        calls = whole_calls(text.strip(), self._schemas) if text else None
        return calls or [], "" if calls else text

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
        """Return whether the text may begin with the name of a declared tool, followed by one of the characters in `behind`."""
        return any(
            name.startswith(text) or (text.startswith(name) and text[len(name)] in behind)
            for name in self._names
        )

    def _may_be_listed(self, text: str) -> bool:
        """Return whether the text may be the beginning of a JSON object whose first key is that of a call, of a list of such objects, or
        of a list of calls in Python's form."""
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


def whole_calls(text: str, schemas: ToolSchemas) -> Calls | None:
    """Return the calls of an answer that consists of calls of declared tools alone; None for any other answer."""
    fenced = _FENCE.fullmatch(text)
    text = (text if fenced is None else fenced[1]).strip().removeprefix(_PYTHON_TAG).strip()
    if text[:1] in ("{", "[") and not text.startswith(_TAGGED[0][0]):
        return _listed(text, schemas) or (read_calls("pythonic", text, schemas) if text[:1] == "[" else None)
    if text.startswith("<｜tool▁call"):
        inner = text.removeprefix("<｜tool▁calls▁begin｜>").removesuffix("<｜tool▁calls▁end｜>")
        is_whole = not _DEEPSEEK.sub("", inner).strip()
        return (
            checked([(m[1], loads(m[2])) for m in _DEEPSEEK.finditer(inner)], schemas) if is_whole else None
        )
    if text.startswith("<invoke "):
        return read_calls("minimax_m2", text, schemas) if text.endswith("</invoke>") else None
    for tags in (QWEN, GEMMA4):
        if (
            text.startswith(tags.open)
            and text.endswith(tags.close)
            and (calls := _tagged(text, tags, schemas))
        ):
            return calls
    for opener, closer, parser in _TAGGED:
        form = ForeignCalls(parser=parser, open=opener, close=closer)
        if text.startswith(opener) and (calls := _tagged(text, form, schemas)):
            return calls
    return None


def _tagged(text: str, form: Notation, schemas: ToolSchemas) -> Calls | None:
    """Return the calls of a text that consists of calls alone, each between tags of the notation `form`; None for any other text."""
    found = Calls()
    for body in filter(None, (part.strip() for part in text.split(form.open))):
        inner = body.removesuffix(form.close).strip()
        calls = form.read(inner, schemas, is_closed=True) if body.endswith(form.close) else None
        if not calls:
            return None
        found += calls
    return found


def _listed(text: str, schemas: ToolSchemas) -> Calls | None:
    """Return the calls of a text that is JSON objects: one, a list, or one after the other; None for any other text."""
    decoder, calls, at = json.JSONDecoder(), list[tuple[Any, Any]](), 0
    try:
        while at < len(text):
            value, at = decoder.raw_decode(text, at)
            at += len(text[at:]) - len(text[at:].lstrip(" \n\r\t;"))
            calls += [call_of(one) or (None, None) for one in (value if isinstance(value, list) else [value])]
    except (ValueError, RecursionError):
        return None
    return checked(calls, schemas)
