"""Follows the text of an answer up to the tag from which a grammar holds: one that begins a line, outside fenced blocks, or is a
special token outside code (parsers/place.py). In code a tag is mostly spoken of, and a grammar would force a call behind it.

A state is a value, so the effect of a draft can be computed and dropped. Bytes stand for characters, one each: what is looked for is ASCII.
"""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

from mlxspec.loading.token_bytes import TokenBytes
from mlxspec.parsers.pieces import overlap
from mlxspec.parsers.place import Place


class BeforeCall(NamedTuple):
    """The state of a text before a call. place: the end of the text before `tail`. tail: the end of the text that may begin the tag.
    is_open: the tag is complete, and the grammar holds."""

    place: Place
    tail: str = ""
    is_open: bool = False

    @property
    def may_open(self) -> bool:
        """Return whether the tag is complete, or the next tokens can complete it."""
        return self.is_open or (bool(self.tail) and self.place.begins_line and not self.place.in_fence)


class Opening:
    """The rule by which a tag in the text starts a grammar, for one request. tag: the text that opens a call. once: the answer ends
    after the first call."""

    def __init__(self, tag: str, vocabulary: TokenBytes, *, once: bool) -> None:
        self._tag, self._tokens, self.once = tag.encode().decode("latin-1"), vocabulary.tokens, once
        self._ids = frozenset(t for t in vocabulary.special if self._tokens[t] == tag.encode())

    def start(self) -> BeforeCall:
        """Return the state before any text."""
        return BeforeCall(Place())

    def step(self, seen: BeforeCall, token: int) -> BeforeCall:
        """Return the state after one more token of text."""
        text, place = seen.tail + self._tokens[token].decode("latin-1"), copy(seen.place)
        while (at := text.find(self._tag)) >= 0:
            place.push(text[:at])
            if (place.begins_line and not place.in_fence) or (token in self._ids and not place.in_code):
                return BeforeCall(place, is_open=True)
            place.push(self._tag)
            text = text[at + len(self._tag) :]
        cut = len(text) - (overlap(text, self._tag) if self._tag[0] in text else 0)
        place.push(text[:cut])
        return BeforeCall(place, text[cut:])
