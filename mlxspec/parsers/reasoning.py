"""Splits reasoning from the answer: the text between a model's thinking tags at the beginning of its output.

Where the prompt has opened thinking (many templates end in the opening tag), the text begins inside. White space around the reasoning
belongs to the tags. A later opening tag is text. A call of one of the request's tools ends thinking that is never closed. If the closing
tag follows the call, the call is part of the reasoning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from mlxspec.parsers.pieces import Content, Piece, Reasoning, Scanner, Trimmer
from mlxspec.parsers.place import Place

_LONGEST_HEAD = 400  # characters in which the beginning of a call is looked for


class ReasoningParser:
    """A parser that separates reasoning from the rest of an answer.

    tags: the opening and the closing tag of thinking. opened: the prompt already contains the opening tag. call: the tag that opens a
    tool call, and a function that returns whether a text after that tag may begin a call; None where there are no tools. Text inside
    thinking that may be a call is held back: it is reasoning if thinking is closed later, else content. is_special: the tag of a call is
    a special token, and counts anywhere; any other tag counts only at the beginning of a line outside fenced code blocks.
    """

    def __init__(
        self,
        tags: tuple[str, str],
        *,
        opened: bool,
        call: tuple[str, Callable[[str], bool]] | None = None,
        is_special: bool = False,
    ) -> None:
        self._open, self._close = tags
        self._call, self._is_special = call, is_special
        self._state: Literal["start", "thinking", "behind", "content"] = "thinking" if opened else "start"
        self._scanner, self._trimmer, self._place = Scanner(), Trimmer(), Place()
        self._space = ""  # before what may be the opening tag
        self._held: list[str] | None = (
            None  # from the tag of a call on, until thinking is closed or the answer ends
        )
        self._is_settled = False  # what is held begins as a call does

    @property
    def is_thinking(self) -> bool:
        return self._state == "thinking"

    def push(self, text: str) -> list[Piece]:
        self._scanner.push(text)
        pieces: list[Piece] = []
        if self._state == "start":
            self._start(pieces)
        while self._state == "thinking" and self._think(pieces):
            pass
        if self._state == "behind":
            self._scanner.skip_space()
            if self._scanner:
                self._state = "content"
        if self._state == "content":
            pieces.append(Content(self._scanner.rest()))
        return pieces

    def _think(self, pieces: list[Piece]) -> bool:
        """Read the text of thinking up to the next tag, and append its pieces. Returns False where more text must arrive first."""
        if self._held is not None:
            return self._go_on_held(self._held, pieces)
        tags = (self._close,) if self._call is None else (self._close, self._call[0])
        thought, tag = self._scanner.take(tags)
        pieces.append(self._thought(thought))
        if tag == self._close:
            self._state = "behind"
        elif tag is not None:
            is_call = self._is_special or (self._place.begins_line and not self._place.in_fence)
            self._held, self._is_settled = ([tag] if is_call else None), False
            if not is_call:
                pieces.append(self._thought(tag))
        return tag is not None

    def _go_on_held(self, held: list[str], pieces: list[Piece]) -> bool:
        """Add new text to `held`, the text in thinking that may be a call, and decide whether it can be one. Text that is no call is
        appended to `pieces` as reasoning. Returns True where the rest of the text must be read again as thinking."""
        text, tag = self._scanner.take((self._close,))
        held.append(text)
        if not self._is_settled and self._call is not None:
            inner = "".join(held)[len(held[0]) :]
            if not self._call[1](inner):
                self._held = None
                pieces.append(self._thought(held[0]))
                self._scanner.put_back(inner + (tag or ""))
                return True
            self._is_settled = len(inner) > _LONGEST_HEAD
        if tag is not None:
            self._held, self._state = None, "behind"
            pieces.append(self._thought("".join(held)))
        return False

    def _thought(self, text: str) -> Reasoning:
        self._place.push(text)
        return Reasoning(self._trimmer.push(text))

    def _start(self, pieces: list[Piece]) -> None:
        text = self._space + self._scanner.rest()
        stripped = text.lstrip()
        self._space = text[: len(text) - len(stripped)]
        self._scanner.push(stripped)
        opens = self._scanner.starts(self._open)
        if opens:
            self._scanner.drop(len(self._open))
            self._state = "thinking"
        elif opens is False:
            pieces.append(Content(self._space))
            self._state = "content"

    def finish(self, *, cut: bool = False) -> list[Piece]:
        rest = self._scanner.rest()
        if self._held is not None:
            text = "".join(self._held)
            return [self._thought(text) if cut else Content(text + rest)]
        if cut and rest and self._state in ("start", "thinking"):
            return []  # what is held back is the beginning of a tag
        if self._state == "start":
            return [Content(self._space + rest)]
        if self._state == "thinking":
            return [Reasoning(self._trimmer.push(rest))]
        return [Content(rest)]


class StrayTag:
    """A filter of content that removes closing tags of thinking at the beginning of a line outside code."""

    def __init__(self, tag: str) -> None:
        self._tag, self._scanner, self._place = tag, Scanner(), Place()
        self._has_dropped = False  # and the white space behind it has not ended

    def push(self, text: str) -> str:
        self._scanner.push(text)
        kept: list[str] = []
        while True:
            if self._has_dropped:
                self._scanner.skip_space()
                self._has_dropped = not self._scanner
            before, tag = self._scanner.take((self._tag,))
            self._place.push(before)
            kept.append(before)
            if tag is None:
                return "".join(kept)
            self._has_dropped = self._place.begins_line and not self._place.in_code
            if not self._has_dropped:
                self._place.push(tag)
                kept.append(tag)

    def rest(self) -> str:
        return self._scanner.rest()
