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

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.quantized import PLAIN, attention_cache
from mlxspec.kernels.flat import FlatRows
from mlxspec.models.base import LogitsAt, Output
from mlxspec.models.image_rows import ImageInput
from mlxspec.models.layers import FusedLinear, rms_norm, swapped
from mlxspec.models.qwen3_5 import Qwen35, after_attention, before_attention, qwen_rotary, turns_of
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.qwen3_5_layers import Qwen35DecoderLayer
from mlxspec.models.runners import Runners
from mlxspec.platform import device

NORMS = (
    "before fc",
    "layer",
    "queries and keys",
    "last",
)  # groups of norms that converters shift or leave as they are
_OF_THE_HEAD = 30  # kernels that Metal launches for a token, for `device.start`


class Qwen35Mtp(nn.Module):
    """The head. Parameter names are the checkpoint's behind `mtp.`; norm weights are stored shifted (1 + w). bits_at_load: to how many bits
    its matrices were quantized when it was loaded, None where they are as stored."""

    def __init__(self, config: Qwen35Config, target: Qwen35) -> None:
        super().__init__()
        self.config, self._target = config, (target,)  # in a tuple: the target's parameters are not ours
        self.rotary = qwen_rotary(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(config.hidden_size)
        self.pre_fc_norm_hidden = nn.RMSNorm(config.hidden_size)
        self.layers = [Qwen35DecoderLayer(config, linear=False)]
        self.norm = nn.RMSNorm(config.hidden_size)
        self._runners = Runners()
        self.bits_at_load: int | None = None

    def fuse(self) -> None:
        """Join projections of the same input, after loading. Call once."""
        self.layers[0].fuse()
        self.fc = FusedLinear([self.fc])

    def norms(self) -> dict[str, list[mx.array]]:
        """The weights of each group of NORMS, after fusing: what `set_norms` takes."""
        found = {group: [norm.weight for norm in norms] for group, norms in self._norms.items()}
        return found | {"queries and keys": [self.layers[0].self_attn.qk_norm]}

    def set_norms(self, norms: Mapping[str, list[mx.array]], shifts: Mapping[str, float]) -> None:
        """Weights as `norms` gave them, and `shifts` added to those of the groups that it names."""
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

    @property
    def target(self) -> Qwen35:
        return self._target[0]

    @property
    def dtype(self) -> mx.Dtype:
        """Compute dtype: the target's."""
        return self._target[0].dtype

    def make_cache(self, num_rows: int, *, kv_bits: int = PLAIN) -> ModelCache:
        """kv_bits: as in models.base."""
        c = self.config
        layer = attention_cache(c.num_kv_heads, c.head_dim, self._target[0].dtype, num_rows, kv_bits)
        return ModelCache([layer], num_rows)

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
        """tokens (N,) int32 with the hidden (N, H) of the token before each; leaves the transaction open. certain, images: as in
        models.base."""
        layer = self.layers[0]
        places, num_cold = cache.begin(rows, certain=certain), self._runners.num_cold
        cos, sin = self.rotary.table(turns_of(self.rotary, places, images))
        embedded = self.embed(tokens)
        if images is not None:
            embedded = images.placed(embedded)
        x, (q, k, v, gate) = self._runners.get("before", self.before, rows)(embedded, hidden, cos, sin)
        device.start(
            x, num_launches=_OF_THE_HEAD
        )  # so that the device need not wait until all of the forward is built
        attended = layer.self_attn.core(q, k, v, places, cache.attention(0))
        out = self._runners.get("after", self.after, rows)(x, attended, gate)
        seen = rows.last(out) if logits_at == "last" else out
        logits = None if logits_at == "none" else self.head(seen)
        return Output(logits=logits, hidden=out, is_warm=self._runners.num_cold == num_cold)

    def head(self, hidden: mx.array) -> mx.array:
        """The head's own hiddens (N, H) -> logits (N, V)"""
        return self._target[0].head(hidden)

    def embed(self, tokens: mx.array) -> mx.array:
        """(N,) -> (N, H)"""
        return self._target[0].embed(tokens)

    def before(
        self, embedded: mx.array, hidden: mx.array, cos: mx.array, sin: mx.array
    ) -> tuple[mx.array, Any]:
        eps = self.config.rms_eps
        e = rms_norm(embedded, self.pre_fc_norm_embedding.weight, eps)
        h = rms_norm(hidden, self.pre_fc_norm_hidden.weight, eps)
        x = self.fc(mx.concatenate([e, h], axis=-1))
        return x, before_attention(self.layers[0], x, cos, sin)

    def after(self, x: mx.array, attended: mx.array, gate: mx.array) -> mx.array:
        x = after_attention(self.layers[0], x, attended, gate)
        return rms_norm(x, self.norm.weight, self.config.rms_eps)
