"""The pieces that an answer consists of, and the text scanner that all parsers share.

A parser has `push(text)` and `finish()`, which both return pieces. Its contract, which property tests check: the merged pieces are the
same for every division of the text into pushes. This module depends on no format.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True)
class Content:
    """A piece of the answer's own text."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of the model's thinking, without its tags."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of the answer's tool call number `index`, of the tool `name`."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the arguments of call number `index`, as JSON text. All pieces of a complete call, joined, are one JSON object."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


def cut_notice(text: str) -> tuple[str, ...]:
    """Return the notice on a call that a limit cut, as a tuple of one sentence; empty where `text`, the part of the call that was
    written, is empty."""
    return (
        (f"a call was cut at the limit of the answer and is left out; so far it was: {text}",) if text else ()
    )


class OutputParser(Protocol):
    """A parser of one answer: `push` receives the answer's text part by part and returns pieces, `finish` ends the answer. The joined
    pieces are the same for every division of the text into parts."""

    @property
    def num_held(self) -> int:
        """Return the number of characters of the call that is being written; 0 where there is none, or where it has just begun."""

    def push(self, text: str) -> list[Piece]: ...

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """End the answer, and return the pieces of the text that was held back. cut: the answer ended at a limit, so that the beginning
        of a tag at its end is part of a cut tag, and no text."""


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces with empty ones left out and neighbours of one kind joined."""
    out: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            out.append(piece)
            continue
        if not piece.text:
            continue
        last = out[-1] if out else None
        if isinstance(last, type(piece)) and not isinstance(last, CallStart):
            same = not isinstance(piece, CallArguments) or piece.index == getattr(last, "index", None)
            if same:
                out[-1] = replace(last, text=last.text + piece.text)
                continue
        out.append(piece)
    return out


class Scanner:
    """A buffer of text in which tags are searched. `push` adds text, `take` removes text that is decided; an end of the text that may be
    the beginning of a tag is kept back."""

    def __init__(self) -> None:
        self._text = ""

    def push(self, text: str) -> None:
        self._text += text

    def take(self, tags: Sequence[str]) -> tuple[str, str | None]:
        """Remove and return the text before the first of these tags, and the tag. Where there is no tag, returns all text except an end
        that may begin one, and None. No tag may begin another."""
        places = [(place, tag) for tag in tags if (place := self._text.find(tag)) >= 0]
        if places:
            place, tag = min(places)
            before, self._text = self._text[:place], self._text[place + len(tag) :]
            return before, tag
        keep = max((overlap(self._text, tag) for tag in tags), default=0)
        cut = len(self._text) - keep
        before, self._text = self._text[:cut], self._text[cut:]
        return before, None

    def skip_space(self) -> None:
        self._text = self._text.lstrip()

    def starts(self, tag: str) -> bool | None:
        """Return whether the text begins with the tag; None while the text is shorter than the tag and agrees with it."""
        if self._text.startswith(tag):
            return True
        return None if tag.startswith(self._text) else False

    def drop(self, num: int) -> None:
        self._text = self._text[num:]

    def put_back(self, text: str) -> None:
        self._text = text + self._text

    def rest(self) -> str:
        """Remove and return all text of the buffer."""
        text, self._text = self._text, ""
        return text

    def __bool__(self) -> bool:
        return bool(self._text)


def overlap(text: str, tag: str) -> int:
    """Return the number of characters at the end of `text` that are the beginning of `tag`, but not all of it; 0 where none are."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


class Trimmer:
    """A filter of text that arrives in parts. It removes white space at the beginning (where `leading`), and holds white space at the
    end back until more text follows."""

    def __init__(self, *, leading: bool = True) -> None:
        self._begun = not leading
        self._held = ""

    def push(self, text: str) -> str:
        text = self._held + text
        if not self._begun:
            text = text.lstrip()
        if not text:
            self._held = ""
            return ""
        self._begun = self._begun or bool(text)
        stripped = text.rstrip()
        self._held = text[len(stripped) :]
        return stripped

    def rest(self) -> str:
        """Remove and return the white space that is held back."""
        held, self._held = self._held, ""
        return held
