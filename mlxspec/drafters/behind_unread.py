"""Drafts by a model for a round that is launched before the previous one was read.

The model runs all places of the unread round, so that shapes do not depend on how many tokens were accepted, and commits none of them:
drafts go on from a fork that begins behind the accepted ones as the device knows them. So there is nothing to take back. When the tokens
come, the cells of all but the last are there already; the last one is queued, since every draft begins with a token that is run.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.quantized import PLAIN
from mlxspec.cache.unread import extend, fork_behind
from mlxspec.drafters.base import Ask, Draft, Unread
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.models.head_rows import HeadRows
from mlxspec.platform import device
from mlxspec.sampling.sampler import BatchSampler


class BehindUnread(ModelDrafter):
    """A model drafter that runs on the target's outputs, so that it can draft before the host has read the round's tokens."""

    def __init__(
        self, model: Any, max_context: int, head_rows: HeadRows | None = None, *, kv_bits: int = PLAIN
    ) -> None:
        super().__init__(model, max_context, head_rows, kv_bits=kv_bits)
        self._made: set[int] = set()  # rows that have the cells of their next tokens behind their end

    @abstractmethod
    def _draft_behind(
        self,
        fork: ModelCache,
        hidden: mx.array,
        asks: Sequence[Ask],
        sampler: BatchSampler,
        unread: Unread,
    ) -> dict[int, Draft]:
        """Return a draft for each row number, drafted after an unread round whose cells are in the cache `fork`. hidden (rows, H): the
        drafter model's output for the last accepted token of each row; unread: the round of the requesting rows, in the order of the
        cache, as `hidden` has it."""

    def hear(self, row: int, tokens: Sequence[int], hidden: mx.array | None) -> None:
        num = len(tokens) - 1
        if row in self._made and self._cache is not None and num > 0:
            extend(self._cache, self._order.index(row), num)
            tokens, hidden = tokens[num:], None if hidden is None else hidden[num:]
        self._made.discard(row)
        super().hear(row, tokens, hidden)

    def draft_behind(self, asks: Sequence[Ask], sampler: BatchSampler, unread: Unread) -> list[Draft] | None:
        places = {a.row: i for i, a in enumerate(asks)}
        if not places.keys() <= self._rows.keys():
            return None
        if any(len(a.history) + unread.width + a.limit >= self.max_context for a in asks):
            return None
        names = [name for name in self._order if name in places]
        unread = unread.select([places[name] for name in names])
        self._open(asks)
        each = zip(unread.tokens, mx.split(unread.hidden, len(names)), strict=True)
        coming = dict(zip(names, each, strict=True))
        cache, out = self._run({name: self._rows[name].take() for name in names}, "none", coming)
        # a row that waits for a tag may be given other tokens yet
        self._made = {a.row for a in asks if not a.sampler.is_waiting}
        own = [self._order.index(name) for name in names]
        num = mx.zeros((len(self._order),), mx.int32)
        num[mx.array(own, mx.int32)] = unread.num_committed
        most = [unread.width if name in coming else 0 for name in self._order]
        fork = fork_behind(cache, num, most, tails=device.has_gpu())
        last = np.asarray([self._last_rows.starts[i + 1] for i in own]) - unread.width - 1
        hidden = out.hidden[mx.array(last.astype(np.int32)) + unread.num_committed]
        done = self._draft_behind(fork, hidden, asks, sampler, unread)
        return [done[a.row] for a in asks]

    def forget(self, row: int) -> None:
        self._made.discard(row)
        super().forget(row)
