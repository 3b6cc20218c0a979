"""The bytes of every token, from the tokenizer's files. Grammars, bad words, thinking and lists of log-probabilities need them.

The table holds only the ids for which the model's embedding has a row. Vocabularies spell bytes in three ways: byte-level, byte fallback
with a mark for spaces, and plain text. A space that a decoder would add or remove at the beginning of a text is not seen here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxspec.loading.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_SPACE = "\u2581"  # the mark SentencePiece writes for a space


class TokenBytes:
    """The bytes of every token of a vocabulary. size: number of token ids that the model has (rows of its embedding). special: ids of
    special tokens, which are not text; their bytes are their names."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Create the table. vocab_size: number of token ids that the model has (rows of its embedding); the tokenizer may have fewer ids
        or more."""
        self._tokenizer, self.size = tokenizer, vocab_size
        self.eos_ids = frozenset(i for i in tokenizer.eos_ids if 0 <= i < vocab_size)
        self._spell = _speller(_kinds(json.loads(tokenizer.decoder_state())))
        added = tokenizer.added_tokens().items()
        self.special = frozenset(t for t, is_special in added if is_special and t < vocab_size)

    def spelled(self, token: int) -> bytes:
        """Return the bytes of one token id, b"" for an id that the tokenizer does not have."""
        text = self._tokenizer.token_text(token)
        return b"" if text is None else self._spell(text)

    @cached_property
    def tokens(self) -> tuple[bytes, ...]:
        """Return the bytes of each token, by id. The first access takes several tenths of a second for a large vocabulary."""
        return tuple(map(self.spelled, range(self.size)))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, all below `size`. The spelling of an added token with a higher id is encoded as plain text."""
        found = self._tokenizer.encode(text, special=False)
        if found and max(found) >= self.size:
            found = self._within_rows.encode(text, special=False)
        return found

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of a text, all below `size`, with spellings of control tokens encoded as plain text."""
        found = self._tokenizer.encode_plain(text)
        return self._within_rows.encode_plain(text) if found and max(found) >= self.size else found

    @cached_property
    def _within_rows(self) -> Tokenizer:
        return self._tokenizer.without_ids_from(self.size)

    @cached_property
    def text_ids(self) -> tuple[int, ...]:
        """Return the ids that are text (not special, not empty), in rising order."""
        return tuple(i for i, data in enumerate(self.tokens) if data and i not in self.special)

    @cached_property
    def sorted_ids(self) -> tuple[int, ...]:
        """Return the ids that are text, in the order of their bytes, so that tokens with a common beginning are neighbours."""
        return tuple(sorted(self.text_ids, key=self.tokens.__getitem__))

    @cached_property
    def sorted_bytes(self) -> tuple[bytes, ...]:
        """Return the bytes of each of `sorted_ids`, in that order."""
        return tuple(self.tokens[i] for i in self.sorted_ids)

    @cached_property
    def sorted_array(self) -> NDArray[np.int32]:
        """Return `sorted_ids` as an array (n,) int32."""
        return np.asarray(self.sorted_ids, np.int32)

    @cached_property
    def joined(self) -> tuple[bytes, tuple[int, ...]]:
        """Return the bytes of all `text_ids` in one string, and the offset of each, followed by the length of the string."""
        pieces = [self.tokens[i] for i in self.text_ids]
        return b"".join(pieces), (0, *accumulate(map(len, pieces)))


def _speller(kinds: frozenset[str]) -> Callable[[str], bytes]:
    """Return a function that returns the bytes of a token, given its spelling in the vocabulary. kinds: types of the tokenizer's
    decoders."""
    if "ByteLevel" in kinds:
        table = _byte_level()
        return lambda text: bytes(table[c] for c in text) if all(c in table for c in text) else text.encode()
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
        return _fallback
    return str.encode


def _fallback(text: str) -> bytes:
    byte = _BYTE.match(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE, " ").encode()


def _byte_level() -> dict[str, int]:
    """Return the byte that each character of GPT-2's spelling stands for. Printable characters of Latin-1 stand for themselves, the
    characters from 256 on for the other bytes in order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    table, moved = {}, 256
    for byte in range(256):
        if byte in printable:
            table[chr(byte)] = byte
        else:
            table[chr(moved)] = byte
            moved += 1
    return table


def _kinds(state: Any) -> frozenset[str]:
    """Return the values of "type" at all levels of a decoder's serialized form."""
    if isinstance(state, list):
        return frozenset().union(*map(_kinds, state))
    if not isinstance(state, dict):
        return frozenset()
    own = {state["type"]} if isinstance(state.get("type"), str) else set()
    return frozenset(own).union(*map(_kinds, state.values()))
