"""Splits tool calls from the text around them, for the formats of Qwen and Gemma.

A call is one of a declared tool, and stands behind the opening tag or, in Qwen's notation with tags, without it at the beginning of a line.
It is given when it is closed, and never before: the beginning of a call may mean something else than the call. All else is text, also a
call in code (place.py), and nothing of it is lost. White space before a call belongs to the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxspec.parsers.call import Call
from mlxspec.parsers.gemma_call import GemmaCall
from mlxspec.parsers.json_call import JsonCall
from mlxspec.parsers.pieces import CallArguments, CallStart, Content, Piece, Scanner, Trimmer
from mlxspec.parsers.place import Place
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
    """Content and calls of `tools`, the request's in OpenAI's form."""

    def __init__(self, tags: CallTags, tools: Sequence[Mapping[str, Any]]) -> None:
        self._tags = tags
        self._schemas = ToolSchemas(tools)
        self._scanner, self._space, self._place = Scanner(), Trimmer(leading=False), Place()
        self._num_calls = 0
        self._has_spoken = True  # text has come since the last call
        self._inside = False  # between the tags that enclose calls
        self._call: Call | None = None
        self.cut_call = ""  # text of a call that a limit cut
        self._raw: list[str] = []  # text from the opening tag on that is no call's yet
        self._opener = ""  # with which it began
        self._closed: list[tuple[str, str]] | None = (
            None  # calls that count once the tag is closed; None where they are given as they come
        )
        self._may_hold = True
        # Qwen's coder models sometimes forget the enclosing tag
        self._openers = (tags.open,) if tags.mark else (tags.open, _FUNCTION)

    def push(self, text: str) -> list[Piece]:
        self._scanner.push(text)
        pieces: list[Piece] = []
        while self._go_on(pieces):
            pass
        return pieces

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """cut: the answer ended at a limit; a call that is not closed, or the beginning of a tag, is left out then."""
        pieces: list[Piece] = []
        while True:
            if self._closed is not None:
                pieces += self._end_held(self._closed, cut=cut)
            call = self._call
            if call is None:
                break
            arguments = call.finish(cut=cut)
            if call.is_done and call.name is not None:
                pieces += self._counted([(call.name, arguments)])
            elif cut:
                self.cut_call = "".join(self._raw) + self._scanner.rest()
                return pieces
            else:
                pieces += self._unclosed()
                continue
            self._call, self._inside = None, True
        left = self._scanner.rest()
        if cut and (self._inside or left):
            return pieces
        if (
            self._inside
            and not self._is_empty
            and self._tags.close.startswith("".join([*self._raw, left]).strip())
        ):
            return pieces
        pieces += [self._given_back(), self._said(left)]
        return [*pieces, Content(self._space.rest() if self._has_spoken else "")]

    def _end_held(self, closed: list[tuple[str, str]], *, cut: bool) -> list[Piece]:
        """No more text comes. Calls that are closed count; where they are not, all is text, in which other calls may begin lines."""
        call, left = self._call, self._scanner.rest()
        if call is not None:
            arguments = call.finish(cut=cut)
            self._call = None
            if call.is_whole and call.name is not None:
                closed.append((call.name, arguments))
        if closed and (call is None or call.is_whole) and self._tags.close.startswith(left.strip()):
            return self._counted(closed)
        self._scanner.push(left)
        self._may_hold = False
        return self._unclosed()

    def _unclosed(self) -> list[Piece]:
        """The text of a call that the answer left open. Other calls may begin lines in it."""
        raw = "".join(self._raw)[len(self._opener) :] + self._scanner.rest()
        self._call, self._closed, self._raw, self._inside = None, None, [], False
        return [self._said(self._opener), *self.push(raw)]

    def _go_on(self, pieces: list[Piece]) -> bool:
        """One element; False to wait for more text."""
        if self._call is not None:
            return self._go_on_call(self._call, pieces)
        if self._inside:
            return self._go_on_inside(pieces)
        text, tag = self._scanner.take(self._openers)
        pieces.append(self._said(text))
        if tag is None:
            return False
        begins_line = self._place.begins_line
        is_held = tag == _FUNCTION or not begins_line
        if self._place.is_code or (tag == _FUNCTION and not begins_line) or (is_held and not self._may_hold):
            pieces.append(self._said(tag))
            return True
        self._raw, self._opener, self._closed = [tag], tag, [] if is_held else None
        if tag == _FUNCTION:
            self._call = XmlCall(self._schemas)
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
            pieces.append(self._given_back())
            self._inside = False
            return bool(self._scanner)
        if found == self._tags.close:
            self._scanner.drop(len(found))
            if self._closed:
                pieces += self._counted(self._closed)
            elif self._is_empty:
                self._raw.append(found)
                pieces.append(self._given_back())
            self._raw, self._closed, self._inside = [], None, False
        elif found == "{":
            self._call = JsonCall(self._schemas)
        else:
            self._scanner.drop(len(found))
            self._raw.append(found)
            self._call = (
                GemmaCall(self._tags.mark, self._schemas) if self._tags.mark else XmlCall(self._schemas)
            )
        return True

    @property
    def _is_empty(self) -> bool:
        """Whether the tags have enclosed no call yet."""
        return self._raw[:1] == [self._tags.open]

    def _said(self, text: str) -> Content:
        """Text of the answer."""
        self._place.push(text)
        self._has_spoken = self._has_spoken or bool(text.strip())
        return Content(self._space.push(text))

    def _given_back(self) -> Content:
        """The text of what turned out to be no call."""
        text, self._raw, self._closed = "".join(self._raw), [], None
        return self._said(text)

    def _counted(self, calls: list[tuple[str, str]]) -> list[Piece]:
        """Calls that are closed. What comes behind them until the tag is closed is given as it comes."""
        pieces: list[Piece] = []
        for name, arguments in calls:
            self._space.rest()
            pieces += [CallStart(self._num_calls, name), CallArguments(self._num_calls, arguments)]
            self._num_calls, self._has_spoken = self._num_calls + 1, False
        self._raw, self._closed = [], None
        return pieces

    def _expected(self) -> tuple[str, ...]:
        return (self._tags.close, _CALL) if self._tags.mark else (self._tags.close, _FUNCTION, "{")

    def _go_on_call(self, call: Call, pieces: list[Piece]) -> bool:
        text = self._scanner.rest()
        if not text:
            return False
        behind = call.push(text)
        self._note(text, behind)
        is_held = self._closed is not None
        if is_held and call.is_done and self._holds_another():
            raw, self._raw = "".join(self._raw), []
            self._call, self._closed, self._inside = None, None, False
            pieces.append(self._said(self._opener))
            self._scanner.push(raw[len(self._opener) :] + behind)
            return True
        if call.is_broken or (is_held and call.is_done and not call.is_whole):
            pieces.append(self._given_back())
            self._call, self._inside = None, False
            self._scanner.push(behind)
            return bool(behind)
        if not call.is_done:
            return False
        self._call, self._inside = None, True
        self._scanner.push(behind)
        if call.name is not None:
            closed = [*(self._closed or ()), (call.name, call.take_arguments())]
            if is_held and self._opener != _FUNCTION:
                self._closed = closed
            else:
                pieces += self._counted(closed)
        return bool(behind)

    def _holds_another(self) -> bool:
        """Whether a call begins a line within one that began in the middle of a line: that one was only spoken of."""
        lines = "".join(self._raw).split("\n")[1:]
        return any(line.lstrip().startswith(self._tags.open) for line in lines)

    def _note(self, text: str, behind: str) -> None:
        """Text that a call has taken, all but `behind`, which may have begun in an earlier text."""
        self._raw.append(text[: max(0, len(text) - len(behind))])
        if len(behind) > len(text):
            raw = "".join(self._raw)
            self._raw = [raw[: len(raw) + len(text) - len(behind)]]
