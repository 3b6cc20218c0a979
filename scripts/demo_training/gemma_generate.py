"""One token a step of a Gemma network, with key/value buffers: the counterpart of generate.Decoder.

Knows one batch of rows in lock-step; a windowed layer keeps all keys and looks at the last ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .gemma_network import Attention, GemmaModel


class _Buffers:
    def __init__(self, attention: Attention, rows: int, capacity: int) -> None:
        s = attention.s
        self.attention = attention
        self.keys = torch.zeros(rows, s.kv_heads, capacity, s.head_dim)
        self.values = torch.zeros_like(self.keys)

    def step(self, x: Tensor, position: int) -> Tensor:
        """x (B, H) -> (B, H), what attention at `position` makes of it."""
        a = self.attention
        q, k, v = a.project(x[:, None], position)
        self.keys[:, :, position], self.values[:, :, position] = k[:, :, 0], v[:, :, 0]
        first = 0 if a.full else max(0, position - a.s.window + 1)
        seen = slice(first, position + 1)
        out = F.scaled_dot_product_attention(
            q, self.keys[:, :, seen], self.values[:, :, seen], enable_gqa=True
        )
        return a.o_proj(out.reshape(x.shape[0], -1))


class GemmaDecoder:
    """One batch of rows."""

    def __init__(self, model: GemmaModel, rows: int, capacity: int) -> None:
        self.model, self.position = model, 0
        self.layers = [(layer, _Buffers(layer.self_attn, rows, capacity)) for layer in model.model.layers]

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """ids (B,) -> logits (B, V) for the token after them."""
        trunk = self.model.model
        x = trunk.embed_tokens(ids) * trunk.s.embed_scale
        for layer, buffers in self.layers:
            x = layer.finish(x, buffers.step(layer.input_layernorm(x), self.position))
        self.position += 1
        return self.model.lm_head(trunk.norm(x))
