"""Decoder layers of Gemma models: mlx-lm's, each made to the shape that the config gives it.

Norm weights are factors (Gemma 3's zero-centred ones with 1 added). Importing this imports mlx-lm, which is slow.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import gemma3_text, gemma4_text

from mlxspec.models.adapted.fused import join_products
from mlxspec.models.cut_layers import Cut
from mlxspec.models.gemma_config import GemmaConfig, LayerShape, RotaryShape
from mlxspec.models.layers import AdaptedLinear, multiply_here
from mlxspec.models.mlp import make_experts_run


class Turn(nn.Module):
    """The rotation of a layer's heads by rotary positions. A pair that is not rotated has an infinite period."""

    def __init__(self, shape: RotaryShape) -> None:
        super().__init__()
        pairs = np.arange(shape.head_dim // 2, dtype=np.float64)
        frequencies = shape.scaling.apply(shape.theta ** (-2 * pairs / shape.head_dim), shape.theta)
        turns = pairs < shape.num_pairs
        self._periods = mx.array(np.where(turns, 1.0 / frequencies, np.inf).astype(np.float32))
        lengths = np.tile(np.where(turns, shape.scaling.amplitude, 1.0), 2).astype(np.float32)
        self._lengths = None if shape.scaling.amplitude == 1 else mx.array(lengths)

    def __call__(self, x: mx.array, offset: mx.array | int = 0) -> mx.array:
        """Return x (N, heads, L, D) rotated by its positions, which count from `offset` on: one number, or one for each of the N."""
        where: dict[str, Any] = {"base": None, "scale": 1.0, "offset": offset, "freqs": self._periods}
        out = mx.fast.rope(x, x.shape[-1], traditional=False, **where)
        return out if self._lengths is None else out * self._lengths.astype(x.dtype)


class GemmaExperts(gemma4_text.Experts):
    """mlx-lm's experts with an output in the dtype of the input: without a GPU their products are float32."""

    def __call__(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        out: mx.array = super().__call__(x, chosen, weights)
        return out.astype(x.dtype)


def decoder_layer(c: GemmaConfig, shape: LayerShape) -> nn.Module:
    """Return a decoder layer of this shape, without weights."""
    layer: Any = (_layer_of_3 if c.generation == 3 else _layer_of_4)(c, shape)
    layer.self_attn.scale, layer.self_attn.rope = c.scale, Turn(shape.rotary)
    for part in layer.modules():
        for name, child in list(part.items()):
            if isinstance(child, gemma3_text.RMSNorm):
                part[name] = nn.RMSNorm(child.weight.shape[0], child.eps)
    return layer  # type: ignore[no-any-return]


def _sizes(c: GemmaConfig, shape: LayerShape) -> dict[str, Any]:
    return {
        "hidden_size": c.hidden_size,
        "num_hidden_layers": 1,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": c.num_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": c.rms_eps,
        "num_key_value_heads": shape.num_kv_heads,
    }


def _layer_of_3(c: GemmaConfig, shape: LayerShape) -> nn.Module:
    args = gemma3_text.ModelArgs(model_type="gemma3_text", **_sizes(c, shape))
    return gemma3_text.TransformerBlock(args, 0)


def _layer_of_4(c: GemmaConfig, shape: LayerShape) -> nn.Module:
    args = gemma4_text.ModelArgs(
        **_sizes(c, shape),
        layer_types=["full_attention"],  # windows are the caches'
        global_head_dim=shape.head_dim,
        num_global_key_value_heads=shape.num_kv_heads,
        num_kv_shared_layers=0 if shape.source is None else 1,
        rope_parameters={},
        attention_k_eq_v=shape.keys_are_values,
        hidden_size_per_layer_input=c.per_layer_size,
        enable_moe_block=c.num_experts > 0,
        num_experts=c.num_experts,
        top_k_experts=c.num_experts_per_token,
        moe_intermediate_size=c.expert_size,
    )
    layer: Any = gemma4_text.DecoderLayer(args, 0)
    if c.num_experts:
        layer.experts = GemmaExperts(args)
    return layer  # type: ignore[no-any-return]


def call_layer(layer: Any, x: mx.array, cut: Cut, own_input: mx.array | None = None) -> mx.array:
    """Call a layer as mlx-lm's model of its generation does, and return its output (N, 1, H). cut: the placeholder for its cache. own_input
    (N, 1, P): the layer's additional input, or None."""
    if isinstance(layer, gemma3_text.TransformerBlock):
        return layer(x, None, cut)  # type: ignore[no-any-return]
    if layer.self_attn.has_kv:
        return layer(x, None, cut, per_layer_input=own_input)[0]  # type: ignore[no-any-return]
    keys = cut.held, cut.held
    return layer(x, shared_kv=keys, offset=cut.offset, per_layer_input=own_input)[0]  # type: ignore[no-any-return]


def fuse_layer(layer: Any, c: GemmaConfig, shape: LayerShape, dtype: mx.Dtype) -> None:
    """Join projections of the same input, and cast norms and factors to `dtype`, after loading. Call this once."""
    for part in layer.modules():
        if not isinstance(part, AdaptedLinear):
            for name, value in list(part.items()):
                is_vector = isinstance(value, mx.array) and value.ndim == 1
                # periods of rotary positions are no parameters, and 16 bits are too few for them
                if is_vector and not name.startswith("_") and mx.issubdtype(value.dtype, mx.floating):
                    part[name] = value.astype(dtype)
    if c.num_experts:
        make_experts_run(layer.experts)
    x, keys = (
        mx.zeros((1, 2, c.hidden_size), dtype),
        mx.zeros((1, shape.num_kv_heads, 2, shape.head_dim), dtype),
    )
    given: dict[str, Any] = {}
    if c.generation == 4:
        given = {"shared_kv": None if shape.source is None else (keys, keys), "offset": 0}
        given["per_layer_input"] = mx.zeros((1, 2, c.per_layer_size), dtype) if c.per_layer_size else None
    join_products(layer, lambda: layer(x, **given))
    multiply_here(layer)
