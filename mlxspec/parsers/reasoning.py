"""Splits reasoning from the answer: the text between a model's thinking tags at the beginning of what it writes.

Where the prompt has opened thinking (many templates end in the opening tag), the text begins inside. White space around the reasoning
belongs to the tags. A tag that comes later is text.
"""

from __future__ import annotations

from typing import Literal

from mlxspec.parsers.pieces import Content, Piece, Reasoning, Scanner, Trimmer


class ReasoningParser:
    """tags: what opens and what closes thinking. opened: the prompt has opened it."""

    def __init__(self, tags: tuple[str, str], *, opened: bool) -> None:
        self._open, self._close = tags
        self._state: Literal["start", "thinking", "behind", "content"] = "thinking" if opened else "start"
        self._scanner = Scanner()
        self._space = ""  # before what may be the opening tag
        self._trimmer = Trimmer()

    @property
    def is_thinking(self) -> bool:
        return self._state == "thinking"

    def push(self, text: str) -> list[Piece]:
        self._scanner.push(text)
        pieces: list[Piece] = []
        if self._state == "start":
            self._start(pieces)
        if self._state == "thinking":
            thought, tag = self._scanner.take((self._close,))
            pieces.append(Reasoning(self._trimmer.push(thought)))
            if tag:
                self._state = "behind"
        if self._state == "behind":
            self._scanner.skip_space()
            if self._scanner:
                self._state = "content"
        if self._state == "content":
            pieces.append(Content(self._scanner.rest()))
        return pieces

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
