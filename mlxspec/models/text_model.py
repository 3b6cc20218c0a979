"""The parts of text models around their layers, the same in every family: the embedding, the head, and logits where they are asked for.

Parameter names are those that mlx-lm writes, behind `language_model.`. Knows no layers and no caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import LogitsAt
from mlxspec.models.gate import AdapterGate
from mlxspec.models.layers import FusedLinear, Parts, compute_dtype, project


class TextSizes(Protocol):
    """The sizes that the config of every family has. tied: whether the embedding is also the language-model head; max_context in tokens."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def max_context(self) -> int: ...
    @property
    def tied(self) -> bool: ...


def text_stack(sizes: TextSizes, layers: Sequence[nn.Module]) -> Parts:
    """Return a module with the embedding, these layers and the final norm."""
    return Parts(
        embed_tokens=nn.Embedding(sizes.vocab_size, sizes.hidden_size),
        layers=list(layers),
        norm=nn.RMSNorm(sizes.hidden_size),
    )


class TextModel(nn.Module):
    """The base class of mlxspec's text models, whose subclasses have the forward. stack: has `embed_tokens`, `layers` with a method `fuse`,
    and `norm`. gate: the adapters of the rows of a forward, which `forward` sets."""

    def __init__(self, stack: nn.Module, sizes: TextSizes) -> None:
        super().__init__()
        self.gate = AdapterGate()
        self.language_model = Parts(model=stack)
        if not sizes.tied:
            self.language_model.lm_head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)
        self.vocab_size, self.hidden_size, self.max_context = (
            sizes.vocab_size,
            sizes.hidden_size,
            sizes.max_context,
        )

    @property
    def num_layers(self) -> int:
        """Return the number of decoder layers."""
        return len(self.language_model.model.layers)

    def fuse(self) -> None:
        """Join projections of the same input, after loading. Call this once."""
        for layer in self.language_model.model.layers:
            layer.fuse()
        self._fuse_head()

    def _fuse_head(self) -> None:
        if "lm_head" in self.language_model:
            self.language_model.lm_head = FusedLinear([self.language_model.lm_head])

    @property
    def dtype(self) -> mx.Dtype:
        """Return the dtype in which the model computes: that of the embedding's output."""
        return compute_dtype(self.language_model.model.embed_tokens)

    @property
    def embedding(self) -> nn.Module:
        """Return the embedding module, without the factor by which some models multiply its output."""
        return self.language_model.model.embed_tokens

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the embeddings (N, H) of tokens (N,) int32."""
        return self.embedding(tokens)

    def head(self, hidden: mx.array) -> mx.array:
        """Return the logits (N, V) of hidden states (N, H) after the final norm."""
        if "lm_head" in self.language_model:
            return self.capped(self.language_model.lm_head(hidden))
        return self.capped(project(self.language_model.model.embed_tokens, hidden))

    @property
    def head_module(self) -> nn.Module:
        """Return the module with the weight of the language-model head: a linear module, or the embedding."""
        return self.language_model.get("lm_head", self.language_model.model.embed_tokens)

    def capped(self, logits: mx.array) -> mx.array:
        """Return the model's logits from products with rows of its language-model head, capped where the model does so."""
        return logits

    def _logits(self, hidden: mx.array, rows: FlatRows, logits_at: LogitsAt) -> mx.array | None:
        if logits_at in ("none", "end"):
            return None
        return self.head(rows.last(hidden) if logits_at == "last" else hidden)
