"""N-gram drafting by lookup: finds the latest place where the last n tokens occurred before, and proposes the tokens that followed there.

After llama.cpp's ngram-simple and prompt lookup (Saxena 2023), with two differences. Matches are found through an
index of every n-gram's latest end (llama.cpp scans the history each round), so a token costs O(1); and a match near
the end may be continued into itself, so a repeating pattern is drafted at full length (llama.cpp drops continuations
shorter than n). Needs no model and knows no probabilities.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import mlx.core as mx

from mlxspec.drafters.base import NO_DRAFT, Ask, Draft, Drafter
from mlxspec.drafters.ngram_images import TextOnly
from mlxspec.models.image_rows import SeenImages
from mlxspec.sampling.sampler import BatchSampler

_BACKING_AT_MOST = 40  # tokens: a place that would have said so many right is sure enough


class NgramIndex:
    """One row's history with, for every n-gram, where it last ended.

    `find` looks for an occurrence that ends before the history does, so the index holds n-grams ending at least one token back.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.history: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> index just behind its latest occurrence

    def extend(self, tokens: Sequence[int]) -> None:
        n, history = self.n, self.history
        for token in tokens:
            end = len(history)
            if end >= n:  # the n-gram ending here now has a token behind it
                self._ends[tuple(history[end - n : end])] = end
            history.append(token)

    @property
    def nbytes(self) -> int:
        """About how many bytes this holds."""
        key = sys.getsizeof(tuple(self.history[-self.n :]))
        return sys.getsizeof(self.history) + sys.getsizeof(self._ends) + key * len(self._ends)

    @property
    def has_match(self) -> bool:
        """Whether the last n tokens have stood here before."""
        return tuple(self.history[-self.n :]) in self._ends

    @property
    def backing(self) -> int:
        """How many tokens before the last n have also stood before them at their latest earlier occurrence, which there must be."""
        history, n = self.history, self.n
        start = self._ends[tuple(history[-n:])]
        most, count = min(start - n, _BACKING_AT_MOST), 0
        while count < most and history[start - n - 1 - count] == history[-n - 1 - count]:
            count += 1
        return count

    def find(self, limit: int) -> list[int]:
        """Up to `limit` tokens that followed the latest earlier occurrence of the last n tokens."""
        history = self.history
        start = self._ends.get(tuple(history[-self.n :]))
        if start is None:
            return []
        draft = history[start : start + limit]
        period = len(history) - start
        while len(draft) < limit:  # the match runs into the end of the text: go round
            draft.append(draft[len(draft) - period])
        return draft


class NgramSimple(Drafter):
    """Drafts up to m tokens when the last n have occurred before."""

    name = "ngram-simple"

    def __init__(self, n: int, m: int) -> None:
        self.n, self.m = n, m
        self._rows: dict[int, NgramIndex] = {}
        self._text = TextOnly()

    def begin(self, row: int) -> None:
        self._rows[row] = NgramIndex(self.n)

    def see(self, row: int, seen: SeenImages) -> None:
        self._text.see(row)

    def observe(self, row: int, tokens: Sequence[int], hidden: mx.array | None) -> None:
        self._rows[row].extend(self._text.tokens(row, tokens))

    def propose(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        drafts = []
        for ask in asks:
            index = self._rows[ask.row]
            tokens = index.find(min(ask.limit, self.m))
            draft = Draft(len(tokens), tokens, backing=index.backing) if tokens else NO_DRAFT
            drafts.append(self._text.draft(ask.row, draft))
        return drafts

    def may_draft(self, row: int) -> bool:
        return self._rows[row].has_match

    def close(self, row: int) -> None:
        self._rows.pop(row, None)
        self._text.close(row)

    @property
    def nbytes(self) -> int:
        return sum(index.nbytes for index in self._rows.values())
