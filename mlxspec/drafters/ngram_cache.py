"""N-gram drafting by counts at three levels: the row's own text, then what the user learned from earlier texts, then a
fixed corpus.

After llama.cpp's `common/ngram-cache` (#5479, #6828, #6848), thresholds included. Token by token: the context level
(n-grams of 4 to 1 tokens of this row), longest first, takes the token with the largest count x static count if it has
had enough samples and a large enough share; else the dynamic level does so with stricter thresholds; else pairs of
the static level stand alone; else the draft ends. Knows counts, so its drafts carry confidences: (count + 1/2) /
(total + 1). Different from llama.cpp, and why:
- The context belongs to a row, learns every token as it comes, across all borders, and goes with the row (there it
  outlives its request, and learns nothing from rounds of one token).
- No level grows by itself: dynamic and static are tables the user loads, which drafting only reads; so nothing passes
  from one request to another unless the user puts it there. To learn from a text:
  `table.merge(NgramTable.of([tokens]))`, then `table.save(path, vocab_size)`.
- Of equal candidates the smallest id is taken, so that equal counts give equal drafts. Drafts may be longer than 8
  tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mlxspec.drafters.base import NO_DRAFT, Draft
from mlxspec.drafters.ngram_rows import NgramDrafter, NgramRow
from mlxspec.drafters.ngram_table import MAX_SIZE, Ngram, NgramTable
from mlxspec.errors import ConfigError

STATIC_SIZE = 2  # the static level is looked up by pairs
Choice = tuple[int, float]  # a token and its estimated probability


class Threshold(NamedTuple):
    """What a candidate needs: samples of its n-gram, and its percentage of them (at least 50)."""

    samples: int
    percent: int


# By size of the n-gram, 1 to 4.
LAX = (Threshold(2, 66), Threshold(2, 50), Threshold(1, 50), Threshold(1, 50))
STRICT = (Threshold(4, 75), Threshold(3, 66), Threshold(2, 66), Threshold(2, 66))


class CacheRow(NgramRow):
    """One row: its context level, and the two tables it reads."""

    def __init__(self, m: int, dynamic: NgramTable | None, static: NgramTable | None) -> None:
        self.m = m
        self.history: list[int] = []
        self.context = NgramTable()
        self._dynamic, self._static = dynamic, static

    def extend(self, tokens: Sequence[int]) -> None:
        history, add = self.history, self.context.add
        for token in tokens:
            for ngram in _ends(history):
                add(ngram, token)
            history.append(token)

    def draft(self, limit: int) -> Draft:
        tail = tuple(self.history[-MAX_SIZE:])
        tokens: list[int] = []
        probabilities: list[float] = []
        for _ in range(min(limit, self.m)):
            choice = self._next(_ends(tail))
            if choice is None:
                break
            tokens.append(choice[0])
            probabilities.append(choice[1])
            tail = (*tail[1 - MAX_SIZE :], choice[0])
        return Draft(len(tokens), tokens, probabilities) if tokens else NO_DRAFT

    @property
    def nbytes(self) -> int:
        return self.context.nbytes + 8 * len(self.history)

    def _next(self, ngrams: Sequence[Ngram]) -> Choice | None:
        """What follows, given the n-grams that end here, longest first."""
        static = self._static if len(ngrams) >= STATIC_SIZE else None
        known = static.counts(ngrams[-STATIC_SIZE]) if static is not None else {}
        choice = pick(self.context, ngrams, LAX, known)
        if choice is None and self._dynamic is not None:
            choice = pick(self._dynamic, ngrams, STRICT, known)
        if choice is None and static is not None:
            choice = pick(static, [ngrams[-STATIC_SIZE]], LAX, {})
        return choice


def pick(
    table: NgramTable, ngrams: Sequence[Ngram], thresholds: Sequence[Threshold], known: Mapping[int, int]
) -> Choice | None:
    """The candidate of the longest n-gram whose candidate passes its threshold.

    ngrams: longest first, all ending at the same place. known: static counts of what follows here, possibly none.
    The candidate has the largest count x weight; the weight is 100 x its static count, or 1 if it has none. As
    thresholds look at the candidate's own count, an n-gram whose most frequent token fails has none that passes.
    """
    for ngram in ngrams:
        top = table.top(ngram)
        if top is None:
            continue
        token, times, total = top
        samples, percent = thresholds[len(ngram) - 1]
        if total < samples or 100 * times < percent * total:
            continue
        if known and times < total:
            token, times = _weighted(token, table.counts(ngram), known)
            if 100 * times < percent * total:
                continue
        return token, (times + 0.5) / (total + 1)
    return None


def _weighted(top: int, own: Mapping[int, int], known: Mapping[int, int]) -> tuple[int, int]:
    """Token and count of the largest count x static weight. Costs the smaller of the two distributions.

    top: the most frequent of `own`; of those without static count only it can win.
    """
    best, weight = top, own[top] * 100 * known[top] if top in known else own[top]
    fewer, more = (own, known) if len(own) <= len(known) else (known, own)
    for token in fewer:
        if token in more:
            other = own[token] * 100 * known[token]
            if other > weight or (other == weight and token < best):
                best, weight = token, other
    return best, own[best]


def _ends(tokens: Sequence[int]) -> list[Ngram]:
    """The n-grams `tokens` ends with, longest first."""
    tail = tuple(tokens[-MAX_SIZE:])
    return [tail[i:] for i in range(len(tail))]


class NgramCache(NgramDrafter):
    """ngram-cache. m: tokens drafted at most; dynamic, static: tables the user loaded, or None. They are read, never written.

    Raises ConfigError for a static table without pairs.
    """

    name = "ngram-cache"

    def __init__(self, m: int, dynamic: NgramTable | None = None, static: NgramTable | None = None) -> None:
        if static is not None and STATIC_SIZE not in static.sizes:
            raise ConfigError("The static n-gram file holds no pairs of tokens, by which it is looked up.")
        super().__init__(lambda: CacheRow(m, dynamic, static))
