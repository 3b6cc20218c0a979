"""Configs and tensors as transformers 5 saves them, in the words that mlx-lm's classes read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from transformers import CONFIG_MAPPING

from mlxspec.errors import ModelError
from mlxspec.models.adapted.classes import classes_of
from mlxspec.models.adapted.loading import load_module
from mlxspec.models.adapted.mended import differences
from mlxspec.models.adapted.words import older_names, older_words, plain_value
from mlxspec.models.folder import ModelFolder
from tests.models import adapted_zoo

_ROPE = {"rope_type": "default", "rope_theta": 500.0}
TOLD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "glm4_moe": ({"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}}, {"rope_theta": 500.0, "partial_rotary_factor": 0.5}),
    "olmo3": (
        {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": {"rope_theta": 7.0}}},
        {"rope_theta": 500.0, "rope_local_base_freq": 7.0, "rope_scaling": None},
    ),
    "apertus": ({"hidden_size": 64, "num_attention_heads": 4}, {"head_dim": 16, "mlp_bias": False, "qk_norm": True}),
    "exaone": ({"num_hidden_layers": 3, "rms_norm_eps": 1e-6}, {"num_layers": 3, "layer_norm_epsilon": 1e-6}),
    "exaone4": ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window_pattern": 2}, {"sliding_window_pattern": "LG"}),
    "gpt_neox": ({"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}}, {"rotary_emb_base": 500.0, "rotary_pct": 0.5}),
    "granitemoehybrid": ({"layer_types": ["linear_attention", "full_attention"]}, {"layer_types": ["mamba", "attention"]}),
    "kimi_linear": ({"mlp_layer_types": ["dense", "sparse", "sparse"]}, {"first_k_dense_replace": 1}),
    "mimo_v2_flash": (
        {
            "num_key_value_heads": 2, "sliding_window": 17, "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": _ROPE | {"partial_rotary_factor": 0.5}, "sliding_attention": {"rope_theta": 7.0}},
        },
        {"swa_num_key_value_heads": 4, "sliding_window_size": 17, "hybrid_layer_pattern": [0, 1], "swa_rope_theta": 7.0},
    ),
    "lfm2": ({"hidden_size": 64}, {"block_dim": 64}),
    "mamba2": ({"hidden_size": 64, "expand": 2, "time_step_limit": [0.0, {"__float__": "Infinity"}]},
        {"intermediate_size": 128, "time_step_limit": [0.0, float("inf")]},
    ),
    "llama4_text": (
        {"num_local_experts": 4, "rope_parameters": _ROPE},
        {"model_type": "llama4", "text_config": {
            "model_type": "llama4_text", "num_local_experts": 4, "rope_parameters": _ROPE, "rope_theta": 500.0, "rope_scaling": None,
        }},
    ),
    "nemotron_h": ({"time_step_min": 0.5}, {"time_step_limit": [0.5, float("inf")]}),
    "mellum": ({"num_local_experts": 4}, {"num_experts": 4}),
    "minimax_m2": ({"head_dim": 16, "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}}, {"rotary_dim": 8}),
    "solar_open": ({"moe_intermediate_size": 48}, {"intermediate_size": 48, "first_k_dense_replace": 0}),
}  # fmt: skip


@pytest.mark.parametrize("kind", TOLD)
def test_words_are_those_of_mlx_lms_class(kind: str) -> None:
    given, expected = TOLD[kind]
    words = older_words({"model_type": kind, **given})
    assert {key: words[key] for key in expected} == expected
    again = older_words({"model_type": kind, **given, **words})
    assert {
        key: words[key] for key in again if key not in ("layer_types", "sliding_window_pattern")
    }.items() <= words.items()


def test_what_config_json_says_itself_counts() -> None:
    config = {
        "model_type": "glm4_moe",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 32,
        "rope_theta": 3.0,
    }
    assert older_words(config | {"rope_parameters": _ROPE}).keys() & {"head_dim", "rope_theta"} == set()


def test_the_text_part_is_told_apart() -> None:
    text = {
        "model_type": "llama4_text",
        "rope_parameters": _ROPE,
        "hidden_size": 64,
        "num_attention_heads": 4,
    }
    words = older_words({"model_type": "llama4", "text_config": text})
    assert words["text_config"]["rope_theta"] == 500.0
    assert words["text_config"]["rope_scaling"] is None
    assert words["text_config"]["rope_parameters"] == _ROPE


def test_floats_that_json_cannot_say() -> None:
    assert plain_value({"a": [1, {"__float__": "Infinity"}], "b": {"c": "x"}}) == {
        "a": [1, float("inf")],
        "b": {"c": "x"},
    }


KINDS = (
    "apertus",
    "exaone4",
    "glm4_moe",
    "gpt_neox",
    "granitemoehybrid",
    "mamba2",
    "mellum",
    "olmo3",
    "solar_open",
    "gpt2",
    "minimax_m2",
)


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_are_made_of_a_config_of_transformers(kind: str) -> None:
    config = json.loads(CONFIG_MAPPING[kind]().to_json_string())
    _, arguments = classes_of(config)
    made = arguments.from_dict(config | older_words(config))
    assert made.model_type == kind


def test_a_key_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = adapted_zoo.write("glm4_moe", tmp_path / "a")
    config = json.loads((folder / "config.json").read_text())
    del config["n_group"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"config\.json lacks 'n_group'"):
        load_module(ModelFolder(folder))


def test_experts_of_gpt_oss_in_floats(tmp_path: Path) -> None:
    """As transformers saves them, and unsloth publishes them: stacks whose rows of gate and up take turns."""
    folder = adapted_zoo.write("gpt_oss", tmp_path / "a")
    path = folder / "model.safetensors"
    there = dict(mx.load(str(path)))
    mx.eval(there)
    saved = {name: value for name, value in there.items() if ".experts." not in name}
    for name in [name for name in there if re.search(r"experts\.(gate|down)_proj", name)]:
        base, part, leaf = name.rsplit(".", 2)
        value = there[name]
        if part == "gate_proj":
            both = mx.stack([value, there[f"{base}.up_proj.{leaf}"]], axis=2)
            value = both.reshape(value.shape[0], -1, *value.shape[2:])
        value = value.swapaxes(1, 2) if leaf == "weight" else value
        stack = "gate_up_proj" if part == "gate_proj" else "down_proj"
        saved[f"{base}.{stack}" + ("_bias" if leaf == "bias" else "")] = value
    renamed = older_names("gpt_oss", dict(saved))
    assert renamed.keys() == there.keys()
    assert all(mx.array_equal(renamed[name], there[name]).item() for name in there)
    mx.eval(saved)
    path.unlink()
    mx.save_safetensors(str(path), saved)
    load_module(ModelFolder(folder))


@pytest.mark.parametrize(
    ("kind", "saved", "read"),
    [
        ("llama4", "lm_head.weight", "language_model.lm_head.weight"),
        ("llama4", "language_model.model.norm.weight", "language_model.model.norm.weight"),
        ("nanochat", "model.layers.3.self_attn.q_proj.weight", "transformer.h.3.attn.c_q.weight"),
        ("nanochat", "model.layers.3.mlp.fc2.weight", "transformer.h.3.mlp.c_proj.weight"),
        (
            "olmo_hybrid",
            "model.layers.0.attention_layer_norm.weight",
            "model.layers.0.input_layernorm.weight",
        ),
        ("gpt2", "transformer.wte.weight", "wte.weight"),
        (
            "kimi_linear",
            "model.layers.0.block_sparse_moe.up_proj.weight",
            "model.layers.0.mlp.up_proj.weight",
        ),
        ("mimo_v2_flash", "model.layers.1.self_attn.sinks", "model.layers.1.self_attn.attention_sink_bias"),
    ],
)
def test_names_are_those_of_mlx_lms_modules(kind: str, saved: str, read: str) -> None:
    value = mx.zeros(1)
    assert older_names(kind, {saved: value}) == {read: value}
    assert older_names(kind, {read: value}) == {read: value}  # a conversion of mlx-lm's has them already


def test_what_stays_other_than_published_is_said() -> None:
    """MiniCPM3's code divides logits only where the head has weights of its own."""
    config = {"model_type": "minicpm3", "tie_word_embeddings": True, "hidden_size": 64}
    assert [said for said in differences(config | {"dim_model_base": 32}, 512) if "dim_model_base" in said]
    assert not list(differences(config | {"dim_model_base": 64}, 512))


