"""Policy fixed: every round drafts as long as the options allow, and the first drafter in the row's order that proposes anything wins. It
takes no account of costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlxspec.drafters.base import Draft
from mlxspec.drafters.policy import PLAIN, LearnedRound, Policy, RowChoice
from mlxspec.drafters.row import DraftRow


class Fixed(Policy):
    """The policy `fixed`: in each round the first drafter of a row's list that has a draft, as long as the row's limits allow."""

    def choose(self, rows: Sequence[DraftRow], offers: Sequence[Mapping[str, Draft]]) -> list[RowChoice]:
        return [_choice(row, given) for row, given in zip(rows, offers, strict=True)]

    def learn(self, done: LearnedRound) -> None:
        """Do nothing."""


def _choice(row: DraftRow, given: Mapping[str, Draft]) -> RowChoice:
    for drafter, longest in row.limits:
        draft, limit = given.get(drafter.name), min(row.room, longest)
        if draft is None and limit > 0:
            return RowChoice(drafter=drafter.name, length=limit)
        if draft is not None and draft.length:
            return RowChoice(drafter=drafter.name, length=draft.length)
    return PLAIN
