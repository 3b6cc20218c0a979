"""Computes how many times as fast drafting is: the one rule for every ratio that a person reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

SETTLED = 1.3  # the greatest ratio of a comparison over its least; beyond it no single ratio is named
_FEWEST_PAIRS = 3  # fewer say nothing of their spread
_FEWEST_DRAFTED = 4  # one round of this many must have verified a draft, or other programs change the speed more than drafts do


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The speed of drafting over that of plain decoding. median, least, most: of the ratios of num_pairs pairs, each measured close
    together in time. refusal: why there is no ratio; "" where there is one."""

    median: float = 0.0
    least: float = 0.0
    most: float = 0.0
    num_pairs: int = 0
    refusal: str = ""

    @property
    def is_settled(self) -> bool:
        """Return whether there are enough pairs and their ratios are close enough that their median may be named."""
        return self.num_pairs >= _FEWEST_PAIRS and self.most <= SETTLED * self.least

    def __str__(self) -> str:
        """Return `1.62x (1.50x to 1.71x)`, `not settled (1.20x to 2.01x)`, or why there is no ratio."""
        span = f"({self.least:.2f}x to {self.most:.2f}x)"
        if self.refusal:
            return self.refusal
        return f"{self.median:.2f}x {span}" if self.is_settled else f"not settled {span}"

    @property
    def words(self) -> str:
        """Return the ratio in words, `1.62 times as fast as without drafting (1.50 to 1.71)`; where it is not settled only the range,
        with that remark; "" without a ratio."""
        if self.refusal:
            return ""
        if self.is_settled:
            return (
                f"{self.median:.2f} times as fast as without drafting ({self.least:.2f} to {self.most:.2f})"
            )
        return f"{self.least:.2f} to {self.most:.2f} times as fast as without drafting, which is not settled"

    def data(self) -> dict[str, Any]:
        """Return the ratio as plain JSON objects; the median is None where it is not settled."""
        found = asdict(self) | {"is_settled": self.is_settled, "words": self.words}
        return found if self.is_settled else found | {"median": None}


def ratio(pairs: Sequence[tuple[float, float]], *, num_rounds: int, num_drafted_rounds: int) -> Ratio:
    """Return how many times as fast drafting was, or a Ratio with the reason why that cannot be stated.

    pairs: tokens a second with drafting and without, over the same tokens. num_rounds, num_drafted_rounds: the rounds of the answers
    with drafting, and those of them that verified a draft.
    """
    if not num_drafted_rounds:
        return Ratio(refusal="nothing was drafted")
    if _FEWEST_DRAFTED * num_drafted_rounds < num_rounds:
        return Ratio(refusal=f"only {num_drafted_rounds:,} of {num_rounds:,} rounds had a draft")
    return of_pairs(pairs)


def of_pairs(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Return the ratio of the first speed of each pair to the second, or a Ratio with the reason why there is none."""
    if not pairs or any(speed <= 0 for pair in pairs for speed in pair):
        return Ratio(refusal="the answers are too short")
    found = [one / other for one, other in pairs]
    return Ratio(median=median(found), least=min(found), most=max(found), num_pairs=len(found))
