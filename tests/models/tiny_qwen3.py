"""Tiny Qwen3 and Qwen3-Next checkpoints with random weights in their published layouts: raw Hugging Face (`model.` names, one tensor an
expert) in float32 and bfloat16, and mlx-lm's conversions, plain and quantized.

Knows file layouts and tensor names; knows nothing of mlxspec. Weights are drawn by numpy, so every machine gets the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import tiny
from tiny import Arrays, Quantization, _Draw, unfuse_experts

VOCAB, HIDDEN, DIM, EXPERT = tiny.VOCAB, 64, 32, tiny.EXPERT
Config = dict[str, Any]

_DENSE: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": DIM,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 4096,
    "max_window_layers": 3,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
}
_EXPERTS: Config = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": EXPERT,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
_LINEAR: Config = {
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 64,
    "partial_rotary_factor": 0.25,
    "shared_expert_intermediate_size": EXPERT,
}
CONFIGS: dict[str, Config] = {
    "qwen3": _DENSE,
    # heads wider than the hidden size, as in 0.6B, whose hidden size is 1024 with heads of 16 x 128
    "qwen3-tied": {**_DENSE, "tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1},
    "qwen3-moe": {
        **_DENSE,
        **_EXPERTS,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "rms_norm_eps": 1e-3,
    },
    "qwen3-next": {
        **_DENSE,
        **_EXPERTS,
        **_LINEAR,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
    },
}


def is_next(c: Config) -> bool:
    return bool(c["model_type"] == "qwen3_next")


def weights(c: Config) -> Arrays:
    """All tensors under Hugging Face's names, experts in stacks."""
    draw, around = _Draw(sum(map(ord, json.dumps(c)))), 0.0 if is_next(c) else 1.0
    table = draw.matrix if c["tie_word_embeddings"] else draw.table
    table("model.embed_tokens.weight", c["vocab_size"], HIDDEN)
    for i in range(c["num_hidden_layers"]):
        base = f"model.layers.{i}."
        if (i + 1) % c.get("full_attention_interval", 1):
            _linear_attention(draw, base + "linear_attn.", c)
        else:
            _attention(draw, base + "self_attn.", c, around)
        _rest_of_layer(draw, base, c, around)
    draw.norm("model.norm.weight", HIDDEN, around=around)
    if not c["tie_word_embeddings"]:
        draw.matrix("lm_head.weight", c["vocab_size"], HIDDEN)
    if is_next(c):
        draw.matrix("mtp.fc.weight", HIDDEN, 2 * HIDDEN)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            draw.norm(f"mtp.{name}.weight", HIDDEN)
        _attention(draw, "mtp.layers.0.self_attn.", c, around)
        _rest_of_layer(draw, "mtp.layers.0.", c, around)
    return draw.arrays


def _attention(draw: _Draw, base: str, c: Config, around: float) -> None:
    heads, kv = c["num_attention_heads"] * DIM, c["num_key_value_heads"] * DIM
    draw.matrix(base + "q_proj.weight", 2 * heads if is_next(c) else heads, HIDDEN)
    draw.matrix(base + "k_proj.weight", kv, HIDDEN)
    draw.matrix(base + "v_proj.weight", kv, HIDDEN)
    draw.matrix(base + "o_proj.weight", HIDDEN, heads)
    draw.norm(base + "q_norm.weight", DIM, around=around)
    draw.norm(base + "k_norm.weight", DIM, around=around)


def _linear_attention(draw: _Draw, base: str, c: Config) -> None:
    num, dim = c["linear_num_value_heads"], c["linear_value_head_dim"]
    keys = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"]
    draw.matrix(base + "in_proj_qkvz.weight", keys + 2 * num * dim, HIDDEN)
    draw.matrix(base + "in_proj_ba.weight", 2 * num, HIDDEN)
    draw.matrix(base + "conv1d.weight", keys + num * dim, 1, c["linear_conv_kernel_dim"])
    draw.log_uniform(base + "A_log", num)
    draw.norm(base + "dt_bias", num, around=-1.0)
    draw.norm(base + "norm.weight", dim, around=1.0)
    draw.matrix(base + "out_proj.weight", HIDDEN, num * dim)


def _rest_of_layer(draw: _Draw, base: str, c: Config, around: float) -> None:
    draw.norm(base + "input_layernorm.weight", HIDDEN, around=around)
    draw.norm(base + "post_attention_layernorm.weight", HIDDEN, around=around)
    if "num_experts" not in c:
        tiny._mlp(draw, base + "mlp.", HIDDEN, c["intermediate_size"])
        return
    draw.matrix(base + "mlp.gate.weight", c["num_experts"], HIDDEN)
    draw.matrix(base + "mlp.experts.gate_up_proj", c["num_experts"], 2 * EXPERT, HIDDEN)
    draw.matrix(base + "mlp.experts.down_proj", c["num_experts"], HIDDEN, EXPERT)
    if is_next(c):
        tiny._mlp(draw, base + "mlp.shared_expert.", HIDDEN, EXPERT)
        draw.matrix(base + "mlp.shared_expert_gate.weight", 1, HIDDEN)


def write(
    folder: Path,
    c: Config,
    *,
    dtype: mx.Dtype = mx.float32,
    change: Callable[[Arrays], Arrays] = lambda named: named,
) -> Path:
    """As published: `model.` names, one tensor an expert, the MTP head of Qwen3-Next among the others. change: of the random tensors,
    before they are written."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny._save(folder / "model.safetensors", unfuse_experts(change(weights(c))), dtype)
    return tiny._write_config(folder, c | {"torch_dtype": str(dtype).removeprefix("mlx.core.")})


class Qwen3s:
    """The checkpoints by name and dialect ("text", "text-bfloat16", "mlx", "mlx-8bit", "mlx-4bit"), each written once."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folder(self, name: str, dialect: str) -> Path:
        path, c = self._root / f"{name}-{dialect}", CONFIGS[name]
        if path.is_dir():
            return path
        if not dialect.startswith("mlx"):
            return write(path, c, dtype=mx.bfloat16 if dialect.endswith("bfloat16") else mx.float32)
        how = Quantization(bits=int(dialect[-4]), group_size=32) if dialect.endswith("bit") else None
        return tiny.convert(self.folder(name, "text"), path, how)
