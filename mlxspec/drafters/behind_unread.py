"""Drafts by a model for a round that is launched before the previous one was read.

The model runs all of the round's places, so that shapes do not depend on how many tokens were accepted. Invariants: cells of rejected
tokens lie behind the rows' ends as the device knows them, where the next tokens are written over them; until `settle` the cache's lengths
are bounds; behind `take_back` the cells are gone and the tokens wait in the queue, as they would had `propose` been next.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.quantized import PLAIN
from mlxspec.drafters.base import Ask, Draft, Heard, Unread
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.models.head_rows import HeadRows
from mlxspec.sampling.sampler import BatchSampler


@dataclass(kw_only=True)
class _Unsettled:
    """Of the last round drafted behind an unread one, by row: the cache's length before, and what was observed in between."""

    lengths: dict[int, int]
    heard: dict[int, tuple[list[int], mx.array | None]] = field(default_factory=dict)


class BehindUnread(ModelDrafter):
    """A model drafter whose cells take what the target gave out, so that they can be made before the host has read the tokens."""

    def __init__(
        self, model: Any, max_context: int, head_rows: HeadRows | None = None, *, kv_bits: int = PLAIN
    ) -> None:
        super().__init__(model, max_context, head_rows, kv_bits=kv_bits)
        self._unsettled: _Unsettled | None = None

    @abstractmethod
    def _draft_behind(
        self,
        cache: ModelCache,
        names: dict[int, int],
        asks: Sequence[Ask],
        sampler: BatchSampler,
        unread: Unread,
    ) -> dict[int, Draft]:
        """Run the cells of an unread round, commit them with the round's numbers, and draft. names: the rows that ask, in the cache's
        order; unread: of these rows in that order."""

    def _of_all_rows(self, num_committed: mx.array, names: dict[int, int]) -> mx.array:
        """Counts of the rows `names` -> counts of the cache's rows, 0 for those that do not ask."""
        if len(names) == len(self._order):
            return num_committed
        index = np.cumsum([name in names for name in self._order]) * [n in names for n in self._order]
        return mx.concatenate([mx.zeros((1,), mx.int32), num_committed])[mx.array(index.astype(np.int32))]

    def observe_rounds(self, row: int, rounds: Sequence[Heard]) -> None:
        unsettled = self._unsettled
        if unsettled is not None and self._is_unread and row in unsettled.lengths:
            tokens, hidden = rounds[-1]
            unsettled.heard[row] = list(tokens), hidden
        else:
            super().observe_rounds(row, rounds)

    def propose(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        self._unsettled = None
        return super().propose(asks, sampler)

    def propose_behind(
        self, asks: Sequence[Ask], sampler: BatchSampler, unread: Unread
    ) -> list[Draft] | None:
        cache, places = self._cache, {a.row: i for i, a in enumerate(asks)}
        if cache is None or not places.keys() <= self._rows.keys():
            return None
        if any(len(a.history) + unread.width + a.limit >= self.max_context for a in asks):
            return None
        queued = {r: self._rows[r].take() for r in places if self._rows[r].tokens}
        if queued:  # known tokens come before those that are not
            cache, _ = self._run(queued, "none")
        before = {name: cache.lengths[i] for i, name in enumerate(self._order) if name in places}
        unread = unread.select([places[name] for name in before])
        self._unsettled = _Unsettled(lengths=before)
        self._open(asks)
        try:
            done = self._draft_behind(cache, before, asks, sampler, unread)
        except BaseException:
            cache.abort()
            self.take_back()
            raise
        return [done[a.row] for a in asks]

    def settle(self) -> None:
        if self._cache is not None and self._unsettled is not None and self._is_unread:
            heard = self._unsettled.heard
            self._cache.settle([len(heard[name][0]) if name in heard else 0 for name in self._order])

    def take_back(self) -> None:
        unsettled, self._unsettled, cache = self._unsettled, None, self._cache
        if unsettled is None or cache is None:
            return
        if cache.is_unread:
            cache.settle([0] * cache.num_rows)
        for name, length in unsettled.lengths.items():
            state, (tokens, hidden) = self._rows.get(name), unsettled.heard.get(name, ([], None))
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
