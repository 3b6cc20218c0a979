"""Estimates how likely drafted tokens are to be accepted: one table for each kind of request and drafter, counted from the texts that came.

A drafter that knows probabilities is read by them: a token's confidence picks a cell of the table. One that does not (a lookup) is read by
its streak: how many tokens in a row its place, or else the drafter, has predicted right before this one. A draft
that is not known yet is read by depth. Drafts need not be verified to be learned from: the text that comes decides. Plain numbers; knows
no tokens, no costs and no models.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from mlxspec.errors import ConfigError

MODEL_DEPTH = 11  # tokens of the longest draft that a model is asked for
CONFIDENCES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)  # edges of cells
STREAKS = (1, 2, 3, 4, 6, 9, 13, 21, 41)  # likewise
FIRST_CHANCE = 0.8  # that a token of a model's draft is accepted, before anything is known of the drafter
TRUST = (
    4.0  # tokens that a first guess counts for, and what the kind is taken to be beside a row's own tokens
)
PROBED = 8.0  # tokens until the first probe of a drafter that does not draft
_FIRST_LOOKUP = 0.75  # the chance of a lookup's token without a streak, before anything is known
_MEMORY = 333.0  # tokens that a cell's rate is a mean of, at most
_LARGEST = 1e9  # of any number in a file
_TABLES = ("sure", "streaks", "depths")

# the middles of cells; and of streaks: the longer it was right, the less doubt
_SURE = (0.08, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.925, 0.965, 0.985)
_STREAK = tuple(1.0 - (1.0 - _FIRST_LOOKUP) * _FIRST_LOOKUP**i for i in range(len(STREAKS) + 1))
_CELLS = [bisect_right(STREAKS, i) for i in range(STREAKS[-1])]  # by streak


class Offer(NamedTuple):
    """A draft as the policy sees it: its drafter's name, its number of tokens, and the confidence of each token, None where the drafter
    has none. backing: of a draft copied from a text, how many tokens before the copied ones equal the answer's last tokens, less the
    n tokens of an n-gram by which the place was found; None where that is not known."""

    drafter: str
    length: int
    confidences: Sequence[float] | None = None
    backing: int | None = None


class Cells:
    """A table of acceptance rates. Each cell is a mean over at most _MEMORY tokens."""

    __slots__ = ("counts", "rates")

    def __init__(self, first: Sequence[float]) -> None:
        self.rates, self.counts = list(first), [TRUST] * len(first)

    def count(self, cell: int, is_right: bool) -> None:
        """Add to this cell a token that was compared with the text."""
        num = self.counts[cell] = min(self.counts[cell] + 1.0, _MEMORY)
        self.rates[cell] += (is_right - self.rates[cell]) / num

    def as_data(self) -> list[list[float]]:
        """Return the cells as plain JSON, for `read`."""
        return [self.rates, self.counts]

    def read(self, data: Any) -> None:
        """Replace the cells by what `as_data` returned. Raises ConfigError, TypeError or ValueError for anything else."""
        for own, given, least, most in zip(
            (self.rates, self.counts), data, (0.0, TRUST), (1.0, _MEMORY), strict=True
        ):
            own[:] = [checked(x, least, most) for x, _ in zip(given, own, strict=True)]


class Acceptance:
    """The acceptance rates of one drafter for one kind of request.

    sure, streaks, depths: rates by confidence, by streak and by place in the draft, each of tokens whose preceding drafted tokens were
    right. gap: tokens between two probes; asked_at: number of tokens of this kind that had been decoded when the drafter was last asked.
    """

    __slots__ = ("asked_at", "depths", "gap", "streaks", "sure")

    def __init__(self) -> None:
        self.sure, self.streaks = Cells(_SURE), Cells(_STREAK)
        self.depths = Cells([FIRST_CHANCE] * MODEL_DEPTH)
        self.gap, self.asked_at = PROBED, -PROBED

    def cells(self, offer: Offer, streak: int, most: int) -> tuple[Cells, list[int]]:
        """Return the table that applies to a draft, and the cells of its first `most` tokens. streak: the drafter's current streak."""
        if offer.confidences is not None:
            return self.sure, [bisect_right(CONFIDENCES, c) for c in offer.confidences[:most]]
        before, num = streak if offer.backing is None else offer.backing, min(offer.length, most)
        known = _CELLS[before : before + num]
        return self.streaks, known + [len(STREAKS)] * (num - len(known))

    def count(self, table: Cells, cells: Sequence[int], matched: int) -> None:
        """Add the tokens of a draft that were compared with the text to a table of acceptance rates. cells: for each token in order, the
        index of its cell in `table`. matched: the first `matched` tokens count as accepted, the others as rejected."""
        for i, cell in enumerate(cells):
            table.count(cell, i < matched)

    def as_data(self) -> dict[str, Any]:
        """Return the tables as plain JSON, for `from_data`."""
        return {name: getattr(self, name).as_data() for name in _TABLES} | {"gap": self.gap}

    @classmethod
    def from_data(cls, data: Any) -> Acceptance:
        """Return the tables that `as_data` returned as JSON. Raises ConfigError, KeyError, TypeError or ValueError for anything else."""
        found = cls()
        for name in _TABLES:
            getattr(found, name).read(data[name])
        found.gap, found.asked_at = checked(data["gap"], PROBED), 0.0
        return found


def checked(value: Any, least: float, most: float = _LARGEST) -> float:
    """Return a number that was read from a file. Raises ConfigError where it is out of range."""
    number = float(value)
    if not least <= number <= most:
        raise ConfigError("A number in what was learned is too small or too large.")
    return number
