"""Shapes of plain Qwen3 text models (dense and mixture of experts) and of Qwen3-Next, read from config.json and checked.

Both run as Qwen3.5 does (qwen3_5.py), and their shapes are described by the same class:
* Qwen3 has attention in every layer, without an output gate, over whole heads; its experts have none that is shared by all tokens.
* Qwen3-Next stores the inputs of a Gated DeltaNet layer in two matrices, head by head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlxspec.models.config_values import AROUND, EVERYWHERE, Keys, Values, layer_kinds, read
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.rotary_scaling import Scaling, merged, theta_of

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


# what layers without experts and without a state are not asked for
_NOTHING = (
    *("num_k_heads", "num_v_heads", "k_head_dim", "v_head_dim", "conv_kernel", "num_mtp_layers"),
    *("num_experts", "num_experts_per_token", "expert_size", "shared_expert_size"),
)
_DENSE: Mapping[str, Any] = dict.fromkeys(_NOTHING, 0) | {
    "tied": False,
    "norm_topk": True,
    "mtp_embeddings": False,
    "is_gated": False,
}


def qwen3_config(config: Mapping[str, Any]) -> Qwen35Config:
    """Return the config of a `qwen3` or `qwen3_moe` model. Raises ModelError naming the first key that is missing or out of range."""
    get = Values(config, QWEN3_KEYS)
    num_experts = get.size("num_experts", get.size("num_local_experts", 0))
    layer_kinds(get, "full_attention")
    heads = get.size("hidden_size") // get.size("num_attention_heads")
    return plain_layers(
        get,
        merged(get),
        max_context=get.size("max_position_embeddings"),
        head_dim=get.size("head_dim", heads if num_experts else None),
        intermediate_size=get.size("intermediate_size", None if num_experts == 0 else 0),
        tied=get.flag("tie_word_embeddings"),
        num_experts=num_experts,
        num_experts_per_token=get.size("num_experts_per_tok", 0),
        expert_size=get.size("moe_intermediate_size", 0),
        norm_topk=get.flag("norm_topk_prob"),
        whole=get,
    )


def plain_layers(get: Values, rope: Values, *, num_layers: int | None = None, **given: Any) -> Qwen35Config:
    """Return the shape of plain Qwen3 layers: attention over whole heads without an output gate, and dense MLPs unless `given` has experts.
    rope: the rotary settings. num_layers: used where the config has none; None: the config must have it. given: values by field, which are
    not read. Raises ModelError."""
    found: dict[str, Any] = {**_DENSE, "is_linear": (False,) * get.size("num_hidden_layers", num_layers)}
    found["head_dim"] = found["rope_dims"] = given.get("head_dim") or get.size("head_dim")
    found["max_context"] = given.get("max_context") or get.size("max_position_embeddings", 262144)
    found["rope_theta"] = given.get("rope_theta") or theta_of(rope)
    found["rope_scaling"] = Scaling.of(rope, found["max_context"])
    return read(Qwen35Config, get, **{**found, **given})


def qwen3_next_config(config: Mapping[str, Any]) -> Qwen35Config:
    """Return the config of a `qwen3_next` model. Without a key in config.json an MTP head of one layer is assumed, as published folders
    have one. Raises ModelError."""
    made, own = Qwen35Config.from_dict(config), "num_nextn_predict_layers"
    return replace(
        made,
        joins_projections=True,
        num_mtp_layers=Values(config).size(own, 1),
        unread=tuple(key for key in made.unread if key != own),
    )
