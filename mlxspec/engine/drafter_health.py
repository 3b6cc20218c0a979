"""Detects a drafter whose drafts are nearly always wrong, by comparing the first tokens of its drafts with the texts of all answers.

A drafter that runs a model and proposes a wrong first token nearly every time was made for another model, or is damaged. It costs time and
gains nothing, and the texts do not show it. Lookup drafters are left out: they draft only where a text repeats itself.
"""

from __future__ import annotations

from collections.abc import Collection
from math import sqrt

from mlxspec.engine.stats import RequestStats

LOW = 0.25  # share of right first tokens; published figures of heads, block drafters and draft models are above twice as much
_SURE = 3.0  # standard errors
_REMEMBERED = 2000  # drafts; older ones count for less and less


class DrafterHealth:
    """A check for drafters whose drafts are nearly always wrong. names: the drafters that run a model. counts: by drafter's name, the
    number of drafts that were judged, and the number of those whose first token was right."""

    def __init__(self, names: Collection[str], counts: dict[str, tuple[int, int]] | None = None) -> None:
        self._names = names
        self.counts = {} if counts is None else counts
        self._told: set[str] = set()

    def heard(self, stats: RequestStats) -> list[str]:
        """Add the counts of an answer that has ended. Return a sentence for each drafter that is now known, beyond chance, to be hardly
        ever right; each drafter is reported once."""
        found = []
        for name, work in stats.drafters.items():
            if name not in self._names or not work.num_judged:
                continue
            judged, right = self.counts.get(name, (0, 0))
            judged, right = judged + work.num_judged, right + work.num_right
            if judged > _REMEMBERED:
                judged, right = judged // 2, right // 2
            self.counts[name] = judged, right
            if is_low(judged, right) and name not in self._told:
                self._told.add(name)
                found.append(
                    f"The drafter {name} is hardly ever right: of {judged} drafts the first token was accepted in {right}. It "
                    "may be damaged or made for another model, another version of it, or the model without its adapter; or the answers "
                    "are sampled at a high temperature."
                )
        return found


def is_low(judged: int, right: int) -> bool:
    """Return whether the share of right first tokens is below LOW with near certainty: the upper end of Wilson's score interval (E. B.
    Wilson, 1927) is below it. judged: number of drafts; right: those whose first token was right."""
    if not judged:
        return False
    share, weight = right / judged, _SURE**2 / judged
    spread = _SURE * sqrt(share * (1 - share) / judged + weight / (4 * judged))
    return (share + weight / 2 + spread) / (1 + weight) < LOW
