"""The interface of models: a forward over the flat token axis, a factory of caches, a size.

Knows the shape of the contract, no architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import mlx.core as mx

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.quantized import PLAIN
from mlxspec.kernels.attention import Heads
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.image_rows import ImageInput

LogitsAt = Literal["all", "last", "none", "end"]


@dataclass(frozen=True, kw_only=True)
class Output:
    """The results of a forward, all lazy. logits: (N, V) for "all", (active rows, V) for "last" (each row's last token), None for "none"
    and "end". hidden: (N, H), after the final norm: the input of the language-model head and of an MTP head; for "end" of each active row's
    last token alone, so that the last layer need not compute the others. taps: layer index -> (N, H), the residual
    stream after that layer, for the layers requested. is_warm: whether it takes as long as the next one of its shape will: nothing compiles
    in it, or is to be compiled later."""

    logits: mx.array | None
    hidden: mx.array
    taps: dict[int, mx.array] = field(default_factory=dict)
    is_warm: bool = True


class Model(Protocol):
    """A target or draft model."""

    vocab_size: int
    hidden_size: int
    max_context: int

    @property
    def num_layers(self) -> int:
        """Number of layers that `taps` can name, from 0 on."""
        ...

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of hiddens and logits."""
        ...

    @property
    def attention_heads(self) -> Sequence[Heads]:
        """Heads of the layers that attend to a whole context."""
        ...

    def forward(
        self,
        tokens: mx.array,
        rows: FlatRows,
        cache: ModelCache,
        *,
        certain: bool = False,
        logits_at: LogitsAt = "all",
        taps: Sequence[int] = (),
        images: ImageInput | None = None,
    ) -> Output:
        """Run `tokens` (N,) int32 behind the committed tokens of every row of `cache` and leave the transaction open.

        The caller commits or aborts. `certain`: all tokens stay, so states may be advanced at once (prefill). images: given where
        some of the tokens are image tokens, never else; then all are certain.
        """
        ...

    def make_cache(self, num_rows: int, *, kv_bits: int = PLAIN) -> ModelCache:
        """kv_bits: in how many bits layers that attend to the whole context keep keys and values: 4, 8, or 16 for as they are computed.
        Raises CacheError where they cannot; `check_kv_bits` tells before."""
        ...

    def embed(self, tokens: mx.array) -> mx.array:
        """(N,) int32 -> (N, H)"""
        ...

    def head(self, hidden: mx.array) -> mx.array:
        """(N, H) post-final-norm -> logits (N, V)"""
        ...
