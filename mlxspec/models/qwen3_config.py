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
from mlxspec.models.qwen3_5_config import TEXT_KEYS as QWEN35_KEYS
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.rotary_scaling import Scaling, merged
from mlxspec.models.rotary_scaling import unknown as unknown_of_rope

QWEN3_KEYS = Keys(
    read=frozenset(
        """
        head_dim hidden_size intermediate_size layer_types max_position_embeddings moe_intermediate_size norm_topk_prob num_attention_heads
        num_experts num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts rms_norm_eps rope_parameters rope_scaling
        rope_theta tie_word_embeddings vocab_size
        """.split()
    ),
    # a window without use_sliding_window is none; every layer has experts, so max_window_layers and router losses say nothing
    idle=EVERYWHERE | {"max_window_layers", "output_router_logits", "router_aux_loss_coef", "sliding_window"},
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
NEXT_KEYS = Keys(
    read=QWEN35_KEYS.read | {"num_nextn_predict_layers"}, idle=QWEN35_KEYS.idle, only=QWEN35_KEYS.only
)


def qwen3_config(config: Mapping[str, Any]) -> Qwen35Config:
    """Of a `qwen3` or `qwen3_moe` model. Raises ModelError naming the first key that is missing or out of range."""
    get = Values(config)
    num_layers = get.size("num_hidden_layers")
    num_experts = get.size("num_experts", get.size("num_local_experts", 0))
    rope = Values(merged(get))
    if rope.raw.get("rope_theta") is None:
        raise ModelError("config.json names no rope_theta, for which there is no common default.")
    max_context = get.size("max_position_embeddings")
    QWEN3_KEYS.check(get)
    kinds = get.raw.get("layer_types")
    if kinds is not None and kinds != ["full_attention"] * num_layers:
        raise ModelError("config.json: layer_types must name full_attention once a layer.")
    return replace(
        plain_layers(get, rope, max_context, get.size("intermediate_size", None if num_experts == 0 else 0)),
        tied=get.flag("tie_word_embeddings"),
        num_experts=num_experts,
        num_experts_per_token=get.size("num_experts_per_tok", 0),
        expert_size=get.size("moe_intermediate_size", 0),
        norm_topk=get.flag("norm_topk_prob"),
    )


def plain_layers(get: Values, rope: Values, max_context: int, intermediate_size: int) -> Qwen35Config:
    """Dense layers of plain Qwen3, each with attention over whole heads and without an output gate. rope: the rotary parameters. Raises
    ModelError."""
    head_dim = get.size("head_dim")
    return Qwen35Config(
        vocab_size=get.size("vocab_size"),
        hidden_size=get.size("hidden_size"),
        intermediate_size=intermediate_size,
        is_linear=(False,) * get.size("num_hidden_layers"),
        num_heads=get.size("num_attention_heads"),
        num_kv_heads=get.size("num_key_value_heads"),
        head_dim=head_dim,
        num_k_heads=0,
        num_v_heads=0,
        k_head_dim=0,
        v_head_dim=0,
        conv_kernel=0,
        rms_eps=get.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta"),
        rope_dims=head_dim,
        rope_scaling=Scaling.of(rope.raw, max_context),
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
    made = Qwen35Config.from_dict(config)
    return replace(
        made,
        joins_projections=True,
        num_mtp_layers=Values(config).size("num_nextn_predict_layers", 1),
    )


def unknown_qwen3_keys(config: Mapping[str, Any]) -> list[str]:
    """Keys of a `qwen3` or `qwen3_moe` config.json that say something and that nobody reads."""
    return _unknown(config, QWEN3_KEYS)


def unknown_qwen3_next_keys(config: Mapping[str, Any]) -> list[str]:
    """The same of a `qwen3_next` config.json."""
    return _unknown(config, NEXT_KEYS)


def _unknown(config: Mapping[str, Any], keys: Keys) -> list[str]:
    own = Keys(read=keys.read, idle=keys.idle | AROUND, only=keys.only)
    return sorted({*own.unknown(config), *unknown_of_rope(merged(Values(config)))})
