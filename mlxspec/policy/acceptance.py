"""How likely drafted tokens are to be accepted: one table for each kind of request and drafter, counted from what texts turned out to be.

A drafter that knows probabilities is read by them: a token's confidence picks a cell of counts. One that does not (a lookup) is read by
its streak: how many tokens in a row its place, or else the drafter, has said right before this one. Drafts need not be verified to be
learned from: the text that comes decides. Plain numbers; knows no tokens, no costs and no models.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mlxspec.errors import ConfigError

MODEL_DEPTH = 8  # tokens of the longest draft that a model is asked for
CONFIDENCES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)  # edges of cells
STREAKS = (1, 2, 3, 4, 6, 9, 13, 21, 41)  # likewise
FIRST_CHANCE = 0.75  # that a token is accepted, before anything is known of its drafter
TRUST = 4.0  # drafts that a first guess counts for
MEMORY = 25.0  # drafts of earlier rows that count at most
SPELL = 8.0  # tokens until the first probe of a drafter that does not draft
_DECAY = 0.003  # of a cell's counts, with each token that is counted in it
_LARGEST = 1e9  # of any number in a file

# the middles of cells, and of streaks: the longer it was right, the less doubt
_GUESSES = (
    (0.08, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.925, 0.965, 0.985),
    tuple(1.0 - (1.0 - FIRST_CHANCE) * FIRST_CHANCE**i for i in range(len(STREAKS) + 1)),
)


class Offer(NamedTuple):
    """A draft: how many tokens, and how sure of each its drafter is, if it knows. backing: of a lookup, how many tokens before the draft
    the same place would have said right, if it knows."""

    drafter: str
    length: int
    confidences: Sequence[float] | None = None
    backing: int | None = None


class Acceptance:
    """Of one drafter and kind of request. reach: mean chance that the first i + 1 tokens of a draft are accepted, over `weight` drafts.
    gap: tokens between two probes; asked_at: tokens of this kind that had come when the drafter was last asked."""

    __slots__ = ("_hits", "_tries", "asked_at", "chances", "gap", "reach", "weight")

    def __init__(self) -> None:
        self._hits = [[TRUST * p for p in guess] for guess in _GUESSES]
        self._tries = [[TRUST] * len(guess) for guess in _GUESSES]
        self.chances = [list(guess) for guess in _GUESSES]
        self.reach = [FIRST_CHANCE ** (i + 1) for i in range(MODEL_DEPTH)]
        self.weight, self.gap, self.asked_at = TRUST, SPELL, -SPELL

    def cells(self, offer: Offer, streak: int, most: int) -> tuple[int, list[int]]:
        """By what a draft is read (0: confidence, 1: streak), and the cells of its first `most` tokens."""
        if offer.confidences is not None:
            return 0, [bisect_right(CONFIDENCES, c) for c in offer.confidences[:most]]
        before = streak if offer.backing is None else offer.backing
        return 1, [bisect_right(STREAKS, before + i) for i in range(min(offer.length, most))]

    def count(self, which: int, cell: int, accepted: bool) -> None:
        """A token of this cell met the text."""
        hits, tries = self._hits[which], self._tries[which]
        hits[cell] += accepted - _DECAY * hits[cell]
        tries[cell] += 1.0 - _DECAY * tries[cell]
        self.chances[which][cell] = hits[cell] / tries[cell]

    def add(self, reach: Sequence[float], num_drafts: float) -> None:
        """A row has ended that saw so many drafts, which reached so far on average."""
        weight, total = self.weight, self.weight + num_drafts
        self.reach = [(weight * a + num_drafts * b) / total for a, b in zip(self.reach, reach, strict=True)]
        self.weight = min(total, MEMORY)

    def as_data(self) -> dict[str, Any]:
        """For `from_data`, plain JSON."""
        data = {"hits": self._hits, "tries": self._tries, "reach": self.reach}
        return {**data, "weight": self.weight, "gap": self.gap}

    @classmethod
    def from_data(cls, data: Any) -> Acceptance:
        """Raises ConfigError, KeyError, TypeError or ValueError for what `as_data` does not return."""
        found = cls()
        for name in ("hits", "tries"):
            for own, given in zip(getattr(found, f"_{name}"), data[name], strict=True):
                own[:] = [_number(x) for x, _ in zip(given, own, strict=True)]
        found.reach = [min(1.0, _number(x)) for x, _ in zip(data["reach"], found.reach, strict=True)]
        found.weight, found.gap = _number(data["weight"], TRUST), _number(data["gap"], SPELL)
        for which, (hits, tries) in enumerate(zip(found._hits, found._tries, strict=True)):
            if not all(0.0 < h < t for h, t in zip(hits, tries, strict=True)):
                raise ConfigError("More tokens were accepted than were tried.")
            found.chances[which] = [h / t for h, t in zip(hits, tries, strict=True)]
        found.asked_at = 0.0
        return found


class Learned:
    """All that rows have shown: acceptance by kind and drafter, and by kind the tokens a plain round that rows went at."""

    def __init__(self) -> None:
        self.acceptance: dict[tuple[str, str], Acceptance] = {}
        self.rates: dict[str, float] = {}

    def of(self, kind: str, drafter: str) -> Acceptance:
        """What is known of a drafter, a guess where nobody has asked it."""
        found = self.acceptance.get((kind, drafter))
        if found is None:
            found = self.acceptance[kind, drafter] = Acceptance()
        return found

    def as_data(self, marks: Mapping[str, str]) -> dict[str, Any]:
        """For `from_data`. marks: what drafters are called there, by name; others are left out."""
        rows = [[k, marks[d], a.as_data()] for (k, d), a in self.acceptance.items() if d in marks]
        return {"acceptance": rows, "rates": self.rates}

    @classmethod
    def from_data(cls, data: Any, names: Mapping[str, str]) -> Learned:
        """names: of drafters by what they are called in `data`. Raises as `Acceptance.from_data` does."""
        found = cls()
        found.rates = {str(k): _number(r) for k, r in data["rates"].items()}
        for kind, mark, cells in data["acceptance"]:
            if mark in names:
                found.acceptance[str(kind), names[mark]] = Acceptance.from_data(cells)
        return found


def _number(value: Any, least: float = 0.0) -> float:
    number = float(value)
    if not least <= number <= _LARGEST:
        raise ConfigError("A number in what was learned is too small or too large.")
    return number
