"""The multi-token-prediction head of Qwen3.5 models: one full-attention layer that predicts the token after next.

The cell of token x_p takes the token and the target's hidden h_{p-1} (after the final norm) and predicts x_{p+1}; x_0 has no cell:
    z = fc([norm_e(embed(x_p)) ; norm_h(h_{p-1})]);  h' = norm(layer(z));  logits = head(h')
A cell has the rotary position of the token before x_p, so in texts without images positions count cells. At an image token the cell takes
the image's row in place of embed(x_p).
Further steps of one draft feed h' back in place of h. Embedding and language-model head are the target's.
Knows its weights and its cache; knows nothing of drafts, rows' histories or acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.models.cell_head import CellHead
from mlxspec.models.layers import rms_norm, swapped
from mlxspec.models.qwen3_5 import Qwen35, qwen_rotary
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.qwen3_5_layers import Qwen35Attention, Qwen35DecoderLayer

NORMS = (
    "before fc",
    "layer",
    "queries and keys",
    "last",
)  # groups of norms that converters shift or leave as they are


class Qwen35Mtp(CellHead):
    """The module of a Qwen3.5 MTP head. Parameter names are the checkpoint's without the prefix `mtp.`. Norm weights are the factors 1 + w,
    where the original checkpoint stores w."""

    def __init__(self, config: Qwen35Config, target: Qwen35) -> None:
        super().__init__(config, target, qwen_rotary(config))
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(config.hidden_size)
        self.pre_fc_norm_hidden = nn.RMSNorm(config.hidden_size)
        self.layers = [Qwen35DecoderLayer(config, Qwen35Attention(config))]
        self.norm = nn.RMSNorm(config.hidden_size)

    @property
    def dtype(self) -> mx.Dtype:
        """Return the dtype in which the head computes, which is the target's."""
        return self.target.dtype

    def norms(self) -> dict[str, list[mx.array]]:
        """Return the norm weights of each group of NORMS, as `set_norms` takes them. The head must be fused."""
        found = {group: [norm.weight for norm in norms] for group, norms in self._norms.items()}
        return found | {"queries and keys": [self.layers[0].self_attn.qk_norm]}

    def set_norms(self, norms: Mapping[str, list[mx.array]], shifts: Mapping[str, float]) -> None:
        """Set the norm weights to those that `norms` returned, with a number added to the groups that `shifts` names."""
        for group, modules in self._norms.items():
            by = shifts.get(group, 0.0)
            for module, weight in zip(modules, norms[group], strict=True):
                module.weight = weight.astype(mx.float32) + by if by else weight
        attention = self.layers[0].self_attn
        by, (weight,) = shifts.get("queries and keys", 0.0), norms["queries and keys"]
        attention.qk_norm = attention.shifted(weight, by) if by else weight
        attention.qk_norm_swapped = swapped(attention.qk_norm)
        self._runners.clear()  # weights are built into what is compiled

    @property
    def _norms(self) -> dict[str, list[nn.RMSNorm]]:
        layer = self.layers[0]
        return {
            "before fc": [self.pre_fc_norm_embedding, self.pre_fc_norm_hidden],
            "layer": [layer.input_layernorm, layer.post_attention_layernorm],
            "last": [self.norm],
        }

    def head(self, hidden: mx.array) -> mx.array:
        """Return the logits (N, V) of the MTP head's hidden states (N, H)."""
        return self.target.head(hidden)  # type: ignore[no-any-return]

    def embed(self, tokens: mx.array) -> mx.array:
        return self.target.embed(tokens)  # type: ignore[no-any-return]

    def before(
        self, embedded: mx.array, hidden: mx.array, cos: mx.array, sin: mx.array
    ) -> tuple[mx.array, Any]:
        eps = self.config.rms_eps
        e = rms_norm(embedded, self.pre_fc_norm_embedding.weight, eps)
        h = rms_norm(hidden, self.pre_fc_norm_hidden.weight, eps)
        x = self.fc(mx.concatenate([e, h], axis=-1))
        return x, self.layers[0].before_attention(x, cos, sin)

    def after(self, x: mx.array, attended: mx.array, gate: mx.array | None) -> mx.array:
        x = self.layers[0].after_attention(x, attended, gate)
        return rms_norm(x, self.norm.weight, self.config.rms_eps)
