"""Configs of the published Gemma sizes as the hub writes them, and what results; bad ones are one sentence."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from published_shapes import CONFIGS

from mlxspec.errors import ModelError
from mlxspec.loading.gemma_weights import sanitize_gemma4
from mlxspec.models.gemma import Gemma
from mlxspec.models.registry import architecture

SIZES = {
    name.lower().replace("gemma-", "gemma"): config
    for name, (_, config) in CONFIGS.items()
    if name.startswith("gemma")
}


def build(config: dict) -> Gemma:
    kind = architecture(config)
    return kind.build(kind.parse(config))


def test_defaults_that_published_multimodal_configs_leave_out() -> None:
    """The hub's Gemma 3 4B names no heads and no vocabulary."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
    }
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    parsed = architecture(SIZES["gemma3-4b"]).parse({"model_type": "gemma3", "text_config": text})
    assert (parsed.vocab_size, parsed.num_heads, parsed.layers[0].num_kv_heads) == (262208, 8, 4)
    assert [layer.window for layer in parsed.layers[:7]] == [1024] * 5 + [None, 1024]
    assert tuple(parsed.layers[i].rotary.scaling.factor for i in (5, 0)) == (8.0, 1.0)
    assert (parsed.layers[5].rotary.theta, parsed.layers[0].rotary.theta) == (1e6, 1e4)
    assert parsed.embed_scale == 50.5  # sqrt(2560) as bfloat16 has it


def test_shared_keys_come_from_the_last_own_layer_of_the_kind() -> None:
    parsed = architecture(SIZES["gemma4-e2b"]).parse(SIZES["gemma4-e2b"])
    sources = [layer.source for layer in parsed.layers]
    assert sources == [None] * 15 + [13, 13, 13, 13, 14] * 4
    assert {layer.intermediate_size for layer in parsed.layers[15:]} == {12288}


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "hidden_size": ("gemma3-1b", {"hidden_size": None}),
    "num_hidden_layers": ("gemma3-1b", {"num_hidden_layers": 10**9}),
    "num_key_value_heads": ("gemma3-1b", {"num_key_value_heads": 3}),
    "layer_types": ("gemma3-1b", {"layer_types": ["sliding_attention"] * 3}),
    "cannot be rotated": ("gemma3-1b", {"head_dim": 255}),
    "hidden_activation": ("gemma3-1b", {"hidden_activation": "silu"}),
    "attn_logit_softcapping": ("gemma3-1b", {"attn_logit_softcapping": 50.0}),
    "use_bidirectional_attention": ("gemma3-1b", {"use_bidirectional_attention": "vision"}),
    "attention_bias": ("gemma3-1b", {"attention_bias": True}),
    "'longrope' are not supported": ("gemma3-1b", {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}),
    "must describe sliding_attention": (
        "gemma3-1b",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    ),
    "two values of factor": (
        "gemma3-1b",
        {
            "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0}},
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "partial_rotary_factor": ("gemma3-1b", {"partial_rotary_factor": 0.5}),
    "rope_scaling": ("gemma4-e2b", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "rope_theta": ("gemma4-e2b", {"rope_theta": 1e4}),
    "intermediate_size' in per_layer_config": (
        "gemma4-31b",
        {"per_layer_config": {"3": {"intermediate_size": 8}}},
    ),
    "factor": ("gemma3-1b", {"rope_scaling": {"rope_type": "linear", "factor": -1}}),
    "rope_parameters": ("gemma3-1b", {"rope_parameters": 5}),
    "sliding_window": ("gemma3-1b", {"sliding_window": 0}),
    "num_kv_shared_layers": ("gemma4-e2b", {"num_kv_shared_layers": 35}),
    "vocab_size_per_layer_input": ("gemma4-e2b", {"vocab_size_per_layer_input": 100}),
    "top_k_experts": ("gemma4-26b-a4b", {"top_k_experts": 129}),
    "moe_intermediate_size": ("gemma4-26b-a4b", {"moe_intermediate_size": None}),
    "enable_moe_block": ("gemma4-26b-a4b", {"enable_moe_block": "yes"}),
    "heads of different shapes": ("gemma4-e2b", {"per_layer_config": {"13": {"head_dim": 128}}}),
    "tie_word_embeddings": ("gemma3-1b", {"tie_word_embeddings": 3}),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_configs_are_one_sentence(what: str) -> None:
    size, change = BAD[what]
    config = SIZES[size]
    text = config.get("text_config", config) | change
    config = {**config, "text_config": text} if "text_config" in config else text
    with pytest.raises(ModelError, match=what) as caught:
        build(config)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize("unused", ["k_proj.weight", "k_proj.scales", "v_proj.weight", "k_norm.weight"])
def test_what_a_layer_without_keys_of_its_own_has_of_them_is_left_out(unused: str) -> None:
    """Some folders hold it; layers whose number begins alike have their own."""
    names = [
        f"model.language_model.layers.{i}.self_attn.{x}" for i in (1, 10) for x in (unused, "q_norm.weight")
    ]
    found = sanitize_gemma4({name: mx.zeros(1) for name in names}, tied=True, without_keys={1})
    assert sorted(name.partition("layers.")[2] for name in found) == sorted(
        ["1.self_attn.q_norm.weight", "10.self_attn.q_norm.weight", f"10.self_attn.{unused}"]
    )
