"""Tiny Qwen3.5 checkpoints with random weights, written as the folders one finds in the wild: raw Hugging Face (multimodal hub layout and
text-only) and mlx-lm's conversions, plain and quantized.

Knows file layouts and tensor names; knows nothing of mlxspec. Weights are drawn by numpy, so every machine gets the same ones.
"""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

Arrays = dict[str, np.ndarray]
VOCAB = 197  # prime: no kernel's width divides it


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What differs between the checkpoints. `interval`: every so-manieth layer is full attention."""

    name: str
    hidden: int = 64
    num_layers: int = 4
    interval: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    num_k_heads: int = 2
    num_v_heads: int = 2
    v_head_dim: int = 32
    num_experts: int = 0
    tied: bool = False
    rms_eps: float = 1e-6
    rope_theta: float = 1e7
    rotary: float = 0.25
    seed: int = 0


SHAPES = {
    s.name: s
    for s in (
        Shape(name="tied", tied=True, seed=1),
        Shape(
            name="untied",
            num_layers=6,
            interval=3,
            num_heads=3,
            num_kv_heads=1,
            v_head_dim=64,
            rotary=0.5,
            seed=2,
        ),
        Shape(name="grouped", hidden=128, num_layers=8, num_v_heads=4, rms_eps=1e-3, rope_theta=1e4, seed=3),
        Shape(name="moe", num_layers=4, interval=2, num_v_heads=4, num_experts=8, seed=4),
    )
}

K_HEAD_DIM, CONV_KERNEL, FFN, EXPERT = 32, 4, 128, 64


def text_config(s: Shape) -> dict[str, Any]:
    """The text model's config, as in the hub's `text_config`."""
    kinds = ["linear_attention" if (i + 1) % s.interval else "full_attention" for i in range(s.num_layers)]
    config: dict[str, Any] = {
        "model_type": "qwen3_5_moe_text" if s.num_experts else "qwen3_5_text",
        "vocab_size": VOCAB,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.num_layers,
        "layer_types": kinds,
        "full_attention_interval": s.interval,
        "num_attention_heads": s.num_heads,
        "num_key_value_heads": s.num_kv_heads,
        "head_dim": s.head_dim,
        "linear_num_key_heads": s.num_k_heads,
        "linear_num_value_heads": s.num_v_heads,
        "linear_key_head_dim": K_HEAD_DIM,
        "linear_value_head_dim": s.v_head_dim,
        "linear_conv_kernel_dim": CONV_KERNEL,
        "rms_norm_eps": s.rms_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": s.rope_theta,
            "partial_rotary_factor": s.rotary,
            "mrope_section": [2, 1, 1],  # for text all three positions are the same
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": s.tied,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "dtype": "float32",
    }
    if s.num_experts:
        config |= {
            "num_experts": s.num_experts,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": EXPERT,
            "shared_expert_intermediate_size": EXPERT,
            "norm_topk_prob": True,
        }
    else:
        config["intermediate_size"] = FFN
    return config


def hub_config(s: Shape) -> dict[str, Any]:
    """The multimodal config around it."""
    kind = "qwen3_5_moe" if s.num_experts else "qwen3_5"
    names = {
        "qwen3_5": "Qwen3_5ForConditionalGeneration",
        "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    }
    return {
        "architectures": [names[kind]],
        "model_type": kind,
        "text_config": text_config(s),
        "tie_word_embeddings": s.tied,
        "vision_config": {"depth": 1},
    }


class _Draw:
    """Random tensors under full names."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.arrays: Arrays = {}

    def matrix(self, name: str, *shape: int) -> None:
        self.arrays[name] = self._normal(shape) / np.float32(np.sqrt(shape[-1]))

    def norm(self, name: str, size: int, *, around: float = 0.0) -> None:
        """Weights of the zero-centred norms lie around 0, plain ones around 1."""
        self.arrays[name] = np.float32(around) + self._normal((size,)) * np.float32(0.2)

    def table(self, name: str, *shape: int) -> None:
        self.arrays[name] = self._normal(shape)

    def log_uniform(self, name: str, size: int) -> None:
        self.arrays[name] = np.log(self._random.uniform(0.05, 8.0, size)).astype(np.float32)

    def _normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return self._random.standard_normal(shape, dtype=np.float32)


def weights(s: Shape) -> Arrays:
    """All tensors, the MTP head's included, under text-only Hugging Face names (`model.`, `lm_head.`, `mtp.`)."""
    draw = _Draw(s.seed)
    if s.tied:
        draw.matrix("model.embed_tokens.weight", VOCAB, s.hidden)  # also the head: logits of a few units
    else:
        draw.table("model.embed_tokens.weight", VOCAB, s.hidden)
    for i in range(s.num_layers):
        base = f"model.layers.{i}."
        if (i + 1) % s.interval:
            _linear_attention(draw, base + "linear_attn.", s)
        else:
            _attention(draw, base + "self_attn.", s)
        _rest_of_layer(draw, base, s)
    draw.norm("model.norm.weight", s.hidden)
    if not s.tied:
        draw.matrix("lm_head.weight", VOCAB, s.hidden)
    draw.matrix("mtp.fc.weight", s.hidden, 2 * s.hidden)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        draw.norm(f"mtp.{name}.weight", s.hidden)
    _attention(draw, "mtp.layers.0.self_attn.", s)
    _rest_of_layer(draw, "mtp.layers.0.", s)
    return draw.arrays


def _attention(draw: _Draw, base: str, s: Shape) -> None:
    draw.matrix(base + "q_proj.weight", 2 * s.num_heads * s.head_dim, s.hidden)
    for name in ("k_proj", "v_proj"):
        draw.matrix(f"{base}{name}.weight", s.num_kv_heads * s.head_dim, s.hidden)
    draw.matrix(base + "o_proj.weight", s.hidden, s.num_heads * s.head_dim)
    draw.norm(base + "q_norm.weight", s.head_dim)
    draw.norm(base + "k_norm.weight", s.head_dim)


