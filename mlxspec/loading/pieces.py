"""Tokenizes long texts in pieces, so that it can be stopped in between, with exactly the ids of the whole text.

A text may be cut where neither side affects the tokens of the other. The tokenizer's own rules tell where that is:

words   one regular expression splits the text into words, and nothing joins tokens of two words (byte-level BPE). It matches from left
        to right and looks at no more than one character ahead, so the beginning of a word is such a place, if it is found in a piece
        that goes on for some characters behind it.
lines   nothing splits the text (BPE over whole lines), but no token of the vocabulary holds a line's end and something behind it, so
        no merge can go over it.

If neither holds, a text is encoded as a whole. Every call of the library releases Python's lock meanwhile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

from tokenizers import Encoding
from tokenizers import Tokenizer as _Tokenizer

SLICE = 1 << 16  # characters of a piece
LONGEST = 1 << 18  # characters that are encoded at once, at most
_MARGIN = 64  # characters behind a cut that the piece must have seen
_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]")
_LOOKS = re.compile(r"\(\?[=!<]|\\[bBAGKzZ]|\^|\$")
_PLAIN = 0x300  # characters below combine with nothing before them

Cut = Literal["words", "lines"]


class UncuttableError(Exception):
    """A stretch of more than LONGEST characters in which no place to cut was found."""


class Pieces:
    """One tokenizer's. cuts: where its texts may be cut, None for nowhere."""

    def __init__(self, inner: _Tokenizer, size: int = SLICE, longest: int = LONGEST) -> None:
        self._inner, self._size, self._longest = inner, size, longest
        added = inner.get_added_tokens_decoder().values()
        self._margin = max([_MARGIN, *(len(t.content) + 1 for t in added)])
        self.cuts: Cut | None = None
        if any(t.lstrip or t.rstrip or t.single_word for t in added):
            return  # they take characters of what stands around them
        split, normalizer = _parts(inner.pre_tokenizer), _parts(inner.normalizer)
        is_nfc = [n["type"] for n in normalizer] == ["NFC"]
        self._needs_plain = is_nfc
        if (is_nfc or not normalizer) and _splits_words(split):
            self.cuts = "words"
        elif _keeps_lines(split, normalizer, is_nfc=is_nfc) and _is_plain_bpe(inner):
            vocabulary = inner.get_vocab(with_added_tokens=True)
            if "\n" in vocabulary and not any("\n" in t.rstrip("\n") for t in vocabulary):
                self.cuts = "lines"

    def encode(self, text: str) -> Iterator[list[int]]:
        """Ids of the text, a piece at a time, without what is put around whole texts. Raises UncuttableError."""
        start, size = 0, self._size
        while start < len(text):
            end = start + size
            if end >= len(text):
                yield self._whole(text[start:]).ids
                return
            if size > self._longest:
                raise UncuttableError
            found = self._line(text, start, end) if self.cuts == "lines" else self._word(text, start, end)
            if found is None:
                size *= 2
                continue
            ids, start = found
            size = self._size
            yield ids

    def _whole(self, piece: str) -> Encoding:
        # of several ways to encode this one alone gives up Python's lock
        return self._inner.encode_batch([piece], add_special_tokens=False)[0]

    def _line(self, text: str, start: int, end: int) -> tuple[list[int], int] | None:
        place = text.rfind("\n", start, end) + 1
        while place > start and (text[place] == "\n" or not self._may_begin(text[place])):
            place = text.rfind("\n", start, place - 1) + 1
        return (self._whole(text[start:place]).ids, place) if place > start else None

    def _word(self, text: str, start: int, end: int) -> tuple[list[int], int] | None:
        if self.cuts is None:
            return None
        encoding = self._whole(text[start:end])
        latest = end - start - self._margin
        for i in range(len(encoding) - 1, 0, -1):
            if encoding.token_to_word(i) == encoding.token_to_word(i - 1):
                continue
            before, behind = encoding.token_to_chars(i - 1), encoding.token_to_chars(i)
            # where offsets leave out white space, they do not meet
            if before is None or behind is None or before[1] != behind[0] or before[0] == before[1]:
                continue
            if 0 < behind[0] <= latest and behind[0] < behind[1] and self._may_begin(text[start + behind[0]]):
                return encoding.ids[:i], start + behind[0]
        return None

    def _may_begin(self, char: str) -> bool:
        return not self._needs_plain or ord(char) < _PLAIN


def _parts(component: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    inside = state.get("pretokenizers") or state.get("normalizers")
    return inside if state["type"] == "Sequence" else [state]


def _splits_words(split: list[dict[str, Any]]) -> bool:
    """Whether words are matches of one expression that looks no further than one character ahead, or what lies between them."""
    if len(split) != 2 or split[1]["type"] != "ByteLevel" or split[0]["type"] != "Split":
        return False
    first, second = split
    if second["add_prefix_space"] or second["use_regex"] or first["invert"]:
        return False
    pattern = first["pattern"].get("Regex")
    if pattern is None or first["behavior"] != "Isolated":
        return False
    return not _LOOKS.search(_CLASS.sub("c", pattern.replace(r"(?!\S)", "")))


def _keeps_lines(split: list[dict[str, Any]], normalizer: list[dict[str, Any]], *, is_nfc: bool) -> bool:
    """Whether what is done before merging never looks over a line's end."""
    steps = [] if is_nfc else normalizer
    patterns = [s.get("pattern", {}).get("String") for s in (*steps, *split)]
    kinds = all(s["type"] == "Replace" for s in steps) and all(s["type"] == "Split" for s in split)
    return kinds and all(p is not None and "\n" not in p for p in patterns)


def _is_plain_bpe(inner: _Tokenizer) -> bool:
    state = json.loads(inner.model.__getstate__())
    plain = not any(
        state.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    )
    return state["type"] == "BPE" and plain
