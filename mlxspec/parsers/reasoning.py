"""Splits reasoning from the answer: the text between a model's thinking tags at the beginning of what it writes.

Where the prompt has opened thinking (many templates end in the opening tag), the text begins inside. White space around the reasoning
belongs to the tags. A tag that comes later is text. A call of one of the request's tools ends thinking that the model forgot to close.
"""

from __future__ import annotations

from typing import Literal

from mlxspec.parsers.pieces import Content, Piece, Reasoning, Scanner, Trimmer
from mlxspec.parsers.place import Place

_LONGEST_HEAD = 400  # characters in which the beginning of a call is looked for


class ReasoningParser:
    """tags: what opens and what closes thinking. opened: the prompt has opened it. calls: how a call of a known tool begins: the tag, and
    what may follow it, without white space."""

    def __init__(
        self, tags: tuple[str, str], *, opened: bool, calls: tuple[str, tuple[str, ...]] | None = None
    ) -> None:
        self._open, self._close = tags
        self._calls = calls
        self._state: Literal["start", "thinking", "behind", "content"] = "thinking" if opened else "start"
        self._scanner = Scanner()
        self._space = ""  # before what may be the opening tag
        self._trimmer = Trimmer()
        self._place = Place()

    @property
    def is_thinking(self) -> bool:
        return self._state == "thinking"

    def push(self, text: str) -> list[Piece]:
        self._scanner.push(text)
        pieces: list[Piece] = []
        if self._state == "start":
            self._start(pieces)
        if self._state == "thinking":
            self._think(pieces)
        if self._state == "behind":
            self._scanner.skip_space()
            if self._scanner:
                self._state = "content"
        if self._state == "content":
            pieces.append(Content(self._scanner.rest()))
        return pieces

    def _think(self, pieces: list[Piece]) -> None:
        """Thoughts up to what ends them, or to what may yet turn out to."""
        tags = (self._close,) if self._calls is None else (self._close, self._calls[0])
        while self._state == "thinking":
            thought, tag = self._scanner.take(tags)
            pieces.append(self._thought(thought))
            if tag is None:
                return
            if tag == self._close:
                self._state = "behind"
                return
            is_call = self._begins_call() if self._place.begins_line and not self._place.is_code else False
            rest = tag + self._scanner.rest()
            if is_call is None:
                self._scanner.push(rest)
                return
            if is_call:
                self._scanner.push(rest)
                self._state = "behind"
                return
            pieces.append(self._thought(tag))
            self._scanner.push(rest[len(tag) :])

    def _thought(self, text: str) -> Reasoning:
        self._place.push(text)
        return Reasoning(self._trimmer.push(text))

    def _begins_call(self) -> bool | None:
        """Whether what follows the tag of calls is a known tool's; None while too little has come to say."""
        text = "".join(self._scanner.peek(_LONGEST_HEAD).split())
        heads = () if self._calls is None else self._calls[1]
        if text.startswith(heads):
            return True
        return None if any(head.startswith(text) for head in heads) else False

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
        if cut and rest and self._state in ("start", "thinking"):
            return []  # what is held back is the beginning of a tag
        if self._state == "start":
            return [Content(self._space + rest)]
        if self._state == "thinking":
            return [Reasoning(self._trimmer.push(rest))]
        return [Content(rest)]
