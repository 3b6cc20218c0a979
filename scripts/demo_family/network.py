"""The Qwen3.5 text architecture in PyTorch, written for training tiny models on a CPU; parameter names are the HF ones.

Knows full sequences only: no cache, no generation, one dtype policy (autocast outside, float32 for the recurrence).
The Gated DeltaNet runs in chunks (WY form); the unit-triangular system is solved, never inverted by repeated squaring,
which loses float32 as keys correlate. Architecture after the published Qwen3-Next / Qwen3.5 reports and configurations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 32


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one model. Every `interval`-th layer is full attention, the others Gated DeltaNet."""

    vocab: int = 2048
    hidden: int = 192
    ffn: int = 576
    layers: int = 6
    interval: int = 3
    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 64
    linear_heads: int = 4
    linear_key_dim: int = 32
    linear_value_dim: int = 64
    rope_theta: float = 10_000.0
    rotary_fraction: float = 0.25
    mtp: bool = True


TARGET = Shape()
DRAFT = Shape(hidden=128, ffn=320, layers=2, interval=2, heads=2, linear_heads=2, mtp=False)


class CentredNorm(nn.Module):
    """RMS norm with weight 1 + w."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * (1 + self.weight)).to(x.dtype)


class GatedNorm(nn.Module):
    """RMS norm with a plain weight, times silu(gate)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return (y * F.silu(gate.float())).to(gate.dtype)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule over whole sequences: q, k (B, T, H, Dk), v (B, T, H, Dv), log_decay, beta (B, T, H) -> (B, T, H, Dv).

    float32; T is a multiple of CHUNK; q and k already normalised and q scaled.
    """
    batch, length, heads, _ = q.shape
    num_chunks = length // CHUNK

    def split(x: Tensor) -> Tensor:  # (B, T, H, D) -> (B, H, N, C, D)
        return x.reshape(batch, num_chunks, CHUNK, heads, -1).permute(0, 3, 1, 2, 4)

    q, k, v = split(q), split(k), split(v)
    gate = split(log_decay.unsqueeze(-1)).squeeze(-1).cumsum(-1)
    beta = split(beta.unsqueeze(-1))
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (gate.unsqueeze(-1) - gate.unsqueeze(-2)).masked_fill(~lower, -1e9).exp()
    grown = gate.exp().unsqueeze(-1)
    scaled = k * beta
    system = torch.eye(CHUNK, device=q.device) + (scaled @ k.transpose(-1, -2)) * decay * lower.tril(-1)
    right = torch.cat([v * beta, scaled * grown], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    value, key = solved.split([v.shape[-1], k.shape[-1]], -1)
    inside = (q @ k.transpose(-1, -2)) * decay
    q_grown = q * grown
    k_left = (k * (gate[..., -1:] - gate).exp().unsqueeze(-1)).transpose(-1, -2)
    shrink = gate[..., -1].exp()[..., None, None]
    state = q.new_zeros(batch, heads, k.shape[-1], v.shape[-1])
    outputs = []
    for n in range(num_chunks):
        fresh = value[:, :, n] - key[:, :, n] @ state
        outputs.append(q_grown[:, :, n] @ state + inside[:, :, n] @ fresh)
        state = state * shrink[:, :, n] + k_left[:, :, n] @ fresh
    return torch.stack(outputs, 2).permute(0, 2, 3, 1, 4).reshape(batch, length, heads, -1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


class DeltaNet(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.key_width = s.linear_heads * s.linear_key_dim
        self.value_width = s.linear_heads * s.linear_value_dim
        width = 2 * self.key_width + self.value_width
        self.in_proj_qkv = nn.Linear(s.hidden, width, bias=False)
        self.in_proj_z = nn.Linear(s.hidden, self.value_width, bias=False)
        self.in_proj_b = nn.Linear(s.hidden, s.linear_heads, bias=False)
        self.in_proj_a = nn.Linear(s.hidden, s.linear_heads, bias=False)
        self.conv1d = nn.Conv1d(width, width, 4, groups=width, bias=False)
        step = torch.exp(torch.empty(s.linear_heads).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.A_log = nn.Parameter(torch.empty(s.linear_heads).uniform_(1, 16).log())
        self.norm = GatedNorm(s.linear_value_dim)
        self.out_proj = nn.Linear(self.value_width, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.s.linear_heads
        qkv, z = self.in_proj_qkv(x), self.in_proj_z(x).view(batch, length, heads, -1)
        beta = self.in_proj_b(x).float().sigmoid()
        log_decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        taps = self.conv1d.weight[:, 0].to(qkv.dtype)
        padded = F.pad(qkv, (0, 0, 3, 0))
        mixed = sum(padded[:, i : i + length] * taps[:, i] for i in range(4))
        q, k, v = F.silu(mixed).float().split([self.key_width, self.key_width, self.value_width], -1)
        q, k, v = (t.view(batch, length, heads, -1) for t in (q, k, v))
        with torch.autocast(x.device.type, enabled=False):
            out = delta_rule(_unit(q) * self.s.linear_key_dim**-0.5, _unit(k), v, log_decay, beta)
        return self.out_proj(self.norm(out, z).reshape(batch, length, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the first `cos.shape[-1]` dims of x (..., T, D)."""
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-high, low], -1) * sin, kept], -1)


