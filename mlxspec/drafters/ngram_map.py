"""N-gram drafting whose draft length for an n-gram follows what was accepted before: ngram-map-k. ngram-map-k4v also chooses among
continuations by their counts.

After llama.cpp's `common/ngram-map` (map-k, map-k4v). A key is an n-gram of the row's own history. Knows no
probabilities but counts.

Kept: drafts need `min_hits` earlier occurrences of the key; a key whose draft failed drafts less next time; k4v
drafts only what is at least twice as frequent as all else that followed its key. Different, and why:
- `min_hits` holds for both (in llama.cpp map-k returns before it is looked at).
- A failed key is cut to what was accepted but never below one token, and doubles with every draft that stands whole
  (there a draft of which nothing stood silences its key for good). For k4v this is kept for each key and first token,
  so one bad value spares the others.
- k4v drafts the continuation that won (there the latest one), counts each occurrence once (there the last one twice),
  and counts every continuation, not the first four, against the winner. It votes token by token among the last 16
  occurrences, so a draft goes on as far as they agree, and shares of votes serve as confidences; whole values of m
  tokens are never compared.
- Every token is indexed at once (there nothing within the last n + m + 1 tokens can be found), and the index holds
  the latest occurrence, not the first. A continuation that runs into the end of the text goes round, so short loops
  are drafted at full length.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from mlxspec.drafters.base import NO_DRAFT, Draft
from mlxspec.drafters.ngram_rows import Follower, NgramDrafter, NgramRow

MAX_VOTES = 16  # so many occurrences vote: bounds the cost of a key that is everywhere
Ngram = tuple[int, ...]


class KeyIndex:
    """A history, and for every n-gram in it the chain of its occurrences.

    An occurrence is named by its end: the index of the token behind it, so the n-gram the history ends with is not yet one.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.history: list[int] = []
        self._latest: dict[Ngram, int] = {}
        self._earlier: list[int] = []  # by end - n: the same n-gram's end before, or -1
        self._hits: list[int] = []  # by end - n: how many occurrences up to this one

    def append(self, token: int) -> None:
        end = len(self.history)
        if end >= self.n:
            key = tuple(self.history[end - self.n :])
            before = self._latest.get(key, -1)
            self._latest[key] = end
            self._earlier.append(before)
            self._hits.append(1 if before < 0 else self._hits[before - self.n] + 1)
        self.history.append(token)

    def tail(self) -> Ngram:
        """The n-gram the history ends with; shorter when the history is."""
        return tuple(self.history[-self.n :])

    def latest(self, key: Ngram, min_hits: int) -> int | None:
        """End of the latest occurrence, None if there are fewer than `min_hits`."""
        end = self._latest.get(key)
        return None if end is None or self._hits[end - self.n] < min_hits else end

    def occurrences(self, end: int, at_most: int) -> list[int]:
        """Ends of an occurrence and of those before it, latest first."""
        ends: list[int] = []
        while end >= 0 and len(ends) < at_most:
            ends.append(end)
            end = self._earlier[end - self.n]
        return ends

    @property
    def nbytes(self) -> int:
        lists = sum(map(sys.getsizeof, (self.history, self._earlier, self._hits)))
        return lists + sys.getsizeof(self._latest) + sys.getsizeof(self.tail()) * len(self._latest)


class Trust:
    """How many tokens may be drafted for a key: m until a draft failed, then what its drafts showed."""

    def __init__(self, m: int) -> None:
        self.m = m
        self._lengths: dict[Ngram, int] = {}

    def length(self, key: Ngram) -> int:
        return self._lengths.get(key, self.m)

    def learn(self, key: Ngram, accepted: int, proposed: int) -> None:
        """Of a draft for this key the first `accepted` tokens were what came."""
        if accepted < proposed:
            after = max(1, accepted)
        else:
            after = min(self.m, max(self.length(key), 2 * proposed))
        if after != self.length(key):
            self._lengths[key] = after

    @property
    def nbytes(self) -> int:
        return sys.getsizeof(self._lengths)


