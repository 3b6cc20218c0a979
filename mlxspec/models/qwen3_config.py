"""Shapes of plain Qwen3 text models (dense and mixture of experts) and of Qwen3-Next, read from config.json and checked.

Both run as Qwen3.5 does (qwen3_5.py), and their shapes are described by the same class:
* Qwen3 has attention in every layer, without an output gate, over whole heads; its experts have none that is shared by all tokens.
* Qwen3-Next stores the inputs of a Gated DeltaNet layer in two matrices, head by head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlxspec.errors import ModelError
from mlxspec.models.config_values import AROUND, EVERYWHERE, Keys, Values
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.rotary_scaling import Scaling, merged
from mlxspec.models.rotary_scaling import unread as unread_of_rope

QWEN3_KEYS = Keys(
    # a window without use_sliding_window is none; every layer has experts, so max_window_layers and router losses say nothing
    idle=EVERYWHERE
    | AROUND
    | {"max_window_layers", "output_router_logits", "router_aux_loss_coef", "sliding_window"},
    only={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "partial_rotary_factor": (1, 1.0),
        "mlp_only_layers": ([],),
        "decoder_sparse_step": (1,),
        "use_sliding_window": (False,),
        "is_encoder_decoder": (False,),
    },
)


def qwen3_config(config: Mapping[str, Any]) -> Qwen35Config:
    """Of a `qwen3` or `qwen3_moe` model. Raises ModelError naming the first key that is missing or out of range."""
    get = Values(config)
    num_layers = get.size("num_hidden_layers")
    num_experts = get.size("num_experts", get.size("num_local_experts", 0))
    rope = merged(get)
    if rope.value("rope_theta") is None:
        raise ModelError("config.json names no rope_theta, for which there is no common default.")
    max_context = get.size("max_position_embeddings")
    QWEN3_KEYS.check(get)
    kinds = get.value("layer_types")
    if kinds is not None and kinds != ["full_attention"] * num_layers:
        raise ModelError("config.json: layer_types must name full_attention once a layer.")
    made = replace(
        plain_layers(get, rope, max_context, get.size("intermediate_size", None if num_experts == 0 else 0)),
        tied=get.flag("tie_word_embeddings"),
        num_experts=num_experts,
        num_experts_per_token=get.size("num_experts_per_tok", 0),
        expert_size=get.size("moe_intermediate_size", 0),
        norm_topk=get.flag("norm_topk_prob"),
    )
    return replace(made, unread=tuple(sorted({*QWEN3_KEYS.unread(get), *unread_of_rope(rope)})))


def plain_layers(
    get: Values,
    rope: Values,
    max_context: int,
    intermediate_size: int,
    *,
    num_layers: int | None = None,
    head_dim: int | None = None,
    num_kv_heads: int | None = None,
    rope_theta: float | None = None,
) -> Qwen35Config:
    """Dense layers of plain Qwen3, each with attention over whole heads and without an output gate. rope: the rotary parameters. num_layers
    and the rest: where the config says nothing; None: it must. Raises ModelError."""
    head_dim = get.size("head_dim", head_dim)
    return Qwen35Config(
        vocab_size=get.size("vocab_size"),
        hidden_size=get.size("hidden_size"),
        intermediate_size=intermediate_size,
        is_linear=(False,) * get.size("num_hidden_layers", num_layers),
        num_heads=get.size("num_attention_heads"),
        num_kv_heads=get.size("num_key_value_heads", num_kv_heads),
        head_dim=head_dim,
        num_k_heads=0,
        num_v_heads=0,
        k_head_dim=0,
        v_head_dim=0,
        conv_kernel=0,
        rms_eps=get.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", rope_theta),
        rope_dims=head_dim,
        rope_scaling=Scaling.of(rope, max_context),
        max_context=max_context,
        tied=False,
        num_experts=0,
        num_experts_per_token=0,
        expert_size=0,
        shared_expert_size=0,
        norm_topk=True,
        num_mtp_layers=0,
        is_gated=False,
    )


def qwen3_next_config(config: Mapping[str, Any]) -> Qwen35Config:
    """Of a `qwen3_next` model. Published folders hold an MTP head of one layer that their config.json does not name. Raises ModelError."""
    made, own = Qwen35Config.from_dict(config), "num_nextn_predict_layers"
    return replace(
        made,
        joins_projections=True,
        num_mtp_layers=Values(config).size(own, 1),
        unread=tuple(key for key in made.unread if key != own),
    )
