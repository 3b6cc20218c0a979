"""Drafting from texts, without a model: the row's own text, earlier texts of its owner, and a text that its request brought along.

One drafter for all of them, with one kind of row for each place to look:

  ngram-simple     what followed the last n tokens where they last stood in the row's own text
  ngram-map-k      the same where they stood min_hits times or more; a draft that failed shortens the next one behind the same n tokens
  ngram-map-k4v    what the latest of these places agree on by two thirds; the lengths are kept for each first token as well
  suffix           what followed the longest suffix of the text in earlier texts, in answers that the owner's other rows are giving
                   (text_index.py), or where the answer copies its prompt
  predicted        how a text goes on that the request brought along (OpenAI's predicted outputs; alignment.py)

The first three are llama.cpp's, with these differences: the latest places count, not the first ones, and every token is found at once; a
place near the end of the text goes round, so that a repeating pattern is drafted at full length; min_hits holds for both maps; a length
falls to one token at least and doubles with every draft that stands whole; all places vote token by token, not four whole values.
Nothing is shared between rows but texts of one owner: earlier ones, and answers that its other rows have begun. A whole text is learned
when its row closes.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import mlx.core as mx

from mlxspec.drafters.alignment import Alignment, SegmentOf
from mlxspec.drafters.base import NO_DRAFT, Ask, Draft, Drafter
from mlxspec.drafters.text_index import (
    CONTEXT,
    GrowingText,
    RunningText,
    TextIndex,
    TextSegment,
    hash_of,
    vote,
)
from mlxspec.errors import ConfigError
from mlxspec.sampling.sampler import BatchSampler

MAX_VOTES = 16  # so many places vote: bounds the cost of an n-gram that is everywhere
COPIED = 16  # tokens in a row: the answer copies its prompt
BEFORE, BEHIND = 2048, 6144  # tokens of the prompt around such a place that are followed
_BLOCK = COPIED // 2  # tokens by which copies are noticed
_MOST_COPIES = 16  # places in the prompt that are compared
_FIRST = 4  # tokens that a prediction is taken to agree in before anything of the answer is known
_MOST_BACKING = 40  # tokens: a place that would have said so many right is sure enough


class LookupRow(ABC):
    """The text of one row and an index of it, or of other texts, from which its drafts are taken."""

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> None:
        """Add the next tokens of the text; image tokens are negative."""

    @abstractmethod
    def draft(self, limit: int) -> Draft:
        """Return a draft of at most `limit` tokens that continue the row's text, on the host and possibly empty."""

    def may_draft(self) -> bool:
        """Return whether `draft` would return any token."""
        return self.draft(1) is not NO_DRAFT

    def close(self) -> None:  # noqa: B027
        """Note that the text has ended."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Return about how many bytes the row's index holds."""


class Lookup(Drafter):
    """A drafter without a model whose rows are independent. make: makes the LookupRow of a new row; None: `open` supplies it. most: the
    most tokens of a draft, None for the number in a request's SpecConfig."""

    def __init__(
        self, name: str, make: Callable[[], LookupRow] | None = None, most: int | None = None
    ) -> None:
        self.name, self.max_draft = name, most
        self._make = make
        self._rows: dict[int, LookupRow] = {}

    def begin(self, row: int) -> None:
        if self._make is not None:
            self.open(row, self._make())

    def open(self, row: int, state: LookupRow) -> None:
        """Begin a row whose drafts are taken from `state`."""
        self._rows[row] = state

    def hear(self, row: int, tokens: Sequence[int], hidden: mx.array | None) -> None:
        self._rows[row].extend(tokens)

    def draft(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        return [self._rows[ask.row].draft(ask.limit) for ask in asks]

    def may_draft(self, row: int) -> bool:
        return self._rows[row].may_draft()

    def forget(self, row: int) -> None:
        state = self._rows.pop(row, None)
        if state is not None:
            state.close()

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self._rows.values())


class _NgramKind(NamedTuple):
    """A variant of n-gram lookup. votes: number of earlier places that are compared. learns: whether the length of drafts follows what was
    accepted."""

    votes: int
    learns: bool