def _linear_attention(draw: _Draw, base: str, s: Shape) -> None:
    values = s.num_v_heads * s.v_head_dim
    conv = 2 * s.num_k_heads * K_HEAD_DIM + values
    draw.matrix(base + "in_proj_qkv.weight", conv, s.hidden)
    draw.matrix(base + "in_proj_z.weight", values, s.hidden)
    draw.matrix(base + "in_proj_b.weight", s.num_v_heads, s.hidden)
    draw.matrix(base + "in_proj_a.weight", s.num_v_heads, s.hidden)
    draw.matrix(base + "conv1d.weight", conv, 1, CONV_KERNEL)
    draw.log_uniform(base + "A_log", s.num_v_heads)
    draw.norm(base + "dt_bias", s.num_v_heads, around=-1.0)
    draw.norm(base + "norm.weight", s.v_head_dim, around=1.0)
    draw.matrix(base + "out_proj.weight", s.hidden, values)


def _rest_of_layer(draw: _Draw, base: str, s: Shape) -> None:
    draw.norm(base + "input_layernorm.weight", s.hidden)
    draw.norm(base + "post_attention_layernorm.weight", s.hidden)
    if not s.num_experts:
        _mlp(draw, base + "mlp.", s.hidden, FFN)
        return
    draw.matrix(base + "mlp.gate.weight", s.num_experts, s.hidden)
    draw.matrix(base + "mlp.experts.gate_up_proj", s.num_experts, 2 * EXPERT, s.hidden)
    draw.matrix(base + "mlp.experts.down_proj", s.num_experts, s.hidden, EXPERT)
    _mlp(draw, base + "mlp.shared_expert.", s.hidden, EXPERT)
    draw.matrix(base + "mlp.shared_expert_gate.weight", 1, s.hidden)


def _mlp(draw: _Draw, base: str, hidden: int, size: int) -> None:
    draw.matrix(base + "gate_proj.weight", size, hidden)
    draw.matrix(base + "up_proj.weight", size, hidden)
    draw.matrix(base + "down_proj.weight", hidden, size)


def write_hub(folder: Path, s: Shape, *, num_shards: int = 2) -> Path:
    """As on the hub: `model.language_model.` names, a vision tensor nobody asked for, several shards and their index."""
    named = {
        k.replace("model.", "model.language_model.", 1) if k.startswith("model.") else k: v
        for k, v in weights(s).items()
    }
    named["model.visual.patch_embed.proj.bias"] = np.zeros(8, np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    names, weight_map = sorted(named), {}
    for i in range(num_shards):
        file = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[i::num_shards]
        weight_map |= dict.fromkeys(part, file)
        _save(folder / file, {k: named[k] for k in part})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return _write_config(folder, hub_config(s))


def write_text_only(folder: Path, s: Shape, *, dtype: mx.Dtype = mx.float32, unfused: bool = False) -> Path:
    """As `Qwen3_5ForCausalLM` has it: `model.` names, one file. `unfused`: one tensor an expert, as transformers saves them."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = weights(s)
    _save(folder / "model.safetensors", unfuse_experts(arrays) if unfused else arrays, dtype)
    name = "Qwen3_5MoeForCausalLM" if s.num_experts else "Qwen3_5ForCausalLM"
    stored = {"dtype": str(dtype).removeprefix("mlx.core.")}
    return _write_config(folder, text_config(s) | stored | {"architectures": [name]})


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """What mlx-lm is asked for. mixed: 8 bits for value and down projections, as its mixed recipes do. scaled: experts have one more scale
    each."""

    bits: int
    group_size: int
    mode: str = "affine"
    mixed: bool = False
    scaled: bool = False


def convert(source: Path, folder: Path, how: Quantization | None = None) -> Path:
    """mlx-lm's own conversion of a hub folder: shifted norms, (C, K, 1) convolutions, split experts, no MTP head."""
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    def more_bits(path: str, _: Any) -> dict[str, int] | bool:
        return {"bits": 8, "group_size": 32} if path.endswith(("v_proj", "down_proj")) else True

    model, config = load_model(source)
    if how is not None:
        predicate = more_bits if how.mixed else None
        with contextlib.redirect_stdout(io.StringIO()):  # it reports bits per weight
            scale = {"global_scale": True} if how.scaled else {}  # mlx-lm 0.32.0 has no such argument
            model, config = quantize_model(
                model, config, how.group_size, how.bits, how.mode, quant_predicate=predicate, **scale
            )
    save_model(folder, model)
    save_config(config, folder / "config.json")
    return folder


def unfuse_experts(arrays: Arrays) -> Arrays:
    """Stacks of experts to one tensor for each expert and projection."""
    out: Arrays = {}
    for name, stack in arrays.items():
        base, _, kind = name.rpartition(".")
        if not base.endswith(".experts"):
            out[name] = stack
            continue
        for e, value in enumerate(stack):
            parts = (
                {"gate_proj": value[:EXPERT], "up_proj": value[EXPERT:]}
                if kind == "gate_up_proj"
                else {kind: value}
            )
            out |= {f"{base}.{e}.{part}.weight": np.ascontiguousarray(v) for part, v in parts.items()}
    return out


def _save(path: Path, arrays: Arrays, dtype: mx.Dtype = mx.float32) -> None:
    mx.save_safetensors(
        str(path), {k: mx.array(v).astype(dtype) for k, v in arrays.items()}, metadata={"format": "pt"}
    )


def _write_config(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
