"""Strings an answer must not hold: the tokens that would complete one are forbidden, however the string is cut into tokens.

Knows bytes of tokens and the end of the answer; knows no logits and no drafts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from mlxspec.loading.token_bytes import TokenBytes
from mlxspec.sampling import bits as bitsets
from mlxspec.sampling.bits import Bits


class BadWords:
    """Tables for some words: for each way in which a text may end inside a word, the tokens that complete it."""

    def __init__(self, words: Sequence[str], vocabulary: TokenBytes) -> None:
        self._tokens, self._special = vocabulary.tokens, vocabulary.special
        self._words = [w.encode() for w in words]
        self.longest = max(len(w) for w in self._words)
        ids, size = vocabulary.text_ids, len(self._tokens)
        order = vocabulary.sorted_ids
        keys = vocabulary.sorted_bytes
        whole = {i for i in ids if any(w in self._tokens[i] for w in self._words)}
        self._everywhere = ~bitsets.only(whole, size)
        self._behind: dict[bytes, Bits] = {}  # an end of text that begins a word -> what may follow it
        for word in self._words:
            for cut in range(1, len(word)):
                begin, rest = word[:cut], word[cut:]
                first = bisect_left(keys, rest)
                last = first
                while last < len(keys) and keys[last].startswith(rest):
                    last += 1
                allowed = ~bitsets.only(order[first:last], size)
                known = self._behind.get(begin)
                self._behind[begin] = allowed if known is None else known & allowed

    def step(self, tail: bytes, token: int) -> bytes:
        """The end of the answer, as long as matters, behind one more token."""
        if token in self._special or self.longest == 1:
            return b"" if self.longest == 1 else tail
        return (tail + self._tokens[token])[1 - self.longest :]

    def mask(self, tail: bytes) -> Bits:
        """What may follow a text that ends in `tail`."""
        found: Bits = self._everywhere
        for begin, allowed in self._behind.items():
            if tail.endswith(begin):
                found = np.bitwise_and(found, allowed)
        return found
