"""The Gemma 3 text architecture in PyTorch, written for training tiny models on a CPU; parameter names are the HF ones.

Knows full sequences only: no cache, no generation. Windowed layers attend in blocks of one window, each to itself and the block
before it, so their cost grows with the length and not with its square. Architecture after the published Gemma 3 report and
configurations: embeddings scaled by sqrt(hidden), a tied head, norms before and after each part of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .network import CentredNorm, rotate

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


def angles(theta: float, head_dim: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (T, head_dim) for whole heads."""
    rates = theta ** (-torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    turned = positions.float()[:, None] * rates
    turned = torch.cat([turned, turned], -1)
    return turned.cos(), turned.sin()


def attend_windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """q (B, H, T, D), k and v (B, Hkv, T, D) -> (B, H, T, D): causal attention to the last `window` tokens, itself among them."""
    batch, heads, length, dim = q.shape
    kv_heads, padding = k.shape[1], -length % window
    q, k, v = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
    num = (length + padding) // window
    # heads that share keys lie beside one another, as more queries of one block
    q = q.view(batch, kv_heads, heads // kv_heads, num, window, dim).transpose(2, 3)
    q = q.reshape(batch, kv_heads, num, -1, dim)
    k, v = (
        torch.cat([F.pad(b, (0, 0, 0, 0, 1, 0))[:, :, :-1], b], 3)
        for b in (x.view(batch, kv_heads, num, window, dim) for x in (k, v))
    )
    here = torch.arange(window, device=q.device)[:, None]
    there = torch.arange(2 * window, device=q.device)[None]
    seen = (there > here) & (there <= here + window)
    first = torch.arange(num, device=q.device)[:, None, None] == 0
    seen = (seen & ~(first & (there < window))).repeat(1, heads // kv_heads, 1)  # (N, G * W, 2 * W)
    scores = (q @ k.transpose(-1, -2)).float() * dim**-0.5
    weights = torch.softmax(scores.masked_fill(~seen, -1e9), -1).to(v.dtype)
    out = (weights @ v).view(batch, kv_heads, num, heads // kv_heads, window, dim)
    return out.transpose(2, 3).reshape(batch, heads, length + padding, dim)[:, :, :length]


class Attention(nn.Module):
    """Attention with per-head query and key norms and rotated whole heads, behind a window or not."""

    def __init__(self, s: GemmaShape, *, full: bool) -> None:
        super().__init__()
        self.s, self.full = s, full
        self.theta = s.theta_full if full else s.theta_windowed
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm, self.k_norm = CentredNorm(s.head_dim), CentredNorm(s.head_dim)

    def project(self, x: Tensor, offset: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (B, H, T, D) and keys, and values (B, Hkv, T, D); the first token's position is `offset`."""
        batch, length, _ = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.s.head_dim)

        q = self.q_norm(split(self.q_proj(x))).transpose(1, 2)
        k = self.k_norm(split(self.k_proj(x))).transpose(1, 2)
        v = split(self.v_proj(x)).transpose(1, 2)
        cos, sin = angles(self.theta, self.s.head_dim, torch.arange(offset, offset + length, device=x.device))
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        if self.full:
            share = self.s.heads // self.s.kv_heads
            k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = attend_windowed(q, k, v, self.s.window)
        return self.o_proj(out.transpose(1, 2).reshape(*x.shape[:2], -1))


class FeedForward(nn.Module):
    def __init__(self, s: GemmaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.ffn, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.ffn, bias=False)
        self.down_proj = nn.Linear(s.ffn, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, s: GemmaShape, *, full: bool) -> None:
        super().__init__()
        self.self_attn = Attention(s, full=full)
        self.mlp = FeedForward(s)
        self.input_layernorm, self.post_attention_layernorm = CentredNorm(s.hidden), CentredNorm(s.hidden)
        self.pre_feedforward_layernorm = CentredNorm(s.hidden)
        self.post_feedforward_layernorm = CentredNorm(s.hidden)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output, given what its attention made of its input."""
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(x, self.self_attn(self.input_layernorm(x)))


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

    def compile_layers(self) -> None:
        """Compile each layer on its own; see network.LanguageModel."""
        torch._dynamo.config.recompile_limit = 64
        for layer in self.model.layers:
            layer.compile(dynamic=False)
