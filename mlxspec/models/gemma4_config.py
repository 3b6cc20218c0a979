"""Shape of a Gemma 4 text model in any of its forms, read from config.json and checked.

Knows the dialects of the config (global_head_dim and num_global_key_value_heads as on the hub, per_layer_config as transformers saves
it); knows no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlxspec.errors import ModelError
from mlxspec.models.config_values import EVERYWHERE, Keys, Values, mapping, short
from mlxspec.models.gemma_config import (
    OUTER_KEYS,
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
    only={
        **TEXT_ONLY,
        "rope_local_base_freq": (),
        "rope_scaling": (),
        "rope_theta": (),
        "use_bidirectional_attention": ("vision",),  # text is causal then
    },
)
_OF_A_LAYER = frozenset({"head_dim", "num_key_value_heads"})
_FULL_ROTARY = {"rope_type": "proportional", "partial_rotary_factor": 0.25}


def gemma4_config(config: Mapping[str, Any], *, borrows: bool = False, own: Keys = OUTER_KEYS) -> GemmaConfig:
    """Raises ModelError naming the first key that is missing, out of range or not supported.

    `borrows`: a model all of whose layers read keys and values of another model; their `source` is themselves. own: keys that are
    read elsewhere, or idle, around the text model's part.
    """
    outer, get = parts(config)
    TEXT_KEYS.check(get)
    has_experts = get.flag("enable_moe_block")
    get.skip("num_experts", "top_k_experts", "moe_intermediate_size", "vocab_size_per_layer_input")
    softcap, ropes = (
        get.value("final_logit_softcapping"),
        rotary_descriptions(get) or (Values({}), Values(_FULL_ROTARY)),
    )
    per_layer_size = get.raw.get("hidden_size_per_layer_input", 256) and get.size(
        "hidden_size_per_layer_input", 256
    )
    made = GemmaConfig(
        vocab_size=get.size("vocab_size", outer.size("vocab_size", 262144)),
        hidden_size=get.size("hidden_size"),
        layers=_layers(get, ropes, borrows),
        num_heads=get.size("num_attention_heads", 8),
        scale=1.0,
        embed_scale=get.size("hidden_size") ** 0.5,
        rms_eps=get.number("rms_norm_eps", 1e-6),
        max_context=get.size("max_position_embeddings", 131072),
        tied=tied(outer, get),
        generation=4,
        softcap=None if softcap is None else get.number("final_logit_softcapping", 30.0),
        per_layer_size=per_layer_size or 0,
        per_layer_vocab=get.size("vocab_size_per_layer_input", 262144) if per_layer_size else 0,
        num_experts=get.size("num_experts") if has_experts else 0,
        num_experts_per_token=get.size("top_k_experts") if has_experts else 0,
        expert_size=get.size("moe_intermediate_size") if has_experts else 0,
    )
    return replace(made, unread=unread_keys(outer, get, TEXT_KEYS, ropes, own))


def _layers(get: Values, ropes: tuple[Values, Values], borrows: bool) -> tuple[LayerShape, ...]:
    kinds = list(windowed_layers(get, get.size("sliding_window_pattern", 6)))
    get.skip("num_kv_shared_layers", "num_global_key_value_heads")
    kinds[-1] = False  # the last layer always sees everything
    if borrows:
        sources: list[int | None] = list(range(len(kinds)))
    else:
        sources = _sources(kinds, get.size("num_kv_shared_layers", 0))
    theirs = get.object("per_layer_config")
    # then it says all; empty where full layers are like the others
    by_layer = get.value("per_layer_config") is not None
    other = sorted({key for i in theirs for key in mapping(theirs, i).keys() - _OF_A_LAYER})
    if other:
        raise ModelError(f"config.json: {short(other[0])} in per_layer_config is not supported.")
    max_context = get.size("max_position_embeddings", 131072)
    window, size = get.size("sliding_window", 512), get.size("intermediate_size")
    same = get.flag("attention_k_eq_v")
    wide = 2 if get.flag("use_double_wide_mlp") else 1
    head_dim, num_kv_heads = get.size("head_dim", 256), get.size("num_key_value_heads", 4)
    full_head_dim = get.size("global_head_dim", 512)
    full_kv_heads = get.size("num_global_key_value_heads", num_kv_heads) if same else num_kv_heads
    layers = []
    for i, is_windowed in enumerate(kinds):
        own = Values(mapping(theirs, str(i)))
        dim = own.size("head_dim", head_dim if is_windowed or by_layer else full_head_dim)
        heads = own.size("num_key_value_heads", num_kv_heads if is_windowed or by_layer else full_kv_heads)
        rope, theta = (ropes[0], 1e4) if is_windowed else (ropes[1], 1e6)
        rotary = RotaryShape.of(dim, rope, theta, max_context)
        layers.append(
            LayerShape(
                window=window if is_windowed else None,
                head_dim=dim,
                num_kv_heads=heads,
                rotary=rotary,
                intermediate_size=size if sources[i] is None else wide * size,
                keys_are_values=same and not is_windowed,
                source=sources[i],
            )
        )
    return tuple(layers)


def _sources(kinds: list[bool], num_shared: int) -> list[int | None]:
    """For each layer the one whose keys and values it reads: the last of its kind before those that have none of their own."""
    first = len(kinds) - num_shared
    if num_shared and (first <= 0 or set(kinds[first:]) - set(kinds[:first])):
        raise ModelError(
            "config.json: num_kv_shared_layers leaves no layer whose keys and values could be shared."
        )
    last = {kind: i for i, kind in enumerate(kinds[:first])}
    return [last[kind] if i >= first else None for i, kind in enumerate(kinds)]
