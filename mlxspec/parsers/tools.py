"""Splits tool calls from the text around them: one parser for every notation.

The parser looks for the opening tag where a call may begin. It holds the text back up to a closing tag before which a reader finds
nothing but calls of declared tools, and releases the text as soon as it cannot be the beginning of a call. So a call is returned when it
is closed, and never before: the beginning of a call may turn out to be something else. All other text is content, and none of it is
lost. White space before a call belongs to the call.

A call may begin with

    a tag that is a special token   anywhere: no text is spelled with it
    a tag that begins a line        unless it is in a fenced block that is closed later
    a tag within a line             outside code
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlxspec.parsers.gemma_value import CALL, read_gemma
from mlxspec.parsers.pieces import CallArguments, CallStart, Content, Piece, Scanner, Trimmer
from mlxspec.parsers.place import Place
from mlxspec.parsers.readers import Calls, read_json, read_xml
from mlxspec.parsers.tool_schemas import ToolSchemas
from mlxspec.parsers.values import as_json

LONGEST = 1 << 20  # characters of what may be a call
_MOST_READ = 1 << 26  # characters of an answer that are read as calls, again at each closing tag
_SETTLED = 300  # characters behind which the beginning is looked at no more
_FUNCTION = "<function="


class Notation(Protocol):
    """A notation of tool calls. open, close: the tags that enclose calls; close is empty where calls extend to the end of the answer."""

    @property
    def open(self) -> str: ...
    @property
    def close(self) -> str: ...

    def may_begin(self, text: str, schemas: ToolSchemas) -> bool:
        """Return whether the text after an opening tag can be the beginning of a call of a declared tool."""

    def read(self, text: str, schemas: ToolSchemas, *, is_closed: bool) -> Calls | None:
        """Return the calls of the text after an opening tag, without its closing tag. The list is empty while a string or a value is
        open. Returns None where the text is anything but calls of declared tools. is_closed: a closing tag follows the text."""


@dataclass(frozen=True)
class CallTags:
    """A notation of Qwen or Gemma. open, close: the tags that enclose a call. mark: the text that encloses strings in Gemma's notations;
    None for Qwen's two, JSON and `<function=...>` tags."""

    open: str
    close: str
    mark: str | None = None

    def may_begin(self, text: str, schemas: ToolSchemas) -> bool:
        text = "".join(text.split())
        if self.mark:
            return _may_follow(text, CALL, "{", schemas, ())
        heads = ("<parameter=", "</function>", self.close)
        if text.startswith('{"name":"'):
            return _may_follow(text, '{"name":"', '"', schemas, ())
        return '{"'.startswith(text[:2]) or _may_follow(text, _FUNCTION, ">", schemas, heads)

    def read(self, text: str, schemas: ToolSchemas, *, is_closed: bool) -> Calls | None:
        if self.mark:
            return read_gemma(text, schemas, self.mark)
        reader = read_json if text.lstrip().startswith("{") else read_xml
        return reader(text, schemas, is_closed=is_closed)


