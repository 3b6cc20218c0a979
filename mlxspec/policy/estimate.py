"""Estimates how likely drafted tokens are to be accepted: from a drafter's confidences, calibrated by what was accepted before.

A drafter that knows probabilities is read by them: confidence and depth pick a cell of counts. One that does not (n-gram lookup) is
read by its streak: how many tokens in a row it has said right up to this one, drafted ones counting as right; where it knows how many the
place that it drafts from would have said right, by that. Cells never tried
inherit: a deeper one from its shallower neighbour, the first from a prior (a longer streak leaves less doubt). Counts are shared by
all requests of a kind; a row has one factor of its own on the odds, which follows the text at hand quickly. Drafts need not be
verified to be learned from: the text that comes decides. Plain numbers; knows no tokens, no costs and no model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from mlxspec.policy.constants import Constants

CONFIDENCES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)  # edges of cells
STREAKS = (1, 2, 3, 4, 6, 9, 13, 21, 41)  # likewise
_MIDDLES = (0.08, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.925, 0.965, 0.985)
_DEPTHS = 4  # cells for depth 0, 1, 2 and all deeper ones
_NUM_CONFIDENCES = len(CONFIDENCES) + 1
_NUM_STREAKS = len(STREAKS) + 1


class Calibration:
    """Counts of one drafter for one kind of request. chances: the estimate of every cell."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        self._less_doubt = 1.0 - constants.quick  # how much of the doubt a longer streak inherits
        self._decay = 1.0 - constants.fade / (
            2.0 * constants.spell
        )  # rows come and go: what they share follows slowly
        doubt = 1.0 - constants.first_chance
        streaks = [1.0 - doubt * self._less_doubt**i for i in range(_NUM_STREAKS)]
        self._priors = [*_MIDDLES] * _DEPTHS, streaks
        self._hits = [0.0] * (_DEPTHS * _NUM_CONFIDENCES), [0.0] * _NUM_STREAKS
        self._tries = [0.0] * (_DEPTHS * _NUM_CONFIDENCES), [0.0] * _NUM_STREAKS
        self.by_confidence = list(self._priors[0])
        self.by_streak = list(self._priors[1])

    def learn_confidence(self, cell: int, stood: bool) -> None:
        self._learn(0, self.by_confidence, cell, _NUM_CONFIDENCES, stood)

    def learn_streak(self, cell: int, stood: bool) -> None:
        self._learn(1, self.by_streak, cell, 1, stood)

    def _learn(self, which: int, chances: list[float], cell: int, stride: int, stood: bool) -> None:
        """Count, then draw this cell and those that inherit from it anew."""
        hits, tries, priors = self._hits[which], self._tries[which], self._priors[which]
        doubt, trust = self._less_doubt if which else 1.0, self.constants.trust
        hits[cell] = hits[cell] * self._decay + stood
        tries[cell] = tries[cell] * self._decay + 1.0
        for i in range(cell, len(chances), stride):
            inherited = 1.0 - doubt * (1.0 - chances[i - stride]) if i >= stride else priors[i]
            chances[i] = (hits[i] + trust * inherited) / (tries[i] + trust)


class RowEstimate:
    """One drafter as one row sees it. streak: tokens said right in a row up to the end of the text; odds: the row's own factor."""

    __slots__ = ("_far", "_quick", "_shared", "_stay", "odds", "streak")

    def __init__(self, shared: Calibration) -> None:
        self._shared, constants = shared, shared.constants
        self._quick, self._far = constants.quick, 2.0 * constants.trust
        self._stay = (
            1.0 - constants.follow / 2.0
        )  # how much of the way the odds stay where an outcome moved them
        self.odds = 1.0
        self.streak = 0

    def chances(
        self, length: int, confidences: Sequence[float] | None, backing: int | None = None
    ) -> list[float]:
        """For each token of a draft: the probability that it stands if all before it do. Shorter than the draft where reaching further
        is out of the question. backing: the streak of the place that a lookup drafts from, None where that is not known."""
        odds, out, reached = self.odds, [], 1.0
        streak = self.streak if backing is None else backing
        for i in range(length):
            if confidences is None:
                p = self._shared.by_streak[bisect_right(STREAKS, streak + i)]
            else:
                p = self._shared.by_confidence[_cell(i, confidences[i])]
            p = p * odds / (1.0 - p + p * odds)
            out.append(p)
            reached *= p
            if reached < self._shared.constants.margin:
                break
        return out

    def reaches(
        self, length: int, confidences: Sequence[float] | None, backing: int | None = None
    ) -> list[float]:
        """For each token of a draft: the probability that it and all before it stand."""
        reached, out = 1.0, []
        for p in self.chances(length, confidences, backing):
            reached *= p
            out.append(reached)
        return out

    def learn(
        self,
        length: int,
        confidences: Sequence[float] | None,
        matched: int,
        known: int,
        backing: int | None = None,
    ) -> None:
        """A draft met the text: of its tokens the first `matched` were what came, `known` tokens came. Where a draft and the text
        part, the token there failed; what lies behind was never in question. The streak ends with it, or grows by what matched."""
        shared, i = self._shared, 0
        streak = self.streak if backing is None else backing
        while i < length and i < known and i <= matched:
            stood = i < matched
            if confidences is None:
                cell = bisect_right(STREAKS, streak + i)
                p = shared.by_streak[cell]
                shared.learn_streak(cell, stood)
            else:
                cell = _cell(i, confidences[i])
                p = shared.by_confidence[cell]
                shared.learn_confidence(cell, stood)
            self._follow(p, stood)
            i += 1
        failed = matched < min(length, known)
        self.streak = 0 if failed or not length else self.streak + matched

    def _follow(self, p: float, stood: bool) -> None:
        odds = self.odds
        expected = p * odds / (1.0 - p + p * odds)
        odds *= 1.0 + self._quick * (stood - expected)
        odds **= self._stay
        self.odds = min(self._far, max(1.0 / self._far, odds))


def _cell(depth: int, confidence: float) -> int:
    return min(depth, _DEPTHS - 1) * _NUM_CONFIDENCES + bisect_right(CONFIDENCES, confidence)
