"""Layers of Gemma models over the flat token axis: attention, gated MLP, experts, inputs of a layer's own.

Parameter names are those that mlx-lm writes; norm weights are stored as factors (Gemma 3's zero-centred ones with 1 added). Knows arrays
and shapes; knows no rows, no caches, no order of layers.
"""

from __future__ import annotations

import math
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxspec.kernels.activations import gated
from mlxspec.models.gemma_config import GemmaConfig, LayerShape, RotaryShape
from mlxspec.models.layers import FusedLinear, Rotary, rms_norm, rotate, swapped
from mlxspec.models.mlp import GatedMlp, make_experts_run

_GELU = 2.0 * math.sqrt(2.0 / math.pi)


@partial(mx.compile, shapeless=True)
def _gelu_inner(x: mx.array) -> mx.array:
    return _GELU * (x + 0.044715 * (x * x * x))


def gelu(x: mx.array) -> mx.array:
    """The tanh form: 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3) is x sigmoid(2 u)."""
    return gated(x, _gelu_inner(x))


def geglu(gate: mx.array, up: mx.array) -> mx.array:
    """gelu(gate) up"""
    return gelu(gate) * up


def add(x: mx.array, y: mx.array) -> mx.array:
    """x + y; float16, whose range these models leave, is clipped instead of becoming infinite."""
    if x.dtype != mx.float16:
        return x + y
    most = mx.finfo(mx.float16).max
    return mx.clip(x.astype(mx.float32) + y.astype(mx.float32), -most, most).astype(mx.float16)


