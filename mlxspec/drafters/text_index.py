"""An index over finished texts: where did the last tokens of a text stand before, and what followed there?

After SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975): the places that share the longest suffix with the text vote on what follows.
In place of suffix trees there is what LZ77 compressors use. A slot for each hash of the last n tokens holds where they stood last, and each
place holds the one before it, for two n: the long one finds what was said long ago among many texts that end alike (a chat template's
last tokens), the short one goes on behind a change.

Texts lie in segments that are only appended to. A new one takes as many tokens as its owner has, so an owner has few of them. Bounds: a
lookup follows STEPS links for each segment and n, and compares PLACES places at most; memory is the budget, whose oldest segments of the
owner that was served longest ago go first; a text's beginning that the newest segment holds is not stored again. Owners never see each
other's texts. Negative tokens are borders: nothing is found or drafted across one. Knows ids; knows no model, no rows and no files.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

ANCHORS = (24, 4)  # tokens that lead to places, the long one first
PLACES, STEPS = 8, 16  # places that are compared, and links followed for those of one segment
CONTEXT = 64  # tokens a place is compared by
SMALLEST = 1 << 16  # tokens of an owner's first segment
TOKEN_INDEXED = 4 + 8 * len(ANCHORS)  # bytes of a token
_KNOWN_EVERY = 64  # tokens between two places up to which a text is known to be stored
_FLOOR = 0.25  # probability of a whole draft, below which it ends
_EVIDENCE = 4.0  # tokens of the suffix that count as one more place that agrees

_FACTOR = 0x5851F42D4C957F2D  # Knuth's MMIX multiplier
_INVERSE = pow(_FACTOR, -1, 1 << 64)
_MASK = (1 << 64) - 1


class Continuation(NamedTuple):
    """What may follow a text. confidences: of each token, estimated. length: tokens before it that agree, CONTEXT at most. steps: links
    that were followed."""

    tokens: list[int]
    confidences: list[float]
    length: int
    steps: int


class TextSegment:
    """Texts of one owner, with a border behind each. It takes `room` tokens at most."""

    def __init__(self, room: int) -> None:
        self._tokens = np.full(CONTEXT + room, -1, np.int32)  # begins with a border
        num_bits = max(1, room.bit_length() - 1)
        self._down = 64 - num_bits
        self._heads = [np.zeros(1 << num_bits, np.int32) for _ in ANCHORS]
        self._before = [np.zeros(CONTEXT + room, np.int32) for _ in ANCHORS]
        self._raw, self._links = memoryview(self._tokens).cast("B"), [memoryview(x) for x in self._before]
        self._slots = [memoryview(x) for x in self._heads]
        self._end = CONTEXT
        self._known: set[int] = set()  # hashes of beginnings
        self.nbytes = sum(x.nbytes for x in (self._tokens, *self._heads, *self._before))

    @property
    def room(self) -> int:
        return len(self._tokens) - self._end

    def num_known(self, sums: Any) -> int:
        """How many of a text's first tokens are stored here. sums: `prefix_sums` of it."""
        lengths = [len(sums), *range(len(sums) // _KNOWN_EVERY * _KNOWN_EVERY, 0, -_KNOWN_EVERY)]
        return next((n for n in lengths if int(sums[n - 1]) in self._known), 0)

    def append(self, text: Any, begin: int, sums: Any) -> None:
        """text[begin:] of a text (n,) int32, fewer tokens than `room`. sums: `prefix_sums` of it."""
        num, start = len(text) - begin, self._end
        self._tokens[start : start + num] = text[begin:]
        self._end = start + num + 1  # the border
        self._known.update(map(int, sums[_KNOWN_EVERY - 1 :: _KNOWN_EVERY]), map(int, sums[-1:]))
        borders = np.append(0, np.cumsum(text < 0))
        sums, inverse = np.append(np.uint64(0), sums), _powers(_INVERSE, len(text))
        for n, heads, before in zip(ANCHORS, self._heads, self._before, strict=True):
            ends = np.arange(begin + n, len(text))  # each has a token behind it
            ends = ends[borders[ends] == borders[ends - n]]
            if not len(ends):
                continue
            slots = ((sums[ends] - sums[ends - n]) * inverse[ends] >> np.uint64(self._down)).astype(np.int64)
            order = np.argsort(slots, kind="stable")
            places, slots = ends[order] + (start - begin), slots[order]
            is_first = np.append(True, slots[1:] != slots[:-1])
            before[places] = np.where(is_first, heads[slots], np.append(0, places[:-1]))
            is_last = np.append(is_first[1:], True)
            heads[slots[is_last]] = places[is_last]

    def links(self, which: int, key: int) -> Iterator[int]:
        """Places behind n-grams of this hash, the latest first; a few may have another one."""
        place, links = self._slots[which][key >> self._down], self._links[which]
        for _ in range(STEPS):
            if not place:
                return
            yield place
            place = links[place]

    def agreeing(self, place: int, tail: int) -> int:
        """How many tokens before a place are the last ones of a text. tail: its last CONTEXT tokens as one number."""
        own = int.from_bytes(self._raw[4 * (place - CONTEXT) : 4 * place], "little")
        return CONTEXT - ((own ^ tail).bit_length() + 31) // 32

    def following(self, place: int, limit: int) -> list[int]:
        """At most `limit` tokens behind a place, up to the border."""
        found: list[int] = self._tokens[place : place + limit].tolist()
        return next((found[:i] for i, token in enumerate(found) if token < 0), found)


class TextIndex:
    """See the module. budget: bytes of all owners' segments together; room: about as many tokens. keep: told of each owner and piece that
    is stored."""

    def __init__(self, budget: int) -> None:
        self.budget, self.room = budget, budget // TOKEN_INDEXED
        self._largest = self.room // 4
        self.keep: Callable[[str, list[int]], None] = lambda owner, piece: None
        self._owners: dict[str, list[TextSegment]] = {}  # oldest segment first, by owner, the latest last

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for segments in self._owners.values() for s in segments)

    def num_segments(self, owner: str) -> int:
        return len(self._owners.get(owner, ()))

    def add(self, owner: str, text: Sequence[int]) -> list[int]:
        """A finished text. Returns what of it was stored: not the beginning that is there already."""
        whole = np.maximum(np.asarray(text, np.int64), -1).astype(np.int32)  # ids of images are far below
        if not len(whole) or self._largest < 2 * CONTEXT:
            return []
        segments = self._owners[owner] = self._owners.pop(owner, [])
        sums = prefix_sums(whole)
        known = segments[-1].num_known(sums) if segments else 0
        if known == len(whole):
            return []
        begin = max(0, known - CONTEXT, len(whole) - self._largest // 2)
        if not segments or segments[-1].room <= len(whole) - begin:
            held = sum(s.nbytes for s in segments) // TOKEN_INDEXED
            segments.append(TextSegment(min(self._largest, max(SMALLEST, held, 2 * (len(whole) - begin)))))
            self._shrink(owner)
        segments[-1].append(whole, begin, sums)
        piece: list[int] = whole[begin:].tolist()
        self.keep(owner, piece)
        return piece

    def _shrink(self, latest: str) -> None:
        """Let go of what is above the budget, but for the latest owner's newest segment."""
        while self.nbytes > self.budget:
            oldest = next(o for o, s in self._owners.items() if o != latest or len(s) > 1)
            del self._owners[oldest][0]
            if not self._owners[oldest]:
                del self._owners[oldest]

    def find(self, owner: str, text: Sequence[int], limit: int) -> Continuation | None:
        """What followed the longest suffix of `text` that one of the owner's texts holds, `limit` tokens at most. None where the last
        tokens have not stood there. Only the latest PLACES places of the longer n that has any are compared."""
        segments = self._owners.get(owner)
        last = [token if token >= 0 else -2 for token in text[-CONTEXT:]]
        if not segments or min(last[-min(ANCHORS) :], default=-1) < 0:
            return None
        padded = array("i", [-2] * (CONTEXT - len(last)) + last)  # -2 stands in no text
        tail = int.from_bytes(padded.tobytes(), "little")
        steps = 0
        for which, n in enumerate(ANCHORS):
            if len(last) < n:
                continue
            key = 0
            for token in last[-n:]:
                key = (key + token + 1) * _INVERSE & _MASK
            places: list[tuple[int, TextSegment, int]] = []
            for segment, place in ((s, at) for s in reversed(segments) for at in s.links(which, key)):
                steps += 1
                agreeing = segment.agreeing(place, tail)
                if agreeing >= n:
                    places.append((agreeing, segment, place))
                    if len(places) == PLACES:
                        break
            if places:
                length = max(p[0] for p in places)
                said = [s.following(place, limit) for agreeing, s, place in places if agreeing == length]
                return Continuation(*_vote(said, length, limit), length, steps)
        return None


def _vote(said: Sequence[list[int]], length: int, limit: int) -> tuple[list[int], list[float]]:
    """The most frequent token of each depth, of equally frequent ones the one said latest, until the draft has become improbable. What lost
    a vote has none afterwards. A probability is the Krichevsky-Trofimov estimate, to which the suffix adds votes while all agree."""
    tokens: list[int] = []
    shares: list[float] = []
    whole, more, depth = 1.0, length / _EVIDENCE, 0
    while depth < limit and said:
        votes = num = len(said)
        if num > 1:
            said = [s for s in said if len(s) > depth]
            winner, votes = Counter(s[depth] for s in said).most_common(1)[0] if said else (0, 0)
            num, said = len(said), [s for s in said if s[depth] == winner]
        more = more if votes == num else 0.0
        share = (votes + more + 0.5) / (num + more + 1)
        whole *= share
        if not said or len(said[0]) == depth or whole < _FLOOR:
            break
        tokens.append(said[0][depth])
        shares.append(share)
        depth += 1
    return tokens, shares


def prefix_sums(text: Any) -> Any:
    """(n,) uint64: hashes of the beginnings of a text (n,) int32. Two of them give the hash of the tokens in between."""
    return np.cumsum(
        (text.astype(np.int64).astype(np.uint64) + np.uint64(1)) * _powers(_FACTOR, len(text))[:-1]
    )


def _powers(factor: int, most: int) -> Any:
    """(most + 1,) uint64: factor to the powers of 0 to `most`, modulo 2^64."""
    return np.cumprod(np.append(np.uint64(1), np.full(most, factor, np.uint64)))