class Attention(nn.Module):
    """Causal attention with per-head query norm, key norm and an output gate; q_proj rows are per head [query | gate]."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim * 2, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm, self.k_norm = CentredNorm(s.head_dim), CentredNorm(s.head_dim)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rotated queries and keys, values (B, H, T, D) and gates (B, T, H*D)."""
        batch, length, _ = x.shape
        s = self.s
        query, gate = self.q_proj(x).view(batch, length, s.heads, 2 * s.head_dim).chunk(2, -1)
        q = self.q_norm(query).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, s.kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, s.kv_heads, -1).transpose(1, 2)
        angles = self.angles_of(length, x.device)
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        share = s.heads // s.kv_heads
        k = rotate(k, cos, sin).repeat_interleave(share, 1)
        return (
            rotate(q, cos, sin),
            k,
            v.to(q.dtype).repeat_interleave(share, 1),
            gate.reshape(batch, length, -1),
        )

    def angles_of(self, length: int, device: torch.device) -> Tensor:
        """Radians (length, rotary dims), or of a shape that goes with (B, H, length, rotary dims)."""
        s = self.s
        dims = int(s.head_dim * s.rotary_fraction)
        rates = s.rope_theta ** (-torch.arange(0, dims, 2, device=device).float() / dims)
        angles = torch.arange(length, device=device).float()[:, None] * rates
        return torch.cat([angles, angles], -1)

    def join(self, out: Tensor, gate: Tensor) -> Tensor:
        batch, _, length, _ = out.shape
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1) * torch.sigmoid(gate))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, gate = self.project(x)
        return self.join(F.scaled_dot_product_attention(q, k, v, is_causal=True), gate)


class FeedForward(nn.Module):
    """Gated MLP; `activation` is silu for Qwen and the tanh form of gelu for Gemma."""

    def __init__(self, s: Shape, activation: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(s.hidden, s.ffn, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.ffn, bias=False)
        self.down_proj = nn.Linear(s.ffn, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, s: Shape, *, attention: bool) -> None:
        super().__init__()
        self.attention = attention
        if attention:
            self.self_attn = Attention(s)
        else:
            self.linear_attn = DeltaNet(s)
        self.mlp = FeedForward(s)
        self.input_layernorm, self.post_attention_layernorm = CentredNorm(s.hidden), CentredNorm(s.hidden)

    def forward(self, x: Tensor) -> Tensor:
        mixer = self.self_attn if self.attention else self.linear_attn
        x = x + mixer(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        self.layers = nn.ModuleList(Layer(s, attention=(i + 1) % s.interval == 0) for i in range(s.layers))
        self.norm = CentredNorm(s.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Mtp(nn.Module):
    """The multi-token head: from hidden t and token t+1 to the hidden that predicts token t+2."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * s.hidden, s.hidden, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = CentredNorm(s.hidden), CentredNorm(s.hidden)
        self.layers = nn.ModuleList([Layer(s, attention=True)])
        self.norm = CentredNorm(s.hidden)

    def forward(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        both = self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)
        return self.norm(self.layers[0](self.fc(torch.cat(both, -1))))


class LanguageModel(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.model = Trunk(s)
        self.mtp = Mtp(s) if s.mtp else None
        self.lm_head = nn.Linear(s.hidden, s.vocab, bias=False)
        for name, p in self.named_parameters():
            if "embed_tokens" in name:
                nn.init.normal_(p, std=1.0)  # a small one would bury which token it was
            elif "lm_head" in name:
                nn.init.normal_(p, std=0.02)
            elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                nn.init.zeros_(p)
            elif p.ndim == 2:
                nn.init.normal_(p, std=0.6 * p.shape[1] ** -0.5)
