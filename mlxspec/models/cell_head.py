"""The common part of an MTP head and an EAGLE-3 drafter: one decoder layer that predicts the token after next, cell by cell.

The cell of a token takes the token and what the target had at the token before it; further cells of a draft take the output of the cell
before them. Knows the cells' cache and how a forward is compiled; a subclass gives the cell itself.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import mlx.core as mx

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.quantized import PLAIN, attention_cache
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import LogitsAt, Output
from mlxspec.models.drafter_module import DrafterModule
from mlxspec.models.image_rows import ImageInput
from mlxspec.models.layers import Rotary
from mlxspec.models.qwen3_5 import turns_of
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.runners import Runners
from mlxspec.platform import device

_OF_A_CELL = 30  # kernels that Metal launches for a token, for `device.start`


class CellHead(DrafterModule):
    """A drafter of one decoder layer that is run cell by cell. The cell of a token takes the token and a hidden state of the token before
    it, and predicts the next token. layers: the one layer, whose `self_attn` is a Qwen35Attention. rotary: its rotary positions."""

    def __init__(self, layer: Qwen35Config, target: Any, rotary: Rotary) -> None:
        """Prepare a head with a layer of this shape. target: the model that it drafts for. rotary: the rotary positions of its
        attention."""
        super().__init__(target)
        self._shape, self.rotary = layer, rotary
        self._runners = Runners()

    def make_cache(self, num_rows: int, *, kv_bits: int = PLAIN) -> ModelCache:
        """Return an empty cache of cells for `num_rows` rows. kv_bits: as in models.base.Model."""
        sizes = self._shape.num_kv_heads, self._shape.head_dim
        return ModelCache([attention_cache(*sizes, self.dtype, num_rows, kv_bits)], num_rows)

    def forward(
        self,
        tokens: mx.array,
        hidden: mx.array,
        rows: FlatRows,
        cache: ModelCache,
        *,
        certain: bool = True,
        logits_at: LogitsAt = "last",
        images: ImageInput | None = None,
    ) -> Output:
        """Run the cells of tokens (N,) int32, leave the cache's transaction open, and return the results. hidden (N, H): the second
        input of each cell. The Output's hidden (N, H) is the second input of the next cells of a draft. certain, images: as in
        models.base.Model."""
        attention = self.layers[0].self_attn
        places, num_cold = cache.begin(rows, certain=certain), self._runners.num_cold
        cos, sin = self.rotary.table(turns_of(self.rotary, places, images))
        embedded = self.embed(tokens)
        if images is not None:
            embedded = images.placed(embedded)
        x, (q, k, v, gate) = self._runners.get("before", self.before, rows)(embedded, hidden, cos, sin)
        # so that the device need not wait until all of the forward is built
        device.start(x, num_launches=_OF_A_CELL)
        attended = attention.core(q, k, v, places, cache.attention(0))
        out = self._runners.get("after", self.after, rows)(x, attended, gate)
        seen = rows.last(out) if logits_at == "last" else out
        logits = None if logits_at == "none" else self.head(seen)
        return Output(logits=logits, hidden=out, is_warm=self._runners.num_cold == num_cold)

    @abstractmethod
    def embed(self, tokens: mx.array) -> mx.array:
        """Return the embeddings (N, H) of tokens (N,)."""

    @abstractmethod
    def before(
        self, embedded: mx.array, hidden: mx.array, cos: mx.array, sin: mx.array
    ) -> tuple[mx.array, tuple[Any, ...]]:
        """Compute the part of a cell up to attention. Return the residual stream (N, H) that attention's output is added to, and the tuple
        of queries, keys, values and gate."""

    @abstractmethod
    def after(self, x: mx.array, attended: mx.array, gate: mx.array | None) -> mx.array:
        """Compute the part of a cell after attention, and return the cell's output (N, H)."""

    @abstractmethod
    def head(self, hidden: mx.array) -> mx.array:
        """Return the logits (N, V) of the cells' outputs (N, H)."""