def test_experts_of_qwen3_vl_are_turned_once() -> None:
    both, down = (
        "model.language_model.layers.0.mlp.experts.gate_up_proj",
        "model.language_model.layers.0.mlp.experts.down_proj",
    )
    published = {both: mx.random.normal((4, 8, 6)), down: mx.random.normal((4, 3, 8))}
    saved = {name: value.swapaxes(1, 2) for name, value in published.items()}
    for weights in (published, saved):
        found = older_names("qwen3_vl_moe", weights)
        assert all(mx.array_equal(found[name], published[name]).item() for name in published)


def test_the_outer_config_says_whether_the_head_is_the_embedding() -> None:
    config = {
        "model_type": "mistral3",
        "text_config": {"model_type": "mistral", "tie_word_embeddings": False},
    }
    assert older_words(config | {"tie_word_embeddings": True})["text_config"]["tie_word_embeddings"] is True


def test_an_error_names_the_key_that_decides(tmp_path: Path) -> None:
    folder = adapted_zoo.write("gemma", tmp_path / "a")
    path = folder / "model.safetensors"
    there = dict(mx.load(str(path)))
    mx.eval(there)
    path.unlink()
    mx.save_safetensors(str(path), there | {"lm_head.weight": there["model.embed_tokens.weight"]})
    with pytest.raises(ModelError, match=r"lm_head.weight \(config.json: tie_word_embeddings\)"):
        load_module(ModelFolder(folder))