class _MapRow(NgramRow):
    """A row of either kind; they differ in how a draft is found."""

    def __init__(self, n: int, m: int, min_hits: int) -> None:
        self.index, self.trust = KeyIndex(n), Trust(m)
        self.min_hits = min_hits
        self._follower: Follower[Ngram] = Follower()

    def extend(self, tokens: Sequence[int]) -> None:
        index, follower = self.index, self._follower
        for token in tokens:
            if follower.is_open:
                verdict = follower.hear(token)
                if verdict is not None:
                    self.trust.learn(*verdict)
            index.append(token)

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + self.trust.nbytes


class MapKRow(_MapRow):
    """Drafts what followed the key's latest occurrence."""

    def draft(self, limit: int) -> Draft:
        key = self.index.tail()
        start = self.index.latest(key, self.min_hits)
        if start is None:
            return NO_DRAFT
        tokens = continuation(self.index.history, start, min(limit, self.trust.length(key)))
        self._follower.follow(tokens, key)
        return Draft(len(tokens), tokens)


class MapK4vRow(_MapRow):
    """Drafts what most occurrences of the key agree on."""

    def draft(self, limit: int) -> Draft:
        key = self.index.tail()
        start = self.index.latest(key, self.min_hits)
        if start is None:
            return NO_DRAFT
        starts = self.index.occurrences(start, MAX_VOTES)
        tokens, shares = vote(self.index.history, starts, min(limit, self.trust.m))
        if not tokens:
            return NO_DRAFT
        value = (*key, tokens[0])
        length = min(len(tokens), self.trust.length(value))
        self._follower.follow(tokens[:length], value)
        return Draft(length, tokens[:length], shares[:length])


def continuation(history: Sequence[int], start: int, length: int) -> list[int]:
    """`length` tokens from `start` on; what runs into the end of the history goes round."""
    tokens = list(history[start : start + length])
    period = len(history) - start
    while len(tokens) < length:
        tokens.append(tokens[len(tokens) - period])
    return tokens


def vote(history: Sequence[int], starts: Sequence[int], limit: int) -> tuple[list[int], list[float]]:
    """Tokens that a two-thirds majority of the continuations at `starts` has, and the winner's estimated probability at each depth.

    A continuation that lost a vote has none afterwards. Ties go to the earlier of `starts`. The probability is the Krichevsky-Trofimov
    estimate (votes + 1/2) / (voters + 1), so that a single vote is not certainty.
    """
    size = len(history)
    tokens: list[int] = []
    shares: list[float] = []
    voters = list(starts)
    for depth in range(limit):
        said = [history[s + depth] if s + depth < size else tokens[s + depth - size] for s in voters]
        winner, votes = said[0], said.count(said[0])
        if votes < len(said):
            winner, votes = Counter(said).most_common(1)[0]
            if votes < 2 * (len(said) - votes):
                break
            voters = [s for s, token in zip(voters, said, strict=True) if token == winner]
        tokens.append(winner)
        shares.append((votes + 0.5) / (len(said) + 1))
    return tokens, shares


class NgramMapK(NgramDrafter):
    """ngram-map-k. n: tokens that must repeat; m: tokens drafted at most; min_hits: earlier occurrences needed, >= 1."""

    name = "ngram-map-k"

    def __init__(self, n: int, m: int, min_hits: int = 1) -> None:
        super().__init__(lambda: MapKRow(n, m, min_hits))


class NgramMapK4v(NgramDrafter):
    """ngram-map-k4v. Options as for ngram-map-k. Its drafts carry confidences."""

    name = "ngram-map-k4v"

    def __init__(self, n: int, m: int, min_hits: int = 1) -> None:
        super().__init__(lambda: MapK4vRow(n, m, min_hits))
