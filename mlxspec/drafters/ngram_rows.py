"""What n-gram drafters share: one state a row, and a way to learn what became of a proposal.

`NgramDrafter` hands the engine's calls to the state of the row they are about. Nothing here or in a subclass is
shared between rows, so no request can see another's text. `Follower` compares proposals with the text that came.
Knows neither how n-grams are found nor any model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import mlx.core as mx

from mlxspec.drafters.base import Ask, Draft, Drafter
from mlxspec.drafters.ngram_images import TextOnly
from mlxspec.models.image_rows import SeenImages
from mlxspec.sampling.sampler import BatchSampler

Tag = TypeVar("Tag")


class NgramRow(ABC):
    """One row's history and what is known about it."""

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> None:
        """The next tokens of the history; amortised O(1) a token."""

    @abstractmethod
    def draft(self, limit: int) -> Draft:
        """What may follow the history: at most `limit` host tokens."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """About how many bytes this state holds."""


class NgramDrafter(Drafter):
    """A drafter made of independent rows."""

    def __init__(self, make_row: Callable[[], NgramRow]) -> None:
        self._make_row = make_row
        self._rows: dict[int, NgramRow] = {}
        self._text = TextOnly()

    def begin(self, row: int) -> None:
        self._rows[row] = self._make_row()

    def see(self, row: int, seen: SeenImages) -> None:
        self._text.see(row)

    def observe(self, row: int, tokens: Sequence[int], hidden: mx.array | None) -> None:
        self._rows[row].extend(self._text.tokens(row, tokens))

    def propose(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        return [self._text.draft(ask.row, self._rows[ask.row].draft(ask.limit)) for ask in asks]

    def close(self, row: int) -> None:
        self._rows.pop(row, None)
        self._text.close(row)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self._rows.values())


class Verdict(NamedTuple, Generic[Tag]):
    """A followed proposal is decided: its first `accepted` of `proposed` tokens were what came. tag: what the proposer gave along."""

    tag: Tag
    accepted: int
    proposed: int


class Follower(Generic[Tag]):
    """Compares a proposal with the text that comes, whoever drafted that text.

    One proposal is followed until a token differs or all have come; proposals made meanwhile are not. Were each to replace the one before,
    failures (known at once) would be counted and successes (known late) would not. A draft that was verified is decided by the very next
    `observe`, and one that was trimmed or lost to another drafter is judged by the text as well.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._tag: Tag | None = None
        self._heard = 0
        self.is_open = False

    def follow(self, tokens: list[int], tag: Tag) -> None:
        """Follow `tokens` (not empty), unless another proposal is still open."""
        if not self.is_open:
            self._tokens, self._tag, self._heard, self.is_open = tokens, tag, 0, True

    def hear(self, token: int) -> Verdict[Tag] | None:
        """The next token of the text. A verdict if it decides the open proposal."""
        if not self.is_open or self._tag is None:
            return None
        matches = token == self._tokens[self._heard]
        self._heard += matches
        if matches and self._heard < len(self._tokens):
            return None
        self.is_open = False
        return Verdict(self._tag, self._heard, len(self._tokens))