_KINDS = {
    "ngram-simple": _NgramKind(1, learns=False),
    "ngram-map-k": _NgramKind(1, learns=True),
    "ngram-map-k4v": _NgramKind(MAX_VOTES, learns=True),
}


def ngram_lookup(name: str, n: int, m: int, min_hits: int = 1) -> Lookup:
    """Return the n-gram drafter of this name. n: number of last tokens that must have occurred before; m: most tokens of a draft; min_hits:
    earlier occurrences that the `map` variants require. Raises ConfigError for an unknown name."""
    if name not in _KINDS:
        raise ConfigError(f"The drafter {name} cannot be made.")
    return Lookup(name, lambda: NgramRow(name, n, m, min_hits))


class NgramRow(LookupRow):
    """A row whose drafts are what followed the last n tokens at an earlier place of its own text.

    A variant that learns follows one proposal until a token of the text differs from it or all its tokens have appeared, whichever drafter
    drafted that text; proposals made meanwhile are not followed. If each proposal replaced the one before, failures (known at once) would
    be counted and successes (known late) would not.
    """

    def __init__(self, name: str, n: int, m: int, min_hits: int = 1) -> None:
        self._kind, self._m = _KINDS[name], m
        self._min_hits = min_hits if self._kind.learns else 1
        self._text = GrowingText(n)
        self._lengths: dict[tuple[int, ...], int] = {}  # by n-gram, and first token: shorter than m
        self._followed: list[int] = []  # a proposal, of which `_heard` tokens have come; none: it is decided
        self._heard = 0
        self._key: tuple[int, ...] = ()

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens if self._followed else ():
            self._judge(token)
        self._text.extend(tokens)

    def draft(self, limit: int) -> Draft:
        text, kind, limit = self._text, self._kind, min(limit, self._m)
        places = text.earlier(max(kind.votes, self._min_hits))
        if len(places) < self._min_hits or not limit:
            return NO_DRAFT
        said = [text.following(place, limit) for place in places[: kind.votes]]
        tokens, shares = (said[0], None) if kind.votes == 1 else vote(said, least=2 / 3)
        if not tokens:
            return NO_DRAFT
        if kind.learns:
            key: tuple[int, ...] = (text.key,) if kind.votes == 1 else (text.key, tokens[0])
            tokens = tokens[: self._lengths.get(key, self._m)]
            if not self._followed:
                self._followed, self._heard, self._key = tokens, 0, key
        if shares is not None:
            return Draft(len(tokens), tokens, shares[: len(tokens)])
        return Draft(len(tokens), tokens, backing=min(text.backing(places[0]), _MOST_BACKING))

    def may_draft(self) -> bool:
        return bool(self._text.earlier(1))

    def _judge(self, token: int) -> None:
        """Compare the text's next token with the proposal that is being followed, if there is one."""
        num = len(self._followed)
        if not num:
            return
        is_right = token == self._followed[self._heard]
        self._heard += is_right
        if is_right and self._heard < num:
            return
        known = self._lengths.get(self._key, self._m)
        after = max(1, self._heard) if self._heard < num else min(self._m, max(known, 2 * num))
        if after != known:
            self._lengths[self._key] = after
        self._followed = []

    @property
    def nbytes(self) -> int:
        return self._text.nbytes + 200 * len(self._lengths)


class PredictedRow(LookupRow):
    """A row whose drafts follow its answer in a text that the request supplied (OpenAI's `prediction`). predicted: token ids of that text;
    num_prompt: tokens of the row's history before the answer; segment_of: builds the index of the ids. A draft after a place that has
    just been found is short, because few tokens support the place."""

    def __init__(
        self, predicted: Sequence[int], num_prompt: int, segment_of: SegmentOf = TextSegment.of
    ) -> None:
        self._alignment = Alignment(predicted, segment_of)
        self._unread, self._is_begun = num_prompt, False

    def extend(self, tokens: Sequence[int]) -> None:
        answer = tokens[self._unread :]
        self._unread = max(0, self._unread - len(tokens))
        if answer:
            self._is_begun = True
            self._alignment.push(answer)

    def draft(self, limit: int) -> Draft:
        return _aligned(self._alignment, limit, None if self._is_begun else _FIRST)

    def may_draft(self) -> bool:
        return self._alignment.place is not None

    @property
    def nbytes(self) -> int:
        return self._alignment.nbytes


