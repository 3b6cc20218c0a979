"""An index over texts: where did the last tokens of a text stand before, and what followed there?

For each of its n, an index knows the latest place behind every n-gram, and each place holds the one before it, as in LZ77 compressors. Two
forms share how places are followed and compared: `GrowingText` is one row's text, to which tokens are added one by one; `TextSegment` is
finished texts in arrays, filled at once. `TextIndex` keeps segments by owner: the places that share the longest suffix with a text vote on
what follows, after SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). It has two n: the long one finds what was said long ago among
many texts that end alike (a chat template's last tokens), the short one goes on behind a change. Answers of the owner's rows that run are
among its texts, as far as they have come (`RunningText`), so rows that say the same draft from one another.

Segments are only appended to. A new one takes as many tokens as its owner has, so an owner has few of them. Bounds: a lookup follows STEPS
links for each segment and n, and compares PLACES places at most; memory is the budget, whose oldest segments of the owner that was served
longest ago go first; a text's beginning that the newest segment holds is not stored again. Owners never see each other's texts. Negative
tokens are borders: nothing is found or drafted across one. Knows ids; knows no model, no rows and no files.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

ANCHORS = (24, 4)  # tokens that lead to places among an owner's texts, the long one first
PLACES, STEPS = 8, 16  # places that are compared, and links followed for those of one segment
CONTEXT = 64  # tokens a place is compared by
SMALLEST = 1 << 16  # tokens of an owner's first segment
TOKEN_INDEXED = 4 + 8 * len(ANCHORS)  # bytes of a token
PIECE = 1 << 12  # tokens that are indexed at once, in about 4 ms; a multiple of _KNOWN_EVERY
_KNOWN_EVERY = 64  # tokens between two places up to which a text is known to be stored
_FLOOR = 0.25  # probability of a whole draft, below which it ends
_EVIDENCE = 4.0  # tokens of the suffix that count as one more place that agrees

_log = logging.getLogger("mlxspec")
_FACTOR = 0x5851F42D4C957F2D  # Knuth's MMIX multiplier
_INVERSE = pow(_FACTOR, -1, 1 << 64)
_MASK = (1 << 64) - 1
_BORDER, _NOWHERE = -1, -2  # before, between and behind texts; a token that stands in none


class IndexedText:
    """A text with an index of its n-grams. It begins with CONTEXT borders. ns: the lengths n; heads, links: for each n, the latest place of
    each hash, and for each place the previous one of the same hash, 0 for none. A place is the index of the token that follows an
    n-gram."""

    ns: Sequence[int]
    tokens: Any
    heads: Sequence[Any]
    links: Sequence[Any]
    end: int

    def places(self, which: int, key: int) -> Iterator[int]:
        """Yield the places that follow n-grams with the hash `key`, the latest first; a few may have another hash. which: index of n in
        `ns`."""
        place, links = self.heads[which].get(key, 0), self.links[which]
        while place:
            yield place
            place = links[place]

    def agreeing(self, place: int, tail: int) -> int:
        """Return how many tokens before a place equal the last tokens of a text. tail: these tokens as `tail_of` encodes them."""
        own = int.from_bytes(self.tokens[place - CONTEXT : place].tobytes(), "little")
        return CONTEXT - ((own ^ tail).bit_length() + 31) // 32

    def following(self, place: int, limit: int) -> list[int]:
        """Return at most `limit` tokens from `place` on, up to the next border (a negative token, which separates texts). If the text ends
        before a border or the limit, its tokens from `place` to its end are repeated cyclically."""
        found: list[int] = self.tokens[place : min(place + limit, self.end)].tolist()
        if found and min(found) < 0:
            return next(found[:i] for i, token in enumerate(found) if token < 0)
        while len(found) < limit:
            found.append(found[place - self.end])
        return found


class GrowingText(IndexedText):
    """The growing text of one row, indexed by n-grams of one length. Every n-gram but the text's last one has a following token; `key` is
    the hash of the last one."""

    def __init__(self, n: int) -> None:
        self.ns = (n,)
        self.tokens, self.links = array("i", [_BORDER] * CONTEXT), (array("i", [0] * CONTEXT),)
        self.heads: tuple[dict[int, int]] = ({},)
        self.end, self.key = CONTEXT, 0
        self._since = 0  # tokens behind the last border
        self._oldest = pow(_INVERSE, n, 1 << 64)  # what the first token of an n-gram counts in its hash

    def extend(self, tokens: Iterable[int]) -> None:
        """Add the next tokens of the text; negative ones are borders."""
        n, (heads,), (links,), held = self.ns[0], self.heads, self.links, self.tokens
        for token in tokens:
            is_whole = self._since >= n
            links.append(heads.get(self.key, 0) if is_whole else 0)
            if is_whole:
                heads[self.key] = self.end
            held.append(max(token, _BORDER))
            self.end += 1
            if token < 0:
                self.key = self._since = 0
                continue
            gone = (held[-1 - n] + 1) * self._oldest if is_whole else 0
            self.key = (self.key + token + 1 - gone) * _INVERSE & _MASK
            self._since += 1

    def earlier(self, most: int) -> list[int]:
        """Return at most `most` places where the last n tokens occurred before, the latest first."""
        return list(islice(self.places(0, self.key), most)) if self._since >= self.ns[0] else []

    def backing(self, place: int) -> int:
        """Return how many tokens before the last n equal those before a place that `earlier` returned, about CONTEXT at most."""
        tail = int.from_bytes(self.tokens[-CONTEXT:].tobytes(), "little")
        return min(self.agreeing(place, tail), self._since) - self.ns[0]

    @property
    def nbytes(self) -> int:
        """Return about how many bytes the text and its index take."""
        return 8 * len(self.tokens) + 136 * len(self.heads[0])  # of a dict's place, and two numbers


class RunningText(IndexedText):
    """The growing text of a running row, from one place on, as the owner's other rows look it up. It is indexed when one of these looks it
    up, so a row by itself costs nothing."""

    def __init__(self, text: Sequence[int], begin: int) -> None:
        """Index `text` from token `begin` on. text: the row's own list, which grows; negative tokens are borders."""
        self._by_n = [GrowingText(n) for n in ANCHORS]
        self.ns, self.tokens = ANCHORS, self._by_n[0].tokens
        self.heads, self.links = [t.heads[0] for t in self._by_n], [t.links[0] for t in self._by_n]
        self.end = CONTEXT
        self._text, self._next = text, begin

    def catch_up(self) -> None:
        """Index the row's newest tokens, PIECE tokens at most."""
        new = self._text[self._next : self._next + PIECE]
        self._next += len(new)
        for text in self._by_n:
            text.extend(new)
        self.end = self._by_n[0].end

    def following(self, place: int, limit: int) -> list[int]:
        """Return at most `limit` tokens of the row from `place` on. At the text's end nothing is repeated, because the row goes on."""
        return super().following(place, min(limit, self.end - place))

    @property
    def nbytes(self) -> int:
        """Return about how many bytes the index takes."""
        return sum(text.nbytes for text in self._by_n)


