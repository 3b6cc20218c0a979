"""Drafting with the target's own multi-token-prediction head. Knows which hidden goes with which token; the rest is
behind_unread.py's and model_based.py's. The head's cell for a known token takes the target's true hidden; only drafted
tokens recycle the head's own, and those never stay. The first token has no cell, because no hidden comes before it: the heads are trained
on pairs of a hidden and the token that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxspec.cache.model_cache import ModelCache
from mlxspec.drafters.base import Ask, Draft, Needs, Unread
from mlxspec.drafters.behind_unread import BehindUnread
from mlxspec.drafters.model_based import DraftStep
from mlxspec.models.base import LogitsAt, Output
from mlxspec.sampling.sampler import BatchSampler


class Mtp(BehindUnread):
    """A drafter that drafts with the target's MTP head. The head runs over the whole history: its cache has one cell for each known token
    but the first."""

    name = "mtp"
    needs = Needs(hidden=True)
    skips = 1
    sees_images = True

    def _draft_behind(
        self,
        fork: ModelCache,
        hidden: mx.array,
        asks: Sequence[Ask],
        sampler: BatchSampler,
        unread: Unread,
    ) -> dict[int, Draft]:
        names = [name for name in self._order if any(a.row == name for a in asks)]
        own = self.proposals
        logits = self.model.head(hidden) if own is None else own.logits(hidden, names)
        owners = {a.row: i for i, a in enumerate(asks)}
        return self._go_on(fork, asks, logits, hidden, sampler, owners, (unread.num_committed, unread.width))

    def _forward(self, step: DraftStep) -> Output:
        if step.hidden is None:
            raise ValueError("the MTP head needs the hidden of every token")
        wanted: LogitsAt = step.logits_at if self.proposals is None else "none"
        out = self.model.forward(
            step.tokens,
            step.hidden,
            step.rows,
            step.cache,
            certain=step.certain,
            logits_at=wanted,
            images=step.images,
        )
        return self._own_head(out, step)