class GemmaRotary(Rotary):
    """Angles for all pairs of a head; pairs that are not rotated have angle 0."""

    def __init__(self, shape: RotaryShape) -> None:
        pairs = np.arange(shape.head_dim // 2, dtype=np.float64)
        frequencies = shape.scaling.apply(shape.theta ** (-2 * pairs / shape.head_dim), shape.theta)
        super().__init__(np.where(pairs < shape.num_pairs, frequencies, 0.0), shape.scaling.amplitude)


class GemmaAttention(nn.Module):
    """Attention with per-head norms; a layer with a `source` has queries only."""

    def __init__(self, c: GemmaConfig, shape: LayerShape) -> None:
        super().__init__()
        self._c, self._shape = c, shape
        kv = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * shape.head_dim, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim)
        if shape.source is None:
            self.k_proj = nn.Linear(c.hidden_size, kv, bias=False)
            self.k_norm = nn.RMSNorm(shape.head_dim)
            if not shape.keys_are_values:
                self.v_proj = nn.Linear(c.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(c.num_heads * shape.head_dim, c.hidden_size, bias=False)

    def fuse(self) -> None:
        names = [n for n in ("q_proj", "k_proj", "v_proj") if n in self]
        self.qkv = FusedLinear([self[n] for n in names])
        self.out = FusedLinear([self.o_proj])
        for name in (*names, "o_proj"):
            delattr(self, name)

    def project(self, x: mx.array, cos: mx.array, sin: mx.array) -> tuple[mx.array, ...]:
        """x (N, H) -> queries (N, Hq, D) and, unless they are another layer's, keys and values (N, Hkv, D); all as attention takes them."""
        eps, dim = self._c.rms_eps, self._shape.head_dim

        def turned(heads: mx.array, norm: nn.RMSNorm) -> mx.array:
            normed = rms_norm(heads, norm.weight, eps)
            return rotate(normed, swapped(normed), cos, sin).astype(x.dtype)

        q, *kv = (part.reshape(x.shape[0], -1, dim) for part in self.qkv.split(x))
        q = turned(q, self.q_norm)
        if not kv:
            return (q,)
        k, v = kv[0], kv[-1]
        if self._c.norms_values:
            v = mx.fast.rms_norm(v, None, eps)
        return q, turned(k, self.k_norm), v


class Router(nn.Module):
    """Which experts a token goes to, and with which weights."""

    def __init__(self, c: GemmaConfig) -> None:
        super().__init__()
        self._c = c
        self.proj = nn.Linear(c.hidden_size, c.num_experts, bias=False)
        self.scale = mx.ones(c.hidden_size)
        self.per_expert_scale = mx.ones(c.num_experts)

    def fuse(self) -> None:
        self.input_scale = self.scale * self._c.hidden_size**-0.5
        del self.scale

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x (N, H) -> experts (N, k) and weights (N, k) in x's dtype. Softmax over the chosen is softmax over all, renormalised."""
        c = self._c
        scores = self.proj(rms_norm(x, self.input_scale, c.rms_eps))
        k = c.num_experts_per_token
        chosen = mx.argpartition(scores, kth=-k, axis=-1)[..., -k:]
        weights = mx.softmax(mx.take_along_axis(scores, chosen, axis=-1), axis=-1, precise=True)
        return chosen, weights * self.per_expert_scale[chosen].astype(weights.dtype)


class GeGlu(nn.Module):
    """The experts' activation, in the order of arguments in which SwitchGLU gives them."""

    def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
        return gelu(gate) * x


class Experts(nn.Module):
    """Top-k of many small MLPs."""

    def __init__(self, c: GemmaConfig) -> None:
        super().__init__()
        from mlx_lm.models.switch_layers import SwitchGLU  # slow to import, and only experts need it

        self.switch_glu = SwitchGLU(c.hidden_size, c.expert_size, c.num_experts, activation=GeGlu())

    def __call__(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        return (self.switch_glu(x, chosen) * weights[..., None]).sum(axis=-2).astype(x.dtype)


class GemmaDecoderLayer(nn.Module):
    """Attention and MLP, each between two norms and added to the residual stream."""

    def __init__(self, c: GemmaConfig, shape: LayerShape) -> None:
        super().__init__()
        self._c = c
        self.self_attn = GemmaAttention(c, shape)
        self.mlp = GatedMlp(c.hidden_size, shape.intermediate_size, geglu)
        norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
        for name in norms:
            self[f"{name}_layernorm"] = nn.RMSNorm(c.hidden_size)
        if c.num_experts:
            self.router, self.experts = Router(c), Experts(c)
            for name in (
                "post_feedforward_layernorm_1",
                "post_feedforward_layernorm_2",
                "pre_feedforward_layernorm_2",
            ):
                self[name] = nn.RMSNorm(c.hidden_size)
        if c.per_layer_size:
            self.per_layer_input_gate = nn.Linear(c.hidden_size, c.per_layer_size, bias=False)
            self.per_layer_projection = nn.Linear(c.per_layer_size, c.hidden_size, bias=False)
            self.post_per_layer_input_norm = nn.RMSNorm(c.hidden_size)
        if c.scales_layers:
            self.layer_scalar = mx.ones(1)

    def fuse(self) -> None:
        self.self_attn.fuse()
        self.mlp.fuse()
        if "experts" in self:
            self.router.fuse()
            make_experts_run(self.experts)
        for name in ("per_layer_input_gate", "per_layer_projection"):
            if name in self:
                self[name] = FusedLinear([self[name]])

    def enter(self, x: mx.array) -> mx.array:
        """What attention sees."""
        return self._norm("input_layernorm", x)

    def leave(self, x: mx.array, attended: mx.array, own_input: mx.array | None) -> mx.array:
        """Residual stream after this layer, given what attention found (N, Hq * D) and the layer's own input (N, P)."""
        x = add(x, self._norm("post_attention_layernorm", self.self_attn.out(attended)))
        x = add(x, self._norm("post_feedforward_layernorm", self._feed_forward(x)))
        if own_input is not None:
            gated = gelu(self.per_layer_input_gate(x)) * own_input
            x = add(x, self._norm("post_per_layer_input_norm", self.per_layer_projection(gated)))
        return x * self.layer_scalar.astype(x.dtype) if self._c.scales_layers else x

    def _feed_forward(self, x: mx.array) -> mx.array:
        out = self.mlp(self._norm("pre_feedforward_layernorm", x))
        if not self._c.num_experts:
            return out
        out = self._norm("post_feedforward_layernorm_1", out)
        found = self.experts(self._norm("pre_feedforward_layernorm_2", x), *self.router(x))
        return out + self._norm("post_feedforward_layernorm_2", found)

    def _norm(self, name: str, x: mx.array) -> mx.array:
        return rms_norm(x, self[name].weight, self._c.rms_eps)
