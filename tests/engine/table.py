"""A model small enough to be computed by hand: the logits of the next token are a table's row for the last token."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlxspec.cache.model_cache import ModelCache
from mlxspec.models.base import Output


class Table:
    """logits (V, V): row t holds the logits of what follows token t, whatever stands before it."""

    attention_heads = ()
    dtype = mx.float32

    def __init__(self, logits: np.ndarray, *, max_context: int = 64) -> None:
        self._logits = mx.array(logits)
        self.vocab_size, self.hidden_size, self.max_context = len(logits), 1, max_context

    def make_cache(self, num_rows: int, *rollback, **_) -> ModelCache:
        return ModelCache([], num_rows)

    def forward(self, tokens, rows, cache, *, certain=False, logits_at="all", taps=()) -> Output:
        cache.begin(rows, certain=certain)
        logits = self._logits[tokens]
        if logits_at != "all":
            logits = logits[rows.last_indices] if logits_at == "last" else None
        return Output(logits=logits, hidden=mx.zeros((rows.num_tokens, 1)))