QWEN = CallTags("<tool_call>", "</tool_call>")
GEMMA4 = CallTags("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = CallTags("<start_function_call>", "<end_function_call>", "<escape>")


def _may_follow(text: str, head: str, end: str, schemas: ToolSchemas, behind: Sequence[str]) -> bool:
    """Return whether `text` is, or may be the beginning of, `head`, the name of a declared tool, `end`, and one of the texts `behind`
    (any text where `behind` is empty). text: without white space."""
    if not text.startswith(head):
        return head.startswith(text)
    name, found, rest = text[len(head) :].partition(end)
    if not found:
        return any("".join(known.split()).startswith(name) for known in schemas)
    follows = not behind or any(b.startswith(rest) or rest.startswith(b) for b in behind)
    return follows and name in ("".join(known.split()) for known in schemas)


@dataclass(kw_only=True)
class _Held:
    """A text that is held back because it may be a call. opener: the tag with which it begins. is_weak: the tag is in the middle of a
    line. yields: a call inside the text whose tag begins a line is read instead. fence: the fenced code block that is open around the
    text; probe: the place after the text; the text is a call only if this fence is never closed. is_settled: the text begins as a
    call does."""

    opener: str
    is_weak: bool = False
    fence: object = None
    probe: Place | None = None
    parts: list[str] = field(default_factory=list)
    size: int = 0
    is_settled: bool = False

    @property
    def yields(self) -> bool:
        return self.is_weak or self.opener == _FUNCTION

    def add(self, text: str) -> None:
        self.parts.append(text)
        self.size += len(text)

    @property
    def text(self) -> str:
        self.parts = ["".join(self.parts)]
        return self.parts[0]


class ToolParser:
    """A parser of text into content and tool calls. tools: the request's tools, in OpenAI's form. is_special: the opening tag is a
    special token. cut_call: the text of a call that a limit cut, else empty."""

    def __init__(
        self, notation: Notation, tools: Sequence[Mapping[str, Any]], *, is_special: bool = False
    ) -> None:
        """Start a parser that is outside of calls. is_special: the opening tag is a special token of the vocabulary."""
        self._notation, self._is_special, self._schemas = notation, is_special, ToolSchemas(tools)
        # Qwen's coder models sometimes forget the enclosing tag
        self._openers = (notation.open, _FUNCTION) if notation == QWEN else (notation.open,)
        self._scanner, self._space, self._place = Scanner(), Trimmer(leading=False), Place()
        self._held: _Held | None = None
        self._left_to_read = _MOST_READ
        self._num_calls = 0
        self._has_spoken = True  # text has come since the last call
        self._may_close = False  # the closing tag of a call without an opening one may come
        self.cut_call = ""

    @property
    def opener(self) -> str:
        return self._notation.open

    def may_begin(self, text: str) -> bool:
        """Return whether the text after an opening tag can be the beginning of a call of one of the tools."""
        return self._notation.may_begin(text, self._schemas)

    @property
    def num_held(self) -> int:
        """Return the number of characters of the call that is being written; 0 where there is none, or where it has just begun."""
        return self._held.size if self._held is not None and self._held.is_settled else 0

    def push(self, text: str) -> list[Piece]:
        self._scanner.push(text)
        pieces: list[Piece] = []
        while self._go_on(pieces) if self._held is None else self._go_on_held(self._held, pieces):
            pass
        return pieces

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """End the answer, and return the pieces of the text that was held back. cut: the answer ended at a limit, so that a call that is
        not closed, or the beginning of a tag, is left out."""
        pieces: list[Piece] = []
        while (held := self._held) is not None:
            held.add(self._scanner.rest())
            if held.probe is not None:
                self._end_fenced(held, held.probe, pieces, cut=cut)
                continue
            self._held, text = None, held.text
            is_open = cut and bool(self._notation.close)
            calls = None if is_open or self._is_spoken_of(held, text) else self._read(held, text)
            if calls:
                pieces += self._counted(calls)
            elif cut and not held.is_weak:
                self.cut_call = text
                return pieces
            else:
                self._give_back(held, pieces)
                pieces += self.push("")
        rest = self._scanner.rest()
        if not (cut and rest):
            pieces.append(self._said(rest))
        return [*pieces, Content(self._space.rest() if self._has_spoken else "")]

    def _go_on(self, pieces: list[Piece]) -> bool:
        """Read the text outside of calls up to the next opening tag, and append its pieces. Returns False where more text must arrive
        first."""
        if self._may_close and not self._drop_close():
            return False
        text, tag = self._scanner.take(self._openers)
        pieces.append(self._said(text))
        if tag is None:
            return False
        place = self._place
        if self._is_special and tag != _FUNCTION:
            held = _Held(opener=tag)
        elif place.begins_line and tag != _FUNCTION and place.in_fence:
            held = _Held(opener=tag, fence=place.fence, probe=copy(place))
        elif place.in_code and not (place.begins_line and tag != _FUNCTION):
            held = None
        elif place.begins_line or tag != _FUNCTION:
            held = _Held(opener=tag, is_weak=not place.begins_line)
        else:
            held = None
        if held is None:
            pieces.append(self._said(tag))
            return True
        held.add(tag)
        if held.probe is not None:
            held.probe.push(tag)
        self._held = held
        return True

    def _drop_close(self) -> bool:
        """Remove a closing tag at the beginning of the unread text, left by a call whose opening tag was missing. Returns False where
        more text must arrive first."""
        text, close = self._scanner.rest(), self._notation.close
        stripped = text.lstrip()
        self._may_close = close.startswith(stripped) and stripped != close
        self._scanner.push(stripped.removeprefix(close) if stripped.startswith(close) else text)
        return not self._may_close

    def _go_on_held(self, held: _Held, pieces: list[Piece]) -> bool:
        """Add new text to the text `held`, which may be a call, and append its pieces where they are decided. Returns False where more
        text must arrive first."""
        close = "</function>" if held.opener == _FUNCTION else self._notation.close
        if held.probe is not None:
            close = ""
        text, tag = self._scanner.take((close,)) if close else (self._scanner.rest(), None)
        held.add(text + (tag or ""))
        if not held.is_settled:
            body = held.text[: _SETTLED * 2]
            inner = body if held.opener == _FUNCTION else body[len(held.opener) :]
            if not self.may_begin(inner):
                return self._release(held, pieces)
            held.is_settled = held.size > _SETTLED
        if held.probe is not None:
            return self._go_on_fenced(held, held.probe, text, pieces)
        if tag is None:
            if held.size > LONGEST:
                self._held = None
                pieces.append(self._said(held.text))
            return False
        spoken = self._is_spoken_of(held, held.text)
        calls = (
            None
            if spoken
            else self._read(
                held, held.text[: -len(close)] if held.opener != _FUNCTION else held.text, is_closed=True
            )
        )
        if calls:
            self._held, self._may_close = None, held.opener == _FUNCTION
            pieces += self._counted(calls)
        elif calls is None:
            self._give_back(held, pieces)
        return True

    def _read(self, held: _Held, text: str, *, is_closed: bool = False) -> Calls | None:
        """Return the calls of a text that is held back; an empty list while a call is open; None where the text is no call, or the limit
        of characters to read is reached."""
        self._left_to_read -= len(text)
        if self._left_to_read < 0:
            return None
        if held.opener == _FUNCTION:
            return read_xml(text, self._schemas, is_closed=False)
        return self._notation.read(text[len(held.opener) :], self._schemas, is_closed=is_closed)

    def _is_spoken_of(self, held: _Held, text: str) -> bool:
        """Return whether the text contains a call whose tag begins a line, while its own opening tag is a weaker one: in the middle of a
        line, or `<function=`. The own tag is then content, because the answer only mentions it."""
        found = re.finditer(rf"\n[ \t]*{re.escape(self._notation.open)}", text) if held.yields else ()
        return any(self.may_begin(text[m.end() : m.end() + _SETTLED]) for m in found)

    def _give_back(self, held: _Held, pieces: list[Piece]) -> None:
        """Append a text that is no call as content. Calls inside it are read where they cannot be part of an argument."""
        if held.yields or held.text[len(held.opener) :].lstrip().startswith("{"):
            self._release(held, pieces)
        else:
            self._held = None
            pieces.append(self._said(held.text))

    def _release(self, held: _Held, pieces: list[Piece]) -> bool:
        """Append the opening tag of a text that is no call as content, and put the rest of the text back to be read again. Returns
        whether there is any."""
        self._held = None
        pieces.append(self._said(held.opener))
        self._scanner.put_back(held.text[len(held.opener) :])
        return bool(self._scanner)

    def _go_on_fenced(self, held: _Held, probe: Place, new: str, pieces: list[Piece]) -> bool:
        """Follow the lines of a text in a fenced code block that may be a call. Returns True where the block has ended, and the text
        must be read again. new: the newest text; probe: the place before it."""
        before, start = held.size - len(new), 0
        for line in re.finditer("\n", new):
            num_closed = probe.num_closed
            probe.push(new[start : line.end()])
            start = line.end()
            if probe.fence is not held.fence:
                self._leave_fence(held, before + start if probe.num_closed > num_closed else 0, pieces)
                return True
        probe.push(new[start:])
        if held.size > LONGEST:
            self._leave_fence(held, held.size, pieces)
        return False

    def _end_fenced(self, held: _Held, probe: Place, pieces: list[Piece], *, cut: bool) -> None:
        """Append the pieces of a text in a fenced code block that may be a call, at the end of the answer: content if the block is
        closed or the answer was cut, else a call where it is one."""
        num_closed = probe.num_closed
        probe.end_line()
        self._leave_fence(held, held.size if cut or probe.num_closed > num_closed else 0, pieces)
        pieces += self.push("")

    def _leave_fence(self, held: _Held, num_said: int, pieces: list[Piece]) -> None:
        """Append the first num_said characters of the text as content, and put the rest back to be read again. num_said 0 means that the
        fence was never closed, so that it is ignored."""
        self._held = None
        if num_said:
            pieces.append(self._said(held.text[:num_said]))
        else:
            self._place.fence = None
        self._scanner.put_back(held.text[num_said:])

    def _counted(self, calls: Calls) -> list[Piece]:
        self._space.rest()
        self._has_spoken = False
        pieces: list[Piece] = []
        for name, arguments in calls:
            pieces += [CallStart(self._num_calls, name), CallArguments(self._num_calls, as_json(arguments))]
            self._num_calls += 1
        return pieces

    def _said(self, text: str) -> Content:
        self._place.push(text)
        self._has_spoken = self._has_spoken or bool(text.strip())
        return Content(self._space.push(text))
