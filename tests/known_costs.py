"""Cost models whose costs somebody has measured, for tests of whoever decides by them."""

from __future__ import annotations

from collections.abc import Mapping

from mlxspec.policy.costs import CostModel, DraftCost


def known_costs(
    widths: Mapping[int, float], drafts: Mapping[str, DraftCost] | None = None, *, pause: float = 0.0
) -> CostModel:
    """widths: width -> seconds of one greedy row's rounds; drafts: seconds, by drafter."""
    costs = CostModel(pause=pause)
    costs.know(widths, drafts or {})
    return costs
