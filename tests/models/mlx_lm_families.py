"""Tiny folders of every family, written with mlx-lm's own classes and names, as floats or quantized by MLX."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

_ALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}
_QWEN3 = _ALL | {
    "model_type": "qwen3",
    "num_hidden_layers": 3,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_LINEAR = {
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": False,
}
_TURNED = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
_QWEN35 = _ALL | _LINEAR | {"model_type": "qwen3_5_text", "rope_parameters": _TURNED}
_GEMMA = _ALL | {"num_hidden_layers": 6, "sliding_window": 32, "sliding_window_pattern": 6}
_GEMMA3 = _GEMMA | {
    "model_type": "gemma3_text",
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 32,
    "tie_word_embeddings": True,
}
_GEMMA4 = _GEMMA | {
    "model_type": "gemma4_text",
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "attention_k_eq_v": False,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3 | _EXPERTS | _SPARSE | {"model_type": "qwen3_moe", "tie_word_embeddings": False},
    "qwen3_5": {"model_type": "qwen3_5", "text_config": _QWEN35, "tie_word_embeddings": False},
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": _QWEN35 | _SHARED | {"model_type": "qwen3_5_moe_text"},
        "tie_word_embeddings": False,
    },
    "qwen3_next": _ALL
    | _LINEAR
    | _SHARED
    | _SPARSE
    | {"model_type": "qwen3_next", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "gemma3_text": _GEMMA3,
    "gemma3": {"model_type": "gemma3", "vocab_size": 320, "text_config": _GEMMA3},
    "gemma4_text": _GEMMA4,
    "gemma4": {"model_type": "gemma4", "vocab_size": 320, "text_config": _GEMMA4},
}


def write(
    folder: Path, family: str, bits: int | None = None, group_size: int = 32, mode: str = "affine"
) -> Path:
    """bits: None for float32. Weights are random, norms around their usual values."""
    return write_of(folder, dict(FAMILIES[family]), bits, group_size, mode)


def write_of(
    folder: Path, config: dict[str, Any], bits: int | None = None, group_size: int = 32, mode: str = "affine"
) -> Path:
    """As `write`, of any config of a model of mlx-lm."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    new = []
    for name, value in tree_flatten(model.parameters()):
        if "A_log" in name:
            new.append((name, mx.log(mx.random.uniform(0.2, 4.0, value.shape))))
        elif "embed_tokens" in name:
            new.append((name, mx.random.normal(value.shape)))
        elif value.ndim >= 2:
            spread = 1.5 if "conv1d" in name else value.shape[-1] ** -0.5
            new.append((name, spread * mx.random.normal(value.shape)))
        else:
            new.append((name, value + 0.1 * mx.random.normal(value.shape)))
    model.load_weights(new)
    if bits is not None:
        config["quantization"] = {"group_size": group_size, "bits": bits, "mode": mode}
        nn.quantize(model, group_size, bits, mode=mode)
    folder.mkdir(parents=True)
    named = dict(tree_flatten(model.parameters()))
    if config["model_type"].startswith(
        "gemma"
    ):  # mlx-lm's class has a head of its own until it loads a folder without one
        named = {k: v for k, v in named.items() if "lm_head" not in k}
    mx.save_safetensors(str(folder / "model.safetensors"), named, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
