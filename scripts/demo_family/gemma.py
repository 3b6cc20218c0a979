"""The Gemma 3 text architecture in PyTorch, written for training tiny models on a CPU; parameter names are the HF ones.

Knows full sequences only: no cache, no generation. Architecture after the published Gemma 3 report and
configurations: embeddings scaled by sqrt(hidden), a tied head, norms before and after each part of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .network import CentredNorm, FeedForward, rotate

BRANCH = 0.3  # what each part of a layer adds at the start, beside embeddings of unit size


@dataclass(frozen=True, kw_only=True)
class GemmaShape:
    """Sizes of one model. Every `interval`-th layer sees all tokens before it, the others the last `window`, itself among them."""

    vocab: int = 2048
    hidden: int = 128
    ffn: int = 192
    layers: int = 6
    interval: int = 3
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 64
    window: int = 64
    theta_windowed: float = 10_000.0
    theta_full: float = 1_000_000.0

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % self.interval == 0

    @property
    def embed_scale(self) -> float:
        """sqrt(hidden) rounded to bfloat16, as the architecture has it."""
        return float(torch.tensor(self.hidden**0.5).bfloat16())


GEMMA = GemmaShape()


class Attention(nn.Module):
    """Attention with per-head query and key norms and rotated whole heads, within a window or to all tokens before."""

    def __init__(self, s: GemmaShape, *, full: bool) -> None:
        super().__init__()
        self.s, self.full = s, full
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm, self.k_norm = CentredNorm(s.head_dim), CentredNorm(s.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        (batch, length, _), s = x.shape, self.s
        q, k, v = (p(x).view(batch, length, -1, s.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        theta = s.theta_full if self.full else s.theta_windowed
        at = torch.arange(length, device=x.device)
        rates = theta ** (-torch.arange(0, s.head_dim, 2, device=x.device).float() / s.head_dim)
        turned = at.float()[:, None] * rates
        turned = torch.cat([turned, turned], -1)
        cos, sin = turned.cos().to(q.dtype), turned.sin().to(q.dtype)
        behind = at[:, None] - at
        seen = (behind >= 0) & (self.full | (behind < s.window))
        q, k, v = rotate(q, cos, sin), rotate(k, cos, sin), v.to(q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Layer(nn.Module):
    def __init__(self, s: GemmaShape, *, full: bool) -> None:
        super().__init__()
        self.self_attn = Attention(s, full=full)
        self.mlp = FeedForward(s, partial(F.gelu, approximate="tanh"))
        self.input_layernorm, self.post_attention_layernorm = CentredNorm(s.hidden), CentredNorm(s.hidden)
        self.pre_feedforward_layernorm = CentredNorm(s.hidden)
        self.post_feedforward_layernorm = CentredNorm(s.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x)))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Trunk(nn.Module):
    def __init__(self, s: GemmaShape) -> None:
        super().__init__()
        self.s = s
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        self.layers = nn.ModuleList(Layer(s, full=s.is_full(i)) for i in range(s.layers))
        self.norm = CentredNorm(s.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids) * self.s.embed_scale
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class GemmaModel(nn.Module):
    """Trunk and tied head, with the interface of network.LanguageModel; there is no multi-token head."""

    mtp = None

    def __init__(self, s: GemmaShape) -> None:
        super().__init__()
        self.s = s
        self.model = Trunk(s)
        for name, p in self.named_parameters():
            if "embed_tokens" in name:
                nn.init.normal_(p, std=s.hidden**-0.5)
            elif p.ndim == 2:
                nn.init.normal_(p, std=0.6 * p.shape[1] ** -0.5)
            elif name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                nn.init.constant_(p, BRANCH - 1)

    def lm_head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)