class _Slots:
    """A hash table in one array that holds the latest place of a hash: hashes with equal first bits share one entry."""

    def __init__(self, room: int) -> None:
        num_bits = max(1, room.bit_length() - 1)
        self.down, self.array = 64 - num_bits, np.zeros(1 << num_bits, np.int32)
        self._view = memoryview(self.array)

    def get(self, key: int, _: int) -> int:
        return self._view[key >> self.down]


class TextSegment(IndexedText):
    """The finished texts of one owner in one array of at most `room` tokens, each followed by a border, with an index of their n-grams."""

    def __init__(self, room: int, ns: Sequence[int] = ANCHORS) -> None:
        self.ns = ns
        self.tokens = np.full(CONTEXT + room, _BORDER, np.int32)
        self.heads = [_Slots(room) for _ in ns]
        self._before = [np.zeros(CONTEXT + room, np.int32) for _ in ns]
        self.links = [memoryview(x) for x in self._before]
        self.end = self._first = self._next = (
            CONTEXT  # the latest text's first token, and where its next one goes
        )
        self._known: set[int] = set()  # hashes of beginnings
        self.nbytes = sum(x.nbytes for x in (self.tokens, *self._before, *(h.array for h in self.heads)))

    @classmethod
    def of(cls, text: Sequence[int], n: int) -> TextSegment:
        """Return a segment with one text, indexed by its n-grams of length `n`."""
        made = cls(len(text) + 1, (n,))
        made.extend(_whole(text))
        return made

    @property
    def room(self) -> int:
        return len(self.tokens) - self.end

    def num_known(self, beginnings: Sequence[int]) -> int:
        """Return how many of a text's beginnings are beginnings of texts stored here. beginnings: their hashes, the shortest first."""
        return next((i for i, one in enumerate(beginnings) if one not in self._known), len(beginnings))

    def begin(self, beginnings: Iterable[int]) -> None:
        """Start a new text, whose tokens `extend` adds. beginnings: hashes of the text's beginnings."""
        self._first = self._next = self.end
        self._known.update(beginnings)

    def extend(self, piece: Any) -> None:
        """Add the next tokens of the text (n,) int32, fewer than `room`. N-grams that begin in earlier pieces are indexed with them."""
        num_before = min(max(self.ns), self._next - self._first)
        first = self._next - num_before
        self._next += len(piece)
        self.tokens[first + num_before : self._next] = piece
        self.end = self._next + 1  # the border
        text = self.tokens[first : self._next]
        borders = np.append(0, np.cumsum(text < 0))
        sums, inverse = np.append(np.uint64(0), prefix_sums(text)), _powers(_INVERSE, len(text))
        for n, heads, before in zip(self.ns, self.heads, self._before, strict=True):
            ends = np.arange(max(n, num_before), len(text))  # each has a token behind it
            ends = ends[borders[ends] == borders[ends - n]]
            if not len(ends):
                continue
            slots = ((sums[ends] - sums[ends - n]) * inverse[ends] >> np.uint64(heads.down)).astype(np.int64)
            order = np.argsort(slots, kind="stable")
            places, slots = ends[order] + first, slots[order]
            is_first = np.append(True, slots[1:] != slots[:-1])
            before[places] = np.where(is_first, heads.array[slots], np.append(0, places[:-1]))
            is_last = np.append(is_first[1:], True)
            heads.array[slots[is_last]] = places[is_last]

    @property
    def latest(self) -> Any:
        """Return the tokens of the latest text, (n,) int32."""
        return self.tokens[self._first : self._next].copy()


