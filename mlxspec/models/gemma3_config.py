"""Shape of a Gemma 3 text model, read from config.json and checked.

Knows the dialects of the config (rope_parameters by kind of layer, or rope_theta, rope_local_base_freq and rope_scaling; layer_types, or
sliding_window_pattern) and the defaults that published multimodal configs leave out; knows no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlxspec.errors import ModelError
from mlxspec.models.config_values import EVERYWHERE, Keys, Values, short
from mlxspec.models.gemma_config import (
    TEXT_ONLY,
    GemmaConfig,
    LayerShape,
    RotaryShape,
    parts,
    rotary_descriptions,
    tied,
    unread_keys,
    windowed_layers,
)

TEXT_KEYS = Keys(
    idle=EVERYWHERE,
    only={**TEXT_ONLY, "final_logit_softcapping": (), "use_bidirectional_attention": (False, True)},
)


def gemma3_config(config: Mapping[str, Any]) -> GemmaConfig:
    """Raises ModelError naming the first key that is missing, out of range or not supported."""
    outer, get = parts(config)
    TEXT_KEYS.check(get)
    hidden_size, head_dim = get.size("hidden_size"), get.size("head_dim", 256)
    (windowed, full), ropes = _rotaries(get, head_dim)
    window, num_kv_heads = get.size("sliding_window", 4096), get.size("num_key_value_heads", 4)
    intermediate_size = get.size("intermediate_size")
    both_ways = get.value("use_bidirectional_attention") is True
    if both_ways:
        window = window // 2 + 1  # the config counts both sides
    pattern = get.size("sliding_window_pattern", get.size("_sliding_window_pattern", 6))
    made = GemmaConfig(
        vocab_size=get.size("vocab_size", outer.size("vocab_size", 262208)),
        hidden_size=hidden_size,
        layers=tuple(
            LayerShape(
                window=window if is_windowed else None,
                head_dim=head_dim,
                num_kv_heads=num_kv_heads,
                rotary=windowed if is_windowed else full,
                intermediate_size=intermediate_size,
            )
            for is_windowed in windowed_layers(get, pattern)
        ),
        num_heads=get.size("num_attention_heads", 8),
        scale=get.number("query_pre_attn_scalar", 256) ** -0.5,
        embed_scale=_to_bfloat16(hidden_size**0.5),
        rms_eps=get.number("rms_norm_eps", 1e-6),
        max_context=get.size("max_position_embeddings", 131072),
        tied=tied(outer, get),
        reads_both_ways=both_ways,
    )
    return replace(made, unread=unread_keys(outer, get, TEXT_KEYS, ropes))


def _rotaries(get: Values, head_dim: int) -> tuple[tuple[RotaryShape, RotaryShape], tuple[Values, Values]]:
    """(of windowed layers, of full ones), and their descriptions. `rope_scaling`, of an older dialect, is the full layers'; beside
    `rope_parameters` it may not contradict them."""
    windowed, full = rotary_descriptions(get) or (Values({}), Values({}))
    older = get.object("rope_scaling")
    for key, value in older.items():
        if full.raw.get(key, value) != value:
            raise ModelError(
                f"config.json gives two values of {key} for rotary positions, {short(full.raw[key])} and {short(value)}."
            )
    local, theta = get.number("rope_local_base_freq", 1e4), get.number("rope_theta", 1e6)
    max_context = get.size("max_position_embeddings", 131072)
    full = Values({**full.raw, **older})
    shapes = (
        RotaryShape.of(head_dim, windowed, local, max_context),
        RotaryShape.of(head_dim, full, theta, max_context),
    )
    return shapes, (windowed, full)


def _to_bfloat16(value: float) -> float:
    """The models were trained with this factor rounded to bfloat16, whatever they are computed in now."""
    import numpy as np

    bits = int(np.asarray(value, np.float32).view(np.uint32))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(np.asarray(rounded, np.uint32).view(np.float32))
