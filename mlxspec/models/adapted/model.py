"""A module of mlx-lm as a model of ours: a forward over the flat token axis, a factory of caches, a size.

Rows run one after another; the head runs once for all of them. Knows the contract; knows no architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxspec.cache.quantized import PLAIN
from mlxspec.errors import CacheError, ModelError
from mlxspec.kernels.attention import Heads
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.adapted.cache import AdaptedCache
from mlxspec.models.adapted.sizes import LeafForm, measured
from mlxspec.models.adapted.split import find_trunk, run_head, run_trunk
from mlxspec.models.base import LogitsAt, Output
from mlxspec.models.image_rows import ImageInput
from mlxspec.models.reads import Reads


@dataclass(frozen=True, kw_only=True)
class AdaptedConfig:
    """What is known of a model beside its module. made_by: mlx-lm and its version. told: its config.json as text. num_heads: of queries in
    an attention layer; hidden_size: of the residual stream; 0 where they are unknown. experts_share: of all experts, those that a token
    goes to."""

    model_type: str
    made_by: str
    told: str
    max_context: int
    num_heads: int = 0
    hidden_size: int = 0
    experts_share: float = 1.0


class AdaptedModel:
    """module: mlx-lm's, called with tokens (1, n) and `cache`. cuts: whether rejected tokens may be cut off where caches say that they can
    be. hidden_size is the vocabulary's where the module has no trunk: logits then stand for hiddens.

    Making one builds lazy forwards and reads no weights.
    """

    num_layers = 0  # none shows its residual stream

    def __init__(self, module: nn.Module, config: AdaptedConfig) -> None:
        self.module, self.config, self.cuts = module, config, True
        self.max_context = config.max_context
        caches = self.new_caches()
        logits: mx.array = module(mx.ones((1, 2), mx.int32), cache=caches)
        self._trunk = find_trunk(module, self.new_caches)
        hidden = logits if self._trunk is None else self._trunk.hidden
        self.vocab_size, self.hidden_size, self.dtype = logits.shape[-1], hidden.shape[-1], hidden.dtype
        self.forms: Sequence[LeafForm] = measured(self.new_caches, self._run)

    def _run(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        """(1, n) -> hiddens (1, n, H)"""
        if self._trunk is None:
            logits: mx.array = self.module(tokens, cache=caches)
            return logits
        return run_trunk(self.module, self._trunk, tokens, caches)

    def new_caches(self) -> list[Any]:
        """Of one row, empty."""
        return list(make_prompt_cache(self.module))

    def body(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        """Hiddens (n, H) of tokens (n,) int32; the caches advance."""
        return self._run(tokens[None], caches)[0]

    @property
    def residual_size(self) -> int:
        """hidden_size of the layers, also where logits stand for hiddens."""
        return self.hidden_size if self._trunk is not None else self.config.hidden_size or self.hidden_size

    def parameters(self) -> Any:
        """mlx-lm's, as mlx.nn has them."""
        return self.module.parameters()

    @property
    def attention_heads(self) -> Sequence[Heads]:
        """By leaves that keep keys of all tokens."""
        found = {
            Heads(
                self.config.num_heads or form.shapes[0][1], form.shapes[0][1], form.shapes[0][3], self.dtype
            )
            for form in self.forms
            if form.is_per_token
        }
        return sorted(found, key=str)

    @cached_property
    def agreed(self) -> Reads:
        """What a forward reads, by the modules' classes: of embeddings a row, of experts a share, of the rest all."""
        trunk = None if self._trunk is None else self._trunk.owner[self._trunk.name]
        inside = {id(v) for _, v in tree_flatten(trunk.parameters())} if trunk is not None else set()
        sizes = {id(v): v.nbytes for _, v in tree_flatten(self.parameters())}
        embedding, stacks = 0, 0
        for part in self.module.modules():
            nbytes = sum(v.nbytes for _, v in tree_flatten(part.parameters()))
            if isinstance(part, nn.Embedding | nn.QuantizedEmbedding):
                embedding = max(embedding, nbytes)
            elif isinstance(part, SwitchLinear | QuantizedSwitchLinear):
                stacks += nbytes
        own_head = sum(size for name, size in sizes.items() if name not in inside) if inside else 0
        dense = sum(sizes.values()) - embedding - stacks - own_head
        head = own_head or embedding
        each, layers = self.config.experts_share, max(1, len(self.forms))
        return Reads(dense=max(0, dense), stacks=stacks, each=each, head=head, layers=layers)

    def make_cache(self, num_rows: int, *, kv_bits: int = PLAIN) -> AdaptedCache:
        """Raises CacheError for kv_bits below 16."""
        if kv_bits != PLAIN:
            raise CacheError("mlx-lm's caches keep keys and values as they are computed.")
        return AdaptedCache(self, num_rows)

    def forward(
        self,
        tokens: mx.array,
        rows: FlatRows,
        cache: AdaptedCache,
        *,
        certain: bool = False,
        logits_at: LogitsAt = "all",
        taps: Sequence[int] = (),
        images: ImageInput | None = None,
    ) -> Output:
        """As in the contract. Raises ModelError for taps and images, which mlx-lm's modules do not have."""
        if taps or images is not None:
            raise ModelError("Models that run by mlx-lm's code show no layers and read no images.")
        cache.begin(rows, certain=certain)
        parts = [cache.run(r, tokens[rows.starts[r] : rows.starts[r + 1]]) for r in rows.active]
        hidden = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        logits = (
            None if logits_at == "none" else self.head(rows.last(hidden) if logits_at == "last" else hidden)
        )
        return Output(logits=logits, hidden=hidden)

    def embed(self, tokens: mx.array) -> mx.array:
        """Raises ModelError: only heads of other families would ask."""
        raise ModelError(
            "Heads of other families cannot read the embedding of a model that runs by mlx-lm's code."
        )

    def head(self, hidden: mx.array) -> mx.array:
        """(n, H) -> logits (n, V)"""
        return hidden if self._trunk is None else run_head(self.module, self._trunk, hidden[None])[0]
