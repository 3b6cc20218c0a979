"""Splits tool calls from the text around them, for the formats of Qwen and Gemma.

A call's name is given as soon as it is complete, its arguments while they are written. Text that only began like a call is given as text,
so nothing is lost. White space before a call belongs to the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxspec.parsers.call import Call
from mlxspec.parsers.gemma_call import GemmaCall
from mlxspec.parsers.json_call import JsonCall
from mlxspec.parsers.pieces import CallArguments, CallStart, Content, Piece, Scanner, Trimmer
from mlxspec.parsers.tool_schemas import ToolSchemas
from mlxspec.parsers.xml_call import XmlCall

_FUNCTION, _CALL = "<function=", "call:"


@dataclass(frozen=True)
class CallTags:
    """What encloses calls. mark: what encloses strings, for Gemma's notation; None for Qwen's two."""

    open: str
    close: str
    mark: str | None = None


QWEN = CallTags("<tool_call>", "</tool_call>")
GEMMA4 = CallTags("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = CallTags("<start_function_call>", "<end_function_call>", "<escape>")


def call_heads(tags: CallTags, tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """How calls of these tools begin behind the opening tag, without white space."""
    names = [t["function"].get("name") for t in tools if isinstance(t.get("function"), Mapping)]
    if tags.mark:
        return tuple(f"{_CALL}{name}{{" for name in names)
    return tuple(head for name in names for head in (f"{_FUNCTION}{name}>", f'{{"name":"{name}"'))


class ToolParser:
    """Content and calls. `tools`: the request's, in OpenAI's form; they say what bare values are. only_these: calls of other tools are
    text."""

    def __init__(
        self, tags: CallTags, tools: Sequence[Mapping[str, Any]], *, only_these: bool = False
    ) -> None:
        self._tags = tags
        self._names = {t["function"]["name"] for t in tools} if only_these else None
        self._schemas = ToolSchemas(tools)
        self._scanner = Scanner()
        self._space = Trimmer(leading=False)
        self._num_calls = 0
        self._inside = False  # between the tags that enclose calls
        self._call: Call | None = None
        self._raw: list[str] = []  # text of a call that has no name yet
        self._is_announced = False
        # Qwen's coder models sometimes forget the enclosing tag
        self._openers = (tags.open,) if tags.mark else (tags.open, _FUNCTION)

    def push(self, text: str) -> list[Piece]:
        self._scanner.push(text)
        pieces: list[Piece] = []
        while self._go_on(pieces):
            pass
        return pieces

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """cut: the answer ended at a limit; a call whose name is not complete, or the beginning of a tag, is left out then."""
        if self._call is not None and self._is_announced:
            return [CallArguments(self._num_calls - 1, self._call.finish(cut=cut))]
        if cut and (self._call is not None or self._inside or self._scanner):
            return []
        if self._call is not None:
            return [Content(self._taken_back())]
        if self._inside:
            left = "".join(self._raw) + self._scanner.rest()
            is_closing = not self._is_empty and self._tags.close.startswith(left.strip())
            return [] if is_closing else [Content(self._space.rest() + left)]
        text = self._space.push(self._scanner.rest())
        space = self._space.rest()
        return [Content(text + space if text or not self._num_calls else "")]

    def _go_on(self, pieces: list[Piece]) -> bool:
        """One element; False to wait for more text."""
        if self._call is not None:
            return self._go_on_call(self._call, pieces)
        if self._inside:
            return self._go_on_inside(pieces)
        text, tag = self._scanner.take(self._openers)
        pieces.append(Content(self._space.push(text)))
        if tag is None:
            return False
        self._raw = [tag]
        if tag == _FUNCTION:
            self._begin(XmlCall(self._schemas))
        else:
            self._inside = True
        return True

    def _go_on_inside(self, pieces: list[Piece]) -> bool:
        """Behind an opening tag or a call: another call, or the closing tag."""
        text = self._scanner.rest()
        stripped = text.lstrip()
        self._raw.append(text[: len(text) - len(stripped)])
        self._scanner.push(stripped)
        starts = {tag: self._scanner.starts(tag) for tag in self._expected()}
        found = next((tag for tag, yes in starts.items() if yes), None)
        if found is None:
            if None in starts.values():
                return False
            # not what a call looks like: text
            pieces.append(Content(self._taken_back()))
            self._inside = False
            return bool(self._scanner)
        if found == self._tags.close:
            self._scanner.drop(len(found))
            if self._is_empty:
                pieces.append(Content(self._taken_back() + found))
            self._raw, self._inside = [], False
        elif found == "{":
            self._begin(JsonCall())
        else:
            self._scanner.drop(len(found))
            self._raw.append(found)
            self._begin(
                GemmaCall(self._tags.mark, self._schemas) if self._tags.mark else XmlCall(self._schemas)
            )
        return True

    @property
    def _is_empty(self) -> bool:
        """Whether the tags have enclosed no call yet."""
        return self._raw[:1] == [self._tags.open]

    def _taken_back(self) -> str:
        """The text so far, with the white space before it, where it turns out to be no call."""
        text, self._raw = self._space.rest() + "".join(self._raw), []
        return text

    def _expected(self) -> tuple[str, ...]:
        return (self._tags.close, _CALL) if self._tags.mark else (self._tags.close, _FUNCTION, "{")

    def _begin(self, call: Call) -> None:
        self._call, self._is_announced = call, False

    def _go_on_call(self, call: Call, pieces: list[Piece]) -> bool:
        text = self._scanner.rest()
        if not text:
            return False
        behind = call.push(text)
        if not self._is_announced:
            self._raw.append(text[: max(0, len(text) - len(behind))])
            if len(behind) > len(text):  # it began in an earlier text
                raw = "".join(self._raw)
                self._raw = [raw[: len(raw) + len(text) - len(behind)]]
        is_other = self._names is not None and call.name is not None and call.name not in self._names
        if call.is_broken or is_other:
            pieces.append(Content(self._taken_back()))
            self._call, self._inside = None, False
            self._scanner.push(behind)
            return bool(behind)
        if call.name is not None and not self._is_announced:
            self._space.rest()
            pieces.append(CallStart(self._num_calls, call.name))
            self._is_announced, self._raw = True, []
            self._num_calls += 1
        if self._is_announced:
            pieces.append(CallArguments(self._num_calls - 1, call.take_arguments()))
        if call.is_done:
            self._call, self._inside = None, True
            self._scanner.push(behind)
            return bool(behind)
        return False