class EarlierRow(LookupRow):
    """A row whose drafts follow the longest suffix of its text in its owner's earlier texts and running answers. Once the answer has copied
    COPIED tokens of its prompt, the prompt is followed too; of the two, the one that agrees with more of the text's last tokens drafts.
    num_prompt: tokens of the row before its answer."""

    def __init__(self, index: TextIndex, owner: str, num_prompt: int) -> None:
        self._index, self._num_prompt = index, num_prompt
        self._owner = hashlib.sha256(owner.encode()).hexdigest()[:32]
        self._tokens: list[int] = []
        self._said: RunningText | None = None
        self._prompt: TextSegment | None = None
        self._source: Alignment | None = None  # of the prompt's tokens `_begin` to `_end`
        self._begin, self._end = 0, 0

    def extend(self, tokens: Sequence[int]) -> None:
        unread = max(0, self._num_prompt - len(self._tokens))
        self._tokens += tokens[:unread]
        if unread < len(tokens) and self._said is None:
            begin = max(0, self._num_prompt - CONTEXT)
            self._said = self._index.join(self._owner, self._tokens, begin)
        for token in tokens[unread:]:
            self._tokens.append(token)
            if self._source is not None:
                self._source.push((token,))
            if len(self._tokens) - self._num_prompt >= COPIED:
                self._look_for_copies()

    def draft(self, limit: int) -> Draft:
        copied = (
            NO_DRAFT if self._source is None or not self._source.agreed else _aligned(self._source, limit)
        )
        found = self._index.find(self._owner, self._tokens, limit, self._said)
        if found is None or not found.tokens or (copied.backing or 0) >= found.length:
            return copied
        return Draft.of(found.tokens, found.confidences)

    def close(self) -> None:
        if self._said is not None:
            self._index.leave(self._owner, self._said)
        self._index.add(self._owner, self._tokens)

    def _look_for_copies(self) -> None:
        """Search the prompt for the answer's last tokens, outside of the earlier text that is followed; if found, follow the prompt from
        there."""
        if self._source is not None and self._source.agreed >= COPIED:
            return
        tokens = self._tokens
        if self._prompt is None:
            self._prompt = self._index.segment_of(tokens[: self._num_prompt], _BLOCK)
        ends = [p - CONTEXT for p in islice(self._prompt.places(0, hash_of(tokens[-_BLOCK:])), _MOST_COPIES)]
        ends = [e for e in ends if e >= COPIED and tokens[e - COPIED : e] == tokens[-COPIED:]]
        if not ends or any(self._begin <= end <= self._end for end in ends):
            return
        self._begin, self._end = max(0, ends[0] - BEFORE), min(self._num_prompt, ends[0] + BEHIND)
        self._source = Alignment(tokens[self._begin : self._end])
        self._source.start(ends[0] - self._begin, tokens[-COPIED:])

    @property
    def nbytes(self) -> int:
        held = sum(x.nbytes for x in (self._prompt, self._source, self._said) if x is not None)
        return 8 * len(self._tokens) + held


def _aligned(alignment: Alignment, limit: int, agreed: int | None = None) -> Draft:
    """Return a draft of the tokens that follow the answer's place in a text, at most `limit`, two for each token that has agreed. agreed:
    number of these, None for the alignment's own count."""
    agreed = alignment.agreed if agreed is None else agreed
    tokens = alignment.next(min(limit, 2 ** min(agreed, 6)))
    tokens = next((tokens[:i] for i, token in enumerate(tokens) if token < 0), tokens)
    return Draft(len(tokens), tokens, backing=alignment.agreed) if tokens else NO_DRAFT
