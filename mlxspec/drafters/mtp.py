"""Drafting with the target's own multi-token-prediction head. Knows which hidden goes with which token; the rest is model_based.py.

The head's cell for a known token takes the target's true hidden; only drafted tokens recycle the head's own, and those never stay.
"""

from __future__ import annotations

import mlx.core as mx

from mlxspec.cache.model_cache import ModelCache
from mlxspec.checkpoints.memory import bytes_of
from mlxspec.drafters.base import Needs
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import LogitsAt, Output
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp


class Mtp(ModelDrafter):
    """The head, filled over the whole history, as many cells as the row has known tokens."""

    name = "mtp"
    needs = Needs(hidden=True)

    def __init__(self, head: Qwen35Mtp, max_context: int) -> None:
        super().__init__(max_context)
        self._head = head

    @property
    def weight_bytes(self) -> int:
        return bytes_of(self._head)

    def _make_cache(self, num_rows: int) -> ModelCache:
        return self._head.make_cache(num_rows)

    def _forward(
        self,
        tokens: mx.array,
        hidden: mx.array | None,
        rows: FlatRows,
        cache: ModelCache,
        logits_at: LogitsAt,
    ) -> Output:
        if hidden is None:
            raise ValueError("the MTP head needs the hidden of every token")
        return self._head.forward(tokens, hidden, rows, cache, logits_at=logits_at)
