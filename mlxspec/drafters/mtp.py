"""Drafting with the target's own multi-token-prediction head. Knows which hidden goes with which token; the rest is model_based.py.

The head's cell for a known token takes the target's true hidden; only drafted tokens recycle the head's own, and those never stay. The
first token has no cell, because no hidden comes before it: the heads are trained on pairs of a hidden and the token that follows it.

Behind a round that nobody has read the head runs all of the round's places, so that shapes do not depend on what stands. Invariants: what
does not stand lies behind the rows' ends as the device knows them, where the next tokens are written over it; until `settle` the cache's
lengths are bounds; behind `take_back` the cells are gone and the tokens wait in the queue, as they would had `propose` been next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxspec.cache.model_cache import ModelCache
from mlxspec.checkpoints.memory import bytes_of
from mlxspec.drafters.base import Ask, Draft, Heard, Needs, Unread
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import LogitsAt, Output
from mlxspec.models.eagle3 import Eagle3Head
from mlxspec.models.head_rows import HeadRows
from mlxspec.models.image_rows import ImageInput
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from mlxspec.models.reads import Reads, reads
from mlxspec.sampling.sampler import BatchSampler


@dataclass(kw_only=True)
class _Behind:
    """Of the last round drafted behind an unread one, by row: the cache's length before, and what was observed in between."""

    lengths: dict[int, int]
    heard: dict[int, tuple[list[int], mx.array | None]] = field(default_factory=dict)


class Mtp(ModelDrafter):
    """The head, filled over the whole history: one cell for each known token but the first."""

    name = "mtp"
    needs = Needs(hidden=True)
    skips = 1
    sees_images = True

    def __init__(
        self, head: Qwen35Mtp | Eagle3Head, max_context: int, head_rows: HeadRows | None = None
    ) -> None:
        """head_rows: rows of the target's language-model head."""
        super().__init__(max_context, head_rows)
        self._head = head
        self._behind: _Behind | None = None

    @property
    def weight_bytes(self) -> int:
        return bytes_of(self._head) + (0 if self.reduced is None else self.reduced.weight_bytes)

    @property
    def reads(self) -> Reads:
        whole = reads(self._head.target).head
        return reads(self._head, head=whole if self.proposals is None else self.proposals.weight_bytes)

    @property
    def modules(self) -> Sequence[nn.Module]:
        return (self._head,)

    def observe_rounds(self, row: int, rounds: Sequence[Heard]) -> None:
        behind = self._behind
        if behind is not None and self._is_unread and row in behind.lengths:
            tokens, hidden = rounds[-1]
            behind.heard[row] = list(tokens), hidden
        else:
            super().observe_rounds(row, rounds)

    def propose(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        self._behind = None
        return super().propose(asks, sampler)

    def propose_behind(
        self, asks: Sequence[Ask], sampler: BatchSampler, unread: Unread
    ) -> list[Draft] | None:
        cache, places = self._cache, {a.row: i for i, a in enumerate(asks)}
        if (
            cache is None
            or not places.keys() <= self._rows.keys()
            or any(self._rows[r].tokens for r in places)
        ):
            return None
        if any(len(a.history) + unread.width + a.limit >= self.max_context for a in asks):
            return None
        before = {name: cache.lengths[i] for i, name in enumerate(self._order) if name in places}
        unread = unread.select([places[name] for name in before])
        self._behind = _Behind(lengths=before)
        self._open(asks)
        try:
            logits, hidden = self._run_behind(cache, before, unread)
            shift = unread.num, unread.width
            done = self._go_on(cache, asks, logits, hidden, sampler, places, shift)
        except BaseException:
            cache.abort()
            self.take_back()
            raise
        return [done[a.row] for a in asks]

    def settle(self) -> None:
        if self._cache is not None and self._behind is not None and self._is_unread:
            heard = self._behind.heard
            self._cache.settle([len(heard[name][0]) if name in heard else 0 for name in self._order])

    def take_back(self) -> None:
        behind, self._behind, cache = self._behind, None, self._cache
        if behind is None or cache is None:
            return
        if cache.is_unread:
            cache.settle([0] * cache.num_rows)
        for name, length in behind.lengths.items():
            state, (tokens, hidden) = self._rows.get(name), behind.heard.get(name, ([], None))
            if state is None:
                continue
            cache.truncate(self._order.index(name), length)
            state.tokens[:0] = tokens
            if hidden is not None and tokens:
                state.hidden.insert(0, hidden)

    def close(self, row: int) -> None:
        if self._is_unread:
            self.take_back()
        super().close(row)

    @property
    def _is_unread(self) -> bool:
        return self._cache is not None and self._cache.is_unread

    def _run_behind(
        self, cache: ModelCache, names: dict[int, int], unread: Unread
    ) -> tuple[mx.array, mx.array]:
        """The cells of an unread round of these rows, in the cache's order; of each row's last that stands logits (rows, V) and hidden
        (rows, H)."""
        rows = FlatRows(tuple(unread.width if name in names else 0 for name in self._order))
        out = self._head.forward(
            unread.tokens.reshape(-1), self._taken(unread.hidden), rows, cache, facts=False, logits_at="none"
        )
        num = unread.num
        if len(names) < len(self._order):
            index = np.cumsum([name in names for name in self._order]) * [n in names for n in self._order]
            num = mx.concatenate([mx.zeros((1,), mx.int32), num])[mx.array(index.astype(np.int32))]
        cache.commit(num)
        before = np.arange(len(names), dtype=np.int32) * unread.width - 1
        hidden = out.hidden[mx.array(before) + unread.num]
        if self.proposals is not None:
            return self.proposals.logits(hidden, list(names)), hidden
        return self._head.head(hidden), hidden

    def _make_cache(self, num_rows: int) -> ModelCache:
        return self._head.make_cache(num_rows)

    def _forward(
        self,
        tokens: mx.array,
        hidden: mx.array | None,
        rows: FlatRows,
        cache: ModelCache,
        logits_at: LogitsAt,
        images: ImageInput | None = None,
    ) -> Output:
        if hidden is None:
            raise ValueError("the MTP head needs the hidden of every token")
        wanted: LogitsAt = logits_at if self.proposals is None else "none"
        out = self._head.forward(tokens, hidden, rows, cache, logits_at=wanted, images=images)
        return self._own_head(out, rows, logits_at)
