"""Drafting what there is no choice about: the text a grammar forces, or a closing tag. Costs no model and is nearly always right.

Only a proposal all the same: where the forced text can be cut into tokens in several ways, the target's own way is what stands. Knows a
row's constraints through its sampler; keeps nothing of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxspec.drafters.base import NO_DRAFT, Ask, Draft, Drafter
from mlxspec.sampling.sampler import BatchSampler


class Forced(Drafter):
    """A drafter of the tokens that a row's constraint forces. It is asked before all others for rows that have constraints."""

    name = "forced"
    max_draft = 63  # tokens: with the row's own a width that compiles

    def draft(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        constraints = ask.sampler.constraints
        tokens = [] if constraints is None else constraints.forced()[: ask.limit]
        return Draft(len(tokens), tokens) if tokens else NO_DRAFT
