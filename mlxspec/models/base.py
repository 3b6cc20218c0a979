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
    """The results of a forward, all lazy. logits: (N, V) for logits_at "all", (active rows, V) for "last" (each row's last token), None for
    "none" and "end". hidden: (N, H) after the final norm, the input of the language-model head and of an MTP head; for "end" only of each
    active row's last token. taps: for each requested layer its residual stream (N, H), by layer number. is_warm: whether the forward takes
    as long as the next one of its shape, as nothing is compiled in it or will be later."""

    logits: mx.array | None
    hidden: mx.array
    taps: dict[int, mx.array] = field(default_factory=dict)
    is_warm: bool = True


class Model(Protocol):
    """The interface of a target or draft model."""

    vocab_size: int
    hidden_size: int
    max_context: int

    @property
    def num_layers(self) -> int:
        """Return the number of layers that `taps` can name, from 0 on."""
        ...

    @property
    def dtype(self) -> mx.Dtype:
        """Return the dtype of hidden states and logits."""
        ...

    @property
    def attention_heads(self) -> Sequence[Heads]:
        """Return the shapes of the attention heads of layers that attend to the whole context."""
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
        """Run `tokens` (N,) int32 after the committed tokens of every row of `cache`, leave the cache's transaction open, and return the
        results.

        The caller commits or aborts. rows: how the N tokens are divided among rows. certain: whether all tokens will be committed, so that
        states may be advanced at once (prefill). logits_at: the tokens whose logits are computed, see Output. taps: layers whose residual
        stream is returned. images: given only where some of the tokens are image tokens; all tokens are certain then.
        """
        ...

    def make_cache(self, num_rows: int, *, kv_bits: int = PLAIN) -> ModelCache:
        """Return an empty cache of `num_rows` rows. kv_bits: bits of keys and values in layers that attend to the whole context: 4, 8, or
        16 for the computed values unchanged. Raises CacheError where heads cannot be kept in this number of bits, which `check_kv_bits`
        finds before."""
        ...

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the embeddings (N, H) of tokens (N,) int32."""
        ...

    def head(self, hidden: mx.array) -> mx.array:
        """Return the logits (N, V) of hidden states (N, H) after the final norm."""
        ...
