"""Strings that an answer must not contain: tokens that would complete one are forbidden, however the string is cut into tokens.

An automaton (Aho and Corasick 1975) reads the answer's bytes. Its state is the longest end of the text that begins a word; the shorter
ends that begin a word are the state's suffix links. At each state on that chain the tokens that complete a word are ranges of the sorted
vocabulary, found when the words are compiled. So a step costs one look-up for each byte, and a mask costs the ranges of one chain,
however many words there are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from mlxspec.loading.token_bytes import TokenBytes
from mlxspec.sampling.bits import Bits

START = 0  # the state before the answer
_MASKS_KEPT = 64
_NODE_BYTES = 400  # of a state: its edges' entries in a dict, its link, its word's mark
_RANGE_BYTES = 200


class BadWords:
    """The automaton that forbids some words. Immutable except for a bounded cache of masks; rows of one request share it.

    nbytes: estimate of the bytes that it takes, masks included.
    """

    def __init__(self, words: Sequence[str], vocabulary: TokenBytes) -> None:
        """Build the automaton. Takes time in proportion to the words' bytes and to the bytes of the vocabulary. Steps are short, so
        other threads go on meanwhile."""
        self._tokens, self._special = vocabulary.tokens, vocabulary.special
        self._order = vocabulary.sorted_array
        self._edges: dict[int, int] = {}  # state << 8 | byte -> state
        self._links = [START]
        ends = self._insert(sorted({w.encode() for w in words}, key=len))
        self._ranges: dict[
            int, list[tuple[int, int]]
        ] = {}  # state -> of sorted ids, those that complete a word
        self._complete(ends, vocabulary)
        self._everywhere = self._holding(ends, vocabulary)
        self._masks: OrderedDict[int, Bits] = OrderedDict()
        self.nbytes = (
            len(self._links) * _NODE_BYTES
            + sum(map(len, self._ranges.values())) * _RANGE_BYTES
            + (_MASKS_KEPT + 16) * len(self._tokens) // 8
        )

    def step(self, state: int, token: int) -> int:
        """Return the state after one more token. A special token has no text and changes no state."""
        if token not in self._special:
            for byte in self._tokens[token]:
                state = self._next(state, byte)
        return state

    def mask(self, state: int) -> Bits:
        """Return the tokens that may follow a text whose state is `state`."""
        known = self._masks.get(state)
        if known is not None:
            self._masks.move_to_end(state)
            return known
        allowed = self._everywhere.copy()
        at = state
        while at != START:
            for first, last in self._ranges.get(at, ()):
                allowed[self._order[first:last]] = 0
            at = self._links[at]
        found: Bits = np.packbits(allowed, bitorder="little").view(np.uint32)
        self._masks[state] = found
        if len(self._masks) > _MASKS_KEPT:
            self._masks.popitem(last=False)
        return found

    # --- compiling

    def _insert(self, words: Sequence[bytes]) -> dict[int, bytes]:
        """Add the states and links of the words. Returns the words by their last states, without words that contain a shorter one."""
        edges, links, ends = self._edges, self._links, dict[int, bytes]()
        for word in words:
            state = START
            for byte in word:
                key = state << 8 | byte
                if key not in edges:
                    edges[key] = len(links)
                    links.append(START)
                state = edges[key]
            ends[state] = word
        children: dict[int, list[tuple[int, int]]] = {}
        for key, child in edges.items():
            children.setdefault(key >> 8, []).append((key & 255, child))
        holds_word = bytearray(len(links))  # whether a word ends there, or in one of its links
        queue = deque([START])
        while queue:
            parent = queue.popleft()
            for byte, child in children.get(parent, ()):
                links[child] = START if parent == START else self._next(links[parent], byte)
                redundant = holds_word[parent] or holds_word[links[child]]
                holds_word[child] = redundant or child in ends
                if redundant:
                    ends.pop(child, None)
                queue.append(child)
        return ends

    def _next(self, state: int, byte: int) -> int:
        edges, links = self._edges, self._links
        while (found := edges.get(state << 8 | byte)) is None:
            if state == START:
                return START
            state = links[state]
        return found

    def _complete(self, ends: dict[int, bytes], vocabulary: TokenBytes) -> None:
        """Find, for each state inside a word, the tokens that begin with the rest of that word."""
        keys = vocabulary.sorted_bytes
        longest = max(map(len, keys), default=0)
        for word in ends.values():
            state = START
            for cut in range(1, len(word)):
                state = self._edges[state << 8 | word[cut - 1]]
                if len(word) - cut > longest:
                    continue
                rest = word[cut:]
                first = bisect_left(keys, rest)
                last = bisect_left(keys, behind, first) if (behind := _behind(rest)) else len(keys)
                if first < last:
                    self._ranges.setdefault(state, []).append((first, last))

    def _holding(self, ends: dict[int, bytes], vocabulary: TokenBytes) -> np.ndarray:
        """Return a flag for each token, padded to a multiple of 32: 0 for a token whose text contains a whole word."""
        size = len(self._tokens)
        allowed = np.ones((size + 31) // 32 * 32, np.uint8)
        allowed[size:] = 0
        text, starts = vocabulary.joined
        for word in ends.values():
            place = text.find(word)
            while place >= 0:
                token = bisect_right(starts, place) - 1
                if place + len(word) <= starts[token + 1]:
                    allowed[vocabulary.text_ids[token]] = 0
                    place = text.find(word, starts[token + 1])
                else:
                    place = text.find(word, place + 1)
        return allowed


def _behind(prefix: bytes) -> bytes:
    """Return the smallest string that sorts after all strings with this prefix; b"" where there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b""
