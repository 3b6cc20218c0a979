"""Estimates how likely drafted tokens are to be accepted: one table for each kind of request and drafter, counted from what texts turned
out to be.

A drafter that knows probabilities is read by them: a token's confidence picks a cell of the table. One that does not (a lookup) is read by
its streak: how many tokens in a row its place, or else the drafter, has said right before this one. Drafts need not be verified to be
learned from: the text that comes decides. Plain numbers; knows no tokens, no costs and no models.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from mlxspec.errors import ConfigError

CONFIDENCES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)  # edges of cells
STREAKS = (1, 2, 3, 4, 6, 9, 13, 21, 41)  # likewise
FIRST_CHANCE = 0.75  # that a token is accepted, before anything is known of its drafter
TRUST = 4.0  # tokens or drafts that a first guess counts for
PROBED = 8.0  # tokens until the first probe of a drafter that does not draft
_MEMORY = 333.0  # tokens that a cell's rate is a mean of, at most
_DRAFTS = 20.0  # drafts, likewise
_LARGEST = 1e9  # of any number in a file

# the middles of cells, and of streaks: the longer it was right, the less doubt
_GUESSES = (
    (0.08, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.925, 0.965, 0.985),
    tuple(1.0 - (1.0 - FIRST_CHANCE) * FIRST_CHANCE**i for i in range(len(STREAKS) + 1)),
)
_CELLS = [bisect_right(STREAKS, i) for i in range(STREAKS[-1])]  # by streak


class Offer(NamedTuple):
    """A draft: how many tokens, and how sure of each its drafter is, if it knows. backing: of a lookup, how many tokens before the draft
    the same place would have said right, if it knows."""

    drafter: str
    length: int
    confidences: Sequence[float] | None = None
    backing: int | None = None


class Acceptance:
    """Acceptance rates of one drafter and kind of request. rates: by cell, of confidences and of streaks. mean: of a token that a model
    drafts. gap: tokens between two probes; asked_at: tokens of this kind that had come when the drafter was last asked."""

    __slots__ = ("_counts", "_num_drafts", "asked_at", "gap", "mean", "rates")

    def __init__(self) -> None:
        self.rates = [list(guess) for guess in _GUESSES]
        self._counts = [[TRUST] * len(guess) for guess in _GUESSES]
        self.mean, self._num_drafts = FIRST_CHANCE, TRUST
        self.gap, self.asked_at = PROBED, -PROBED

    def cells(self, offer: Offer, streak: int, most: int) -> tuple[int, list[int]]:
        """By what a draft is read (0: confidence, 1: streak), and the cells of its first `most` tokens."""
        if offer.confidences is not None:
            return 0, [bisect_right(CONFIDENCES, c) for c in offer.confidences[:most]]
        before, num = streak if offer.backing is None else offer.backing, min(offer.length, most)
        known = _CELLS[before : before + num]
        return 1, known + [len(STREAKS)] * (num - len(known))

    def count(self, which: int, cells: Sequence[int], matched: int) -> None:
        """Tokens of these cells met the text, of which the first `matched` were accepted."""
        rates, counts = self.rates[which], self._counts[which]
        for i, cell in enumerate(cells):
            counts[cell] = num = min(counts[cell] + 1.0, _MEMORY)
            rates[cell] += ((i < matched) - rates[cell]) / num

    def drafted(self, mean: float, *, is_first: bool) -> float:
        """A model's draft is expected to have so many of its tokens accepted. is_first: behind a pause, so that what is known is old.
        Returns the share that this draft has in what is known now."""
        self._num_drafts = min(self._num_drafts + 1.0, TRUST + 1.0 if is_first else _DRAFTS)
        self.mean += (mean - self.mean) / self._num_drafts
        return 1.0 / self._num_drafts

    def as_data(self) -> dict[str, Any]:
        """For `from_data`, plain JSON."""
        return {"rates": self.rates, "counts": self._counts, "mean": self.mean, "gap": self.gap}

    @classmethod
    def from_data(cls, data: Any) -> Acceptance:
        """Raises ConfigError, KeyError, TypeError or ValueError for what `as_data` does not return."""
        found = cls()
        for own, name, least, most in (
            (found.rates, "rates", 0.0, 1.0),
            (found._counts, "counts", TRUST, _MEMORY),
        ):
            for cells, given in zip(own, data[name], strict=True):
                cells[:] = [_number(x, least, most) for x, _ in zip(given, cells, strict=True)]
        found.mean, found.gap = _number(data["mean"], 0.0, 1.0), _number(data["gap"], PROBED)
        found.asked_at = 0.0
        return found


class Gains:
    """Tokens that a model's drafts gain, by what is done with them: a list of numbers. now: of the last drafts; usual: of hundreds of them;
    num: how many, at most _MEMORY."""

    __slots__ = ("now", "num", "usual")

    def __init__(self, now: Sequence[float]) -> None:
        self.now, self.usual, self.num = list(now), [0.0] * len(now), 0.0

    def count(self, found: Sequence[float], share: float) -> None:
        """A draft is expected to gain so much. share: as `Acceptance.drafted` returns it."""
        self.num = min(self.num + 1.0, _MEMORY)
        self.now = [a + (b - a) * share for a, b in zip(self.now, found, strict=True)]
        self.usual = [a + (b - a) / self.num for a, b in zip(self.usual, found, strict=True)]

    def beside(self, last: Gains) -> list[float]:
        """`now` where only the other drafter `last` has drafted lately: the text is as hard for both. What is not known of this one is as
        the other one's."""
        share = _DRAFTS / (_DRAFTS + self.num)
        known = zip(self.usual, last.usual, last.now, strict=True)
        return [own + share * (other - own) + now - other for own, other, now in known]


def _number(value: Any, least: float, most: float = _LARGEST) -> float:
    number = float(value)
    if not least <= number <= most:
        raise ConfigError("A number in what was learned is too small or too large.")
    return number
