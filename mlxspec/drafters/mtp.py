"""Drafting with the target's own multi-token-prediction head. Knows which hidden goes with which token, and how cells of an unread round
are run; the rest is behind_unread.py's and model_based.py's. The head's cell for a known token takes the target's true hidden; only drafted
tokens recycle the head's own, and those never stay. The first token has no cell, because no hidden comes before it: the heads are trained
on pairs of a hidden and the token that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxspec.cache.model_cache import ModelCache
from mlxspec.drafters.base import Ask, Draft, Needs, Unread
from mlxspec.drafters.behind_unread import BehindUnread
from mlxspec.drafters.model_based import DraftStep
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import LogitsAt, Output
from mlxspec.sampling.sampler import BatchSampler


class Mtp(BehindUnread):
    """The head, filled over the whole history: one cell for each known token but the first."""

    name = "mtp"
    needs = Needs(hidden=True)
    skips = 1
    sees_images = True

    def _draft_behind(
        self,
        cache: ModelCache,
        names: dict[int, int],
        asks: Sequence[Ask],
        sampler: BatchSampler,
        unread: Unread,
    ) -> dict[int, Draft]:
        logits, hidden = self._run_behind(cache, names, unread)
        owners = {a.row: i for i, a in enumerate(asks)}
        return self._go_on(cache, asks, logits, hidden, sampler, owners, (unread.num_committed, unread.width))

    def _run_behind(
        self, cache: ModelCache, names: dict[int, int], unread: Unread
    ) -> tuple[mx.array, mx.array]:
        """The cells of an unread round of these rows, in the cache's order; of each row's last that stands logits (rows, V) and hidden
        (rows, H)."""
        rows = FlatRows(tuple(unread.width if name in names else 0 for name in self._order))
        out = self.model.forward(
            unread.tokens.reshape(-1),
            self._taken(unread.hidden),
            rows,
            cache,
            certain=False,
            logits_at="none",
        )
        cache.commit(self._of_all_rows(unread.num_committed, names))
        before = np.arange(len(names), dtype=np.int32) * unread.width - 1
        hidden = out.hidden[mx.array(before) + unread.num_committed]
        if self.proposals is not None:
            return self.proposals.logits(hidden, list(names)), hidden
        return self.model.head(hidden), hidden

    def _forward(self, step: DraftStep) -> Output:
        if step.hidden is None:
            raise ValueError("the MTP head needs the hidden of every token")
        wanted: LogitsAt = step.logits_at if self.proposals is None else "none"
        out = self.model.forward(
            step.tokens, step.hidden, step.rows, step.cache, logits_at=wanted, images=step.images
        )
        return self._own_head(out, step)