class Continuation(NamedTuple):
    """Tokens that may follow a text. confidences: the estimated probability of each token. length: number of tokens before them that agree
    with the text's end, CONTEXT at most."""

    tokens: list[int]
    confidences: list[float]
    length: int


class TextIndex:
    """An index of earlier texts, in segments by owner. budget: bytes of all owners' segments together; room: about the same in tokens.
    keep: is called with the owner and the tokens (n,) int32 of each text that is stored.

    Texts may have a million tokens and the engine's thread serves all rows, so a text is indexed in pieces: `add` and `segment_of` only
    queue it, and `work` does a piece.
    """

    def __init__(self, budget: int) -> None:
        self.budget, self.room = budget, budget // TOKEN_INDEXED
        self._largest = self.room // 4
        self.keep: Callable[[str, Any], None] = lambda owner, piece: None
        self._owners: dict[str, list[TextSegment]] = {}  # oldest segment first, by owner, the latest last
        self._running: dict[str, list[RunningText]] = {}  # by owner
        self._queue: deque[Iterator[int]] = deque()  # each step indexes a piece and gives its tokens

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for segments in self._owners.values() for s in segments)

    def num_segments(self, owner: str) -> int:
        return len(self._owners.get(owner, ()))

    @property
    def num_running(self) -> int:
        """Return the number of answers that have begun and not ended."""
        return sum(map(len, self._running.values()))

    @property
    def has_work(self) -> bool:
        """Return whether any queued text is not yet indexed to its end."""
        return bool(self._queue)

    def work(self) -> int:
        """Index the next PIECE tokens of the queued texts, or up to twice as many, and return how many were indexed."""
        num_done = 0
        while self._queue and num_done < PIECE:
            try:
                num = next(self._queue[0], None)
            except Exception as error:  # of one text; the rows that run have nothing to do with it
                _log.warning("A text could not be indexed: %s", error)
                num = None
            if num is None:
                self._queue.popleft()
            else:
                num_done += num
        return num_done

    def join(self, owner: str, text: Sequence[int], begin: int) -> RunningText:
        """Let the owner's other rows draft from a growing text after token `begin`, until `leave` ends this. Returns the text as they look
        it up."""
        made = RunningText(text, begin)
        self._running.setdefault(owner, []).append(made)
        return made

    def leave(self, owner: str, running: RunningText) -> None:
        """Remove a running text that has ended."""
        self._running[owner] = left = [text for text in self._running[owner] if text is not running]
        if not left:
            del self._running[owner]

    def add(self, owner: str, text: Sequence[int]) -> None:
        """Store a finished text, which no caller may change afterwards. A beginning that is already stored is not stored again."""
        if len(text) and self._largest >= 2 * CONTEXT:
            self._queue.append(self._adding(owner, text))

    def segment_of(self, text: Sequence[int], n: int) -> TextSegment:
        """Return a segment of one text, indexed by n-grams of length `n`. Calls of `work` fill it as long as a caller holds a reference."""
        made = TextSegment(len(text) + 1, (n,))
        self._queue.append(_filling(ref(made), text))
        return made

    def _adding(self, owner: str, text: Sequence[int]) -> Iterator[int]:
        beginnings: list[int] = []
        so_far, power = np.zeros(1, np.uint64), np.ones(1, np.uint64)
        for piece in _pieces(text):
            sums = so_far + power * prefix_sums(piece)
            so_far, power = sums[-1:], power * _powers(_FACTOR, len(piece))[-1:]
            beginnings += map(int, sums[_KNOWN_EVERY - 1 :: _KNOWN_EVERY])
            yield len(piece)
        if len(text) % _KNOWN_EVERY:
            beginnings += map(int, so_far)
        segments = self._owners[owner] = self._owners.pop(owner, [])
        num_known = segments[-1].num_known(beginnings) if segments else 0
        if num_known == len(beginnings):
            return
        begin = max(0, num_known * _KNOWN_EVERY - CONTEXT, len(text) - self._largest // 2)
        num = len(text) - begin
        if not segments or segments[-1].room <= num:
            held = sum(s.nbytes for s in segments) // TOKEN_INDEXED
            segments.append(TextSegment(min(self._largest, max(SMALLEST, held, 2 * num))))
            self._shrink(owner)
        segments[-1].begin(beginnings)
        for piece in _pieces(text, begin):
            segments[-1].extend(piece)
            yield len(piece)
        self.keep(owner, segments[-1].latest)

    def _shrink(self, latest: str) -> None:
        """Drop segments until all of them fit the budget. The oldest segment of the owner whose latest text is oldest goes first. The
        newest segment of the owner `latest` is never dropped."""
        while self.nbytes > self.budget:
            oldest = next(o for o, s in self._owners.items() if o != latest or len(s) > 1)
            del self._owners[oldest][0]
            if not self._owners[oldest]:
                del self._owners[oldest]

    def find(
        self, owner: str, text: Sequence[int], limit: int, own: RunningText | None = None
    ) -> Continuation | None:
        """Return up to `limit` tokens that followed the longest suffix of `text` in one of the owner's texts, `own` left out; None where
        the last tokens have not occurred there. Only the latest PLACES places of the longer n that has any are compared."""
        running = [t for t in self._running.get(owner, ()) if t is not own]
        for one in running:
            one.catch_up()
        texts: list[IndexedText] = [*running, *reversed(self._owners.get(owner, ()))]
        if not texts or min(text[-min(ANCHORS) :], default=_BORDER) < 0:
            return None
        tail = tail_of(text)
        for which, n in enumerate(ANCHORS):
            if len(text) < n:
                continue
            key = hash_of(text[-n:])
            places: list[tuple[int, IndexedText, int]] = []
            for segment, place in ((s, at) for s in texts for at in islice(s.places(which, key), STEPS)):
                agreeing = segment.agreeing(place, tail)
                if agreeing >= n:
                    places.append((agreeing, segment, place))
                    if len(places) == PLACES:
                        break
            if places:
                length = max(p[0] for p in places)
                said = [s.following(place, limit) for agreeing, s, place in places if agreeing == length]
                return Continuation(*vote(said, floor=_FLOOR, more=length / _EVIDENCE), length)
        return None


def vote(
    said: Sequence[Sequence[int]], *, floor: float = 0.0, least: float = 0.0, more: float = 0.0
) -> tuple[list[int], list[float]]:
    """Return the most frequent token at each depth among the continuations `said` (the latest first), and their probabilities. Among
    equally frequent tokens the one of the latest continuation wins. A continuation that lost a vote has no vote afterwards. The draft
    ends where a winner has a smaller share of the votes than `least`, or where the whole draft is less probable than `floor`. A
    probability is the Krichevsky-Trofimov estimate, to which `more` votes are added while all agree."""
    tokens: list[int] = []
    shares: list[float] = []
    whole = 1.0
    for depth in range(max(map(len, said), default=0)):
        if depth >= min(map(len, said)):
            said = [s for s in said if len(s) > depth]
            if not said:
                break
        column = [s[depth] for s in said]
        winner, num = column[0], len(column)
        votes = column.count(winner)
        if votes < num:
            winner, votes = Counter(column).most_common(1)[0]
            more, said = 0.0, [s for s in said if s[depth] == winner]
        share = (votes + more + 0.5) / (num + more + 1)
        whole *= share
        if votes < least * num or whole < floor:
            break
        tokens.append(winner)
        shares.append(share)
    return tokens, shares


def tail_of(text: Sequence[int]) -> int:
    """Encode the last CONTEXT tokens of a text as one number, for `agreeing`. Borders agree with nothing."""
    last = [token if token >= 0 else _NOWHERE for token in text[-CONTEXT:]]
    return int.from_bytes(array("i", [_NOWHERE] * (CONTEXT - len(last)) + last).tobytes(), "little")


def hash_of(ngram: Iterable[int]) -> int:
    """Return the hash by which an n-gram's places are found."""
    key = 0
    for token in ngram:
        key = (key + token + 1) * _INVERSE & _MASK
    return key


def prefix_sums(text: Any) -> Any:
    """Return the hashes (n,) uint64 of the beginnings of a text (n,) int32. Two of them give the hash of the tokens in between."""
    return np.cumsum(
        (text.astype(np.int64).astype(np.uint64) + np.uint64(1)) * _powers(_FACTOR, len(text))[:-1]
    )


def _whole(text: Sequence[int]) -> Any:
    """Return the tokens of a text as (n,) int32, with borders in place of ids that are no tokens, such as those of images."""
    return np.maximum(np.asarray(text, np.int64), _BORDER).astype(np.int32)


def _pieces(text: Sequence[int], begin: int = 0) -> Iterator[Any]:
    """Yield the tokens from `begin` on in arrays (n,) int32 of at most PIECE tokens."""
    for at in range(begin, len(text), PIECE):
        yield _whole(text[at : at + PIECE])


def _filling(segment: ref[TextSegment], text: Sequence[int]) -> Iterator[int]:
    for piece in _pieces(text):
        if (found := segment()) is None:
            return
        found.extend(piece)
        yield len(piece)


def _powers(factor: int, most: int) -> Any:
    """Return `factor` to the powers 0 to `most`, modulo 2^64, as (most + 1,) uint64."""
    return np.cumprod(np.append(np.uint64(1), np.full(most, factor, np.uint64)))
