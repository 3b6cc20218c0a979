"""Tiny Gemma checkpoints with random weights, written as the folders one finds in the wild: multimodal hub layout, text-only, and mlx-lm's
conversions of both, plain and quantized.

Knows file layouts and tensor names; knows nothing of mlxspec. Weights are drawn by numpy, so every machine gets the same ones.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

VOCAB = 197  # prime: no kernel's width divides it
Config = dict[str, Any]
Arrays = dict[str, np.ndarray]

_GEMMA3: Config = {
    "model_type": "gemma3_text",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 11,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 24,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
}

_GEMMA4: Config = {
    "model_type": "gemma4_text",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 11,
    "layer_types": 2 * ["sliding_attention", "sliding_attention", "full_attention"],
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "final_logit_softcapping": 3.0,  # small, so that it matters to logits as small as these
    "tie_word_embeddings": True,
}

CONFIGS: dict[str, Config] = {
    # the prompts of the tests wrap its window; positions of full layers are stretched
    "gemma3": {**_GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    # single steps cross its window
    "gemma3-wide": {
        **_GEMMA3,
        "num_hidden_layers": 4,
        "sliding_window_pattern": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "sliding_window": 44,
        "rms_norm_eps": 1e-3,
        "rope_theta": 5e4,
        "rope_local_base_freq": 1e3,
    },
    # as 12B and 31B: in full layers wide heads, few of them for keys, which are the values too
    "gemma4-dense": {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    # as E2B: inputs of a layer's own; the last layers read the keys and values of others and have wide MLPs
    "gemma4-e": {
        **_GEMMA4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "sliding_window": 44,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
    # as 26B-A4B
    "gemma4-moe": {
        **_GEMMA4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 32,
    },
}


def is_gemma4(c: Config) -> bool:
    return c["model_type"] == "gemma4_text"


class _Draw:
    """Random tensors under full names."""

    def __init__(self, seed: int, around: float) -> None:
        self._random, self._around = np.random.default_rng(seed), np.float32(around)
        self.arrays: Arrays = {}

    def matrix(self, name: str, *shape: int) -> None:
        self.arrays[name] = self._normal(shape) / np.float32(np.sqrt(shape[-1]))

    def norm(self, name: str, size: int) -> None:
        """Weights of zero-centred norms lie around 0, those of others around 1."""
        self.arrays[f"{name}.weight"] = self._around + self._normal((size,)) * np.float32(0.2)

    def factors(self, name: str, size: int) -> None:
        self.arrays[name] = self._random.uniform(0.6, 1.4, size).astype(np.float32)

    def _normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return self._random.standard_normal(shape, dtype=np.float32)


def kinds(c: Config) -> list[bool]:
    """Whether each layer sees everything."""
    if "layer_types" in c:
        return [kind == "full_attention" for kind in c["layer_types"]]
    return [(i + 1) % c["sliding_window_pattern"] == 0 for i in range(c["num_hidden_layers"])]


def weights(c: Config) -> Arrays:
    """All tensors under text-only Hugging Face names."""
    draw, hidden = _Draw(sum(map(ord, json.dumps(c))), float(is_gemma4(c))), c["hidden_size"]
    draw.matrix("model.embed_tokens.weight", c["vocab_size"], hidden)
    for i, full in enumerate(kinds(c)):
        base = f"model.layers.{i}."
        _attention(draw, base + "self_attn.", c, i, full)
        shared = i >= c["num_hidden_layers"] - c.get("num_kv_shared_layers", 0)
        size = c["intermediate_size"] * (2 if shared and c.get("use_double_wide_mlp") else 1)
        _mlp(draw, base + "mlp.", hidden, size)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            draw.norm(f"{base}{name}_layernorm", hidden)
        if is_gemma4(c):
            draw.factors(base + "layer_scalar", 1)
            _experts(draw, base, c)
            _own_input(draw, base, c)
    draw.norm("model.norm", hidden)
    if own := c.get("hidden_size_per_layer_input"):
        width = own * c["num_hidden_layers"]
        draw.matrix("model.embed_tokens_per_layer.weight", c["vocab_size"], width)
        draw.matrix("model.per_layer_model_projection.weight", width, hidden)
        draw.norm("model.per_layer_projection_norm", own)
    return draw.arrays


def _attention(draw: _Draw, base: str, c: Config, i: int, full: bool) -> None:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    dim = c.get("global_head_dim", c["head_dim"]) if full else c["head_dim"]
    same = full and c.get("attention_k_eq_v", False)
    kv = c["num_global_key_value_heads"] if same else c["num_key_value_heads"]
    draw.matrix(base + "q_proj.weight", heads * dim, hidden)
    draw.matrix(base + "o_proj.weight", hidden, heads * dim)
    draw.norm(base + "q_norm", dim)
    if i < c["num_hidden_layers"] - c.get("num_kv_shared_layers", 0):
        draw.matrix(base + "k_proj.weight", kv * dim, hidden)
        draw.norm(base + "k_norm", dim)
        if not same:
            draw.matrix(base + "v_proj.weight", kv * dim, hidden)


def _mlp(draw: _Draw, base: str, hidden: int, size: int) -> None:
    draw.matrix(base + "gate_proj.weight", size, hidden)
    draw.matrix(base + "up_proj.weight", size, hidden)
    draw.matrix(base + "down_proj.weight", hidden, size)


def _experts(draw: _Draw, base: str, c: Config) -> None:
    if not c.get("enable_moe_block"):
        return
    hidden, num, size = c["hidden_size"], c["num_experts"], c["moe_intermediate_size"]
    draw.matrix(base + "router.proj.weight", num, hidden)
    draw.factors(base + "router.scale", hidden)
    draw.factors(base + "router.per_expert_scale", num)
    draw.matrix(base + "experts.gate_up_proj", num, 2 * size, hidden)
    draw.matrix(base + "experts.down_proj", num, hidden, size)
    for name in (
        "post_feedforward_layernorm_1",
        "post_feedforward_layernorm_2",
        "pre_feedforward_layernorm_2",
    ):
        draw.norm(base + name, hidden)


def _own_input(draw: _Draw, base: str, c: Config) -> None:
    if own := c.get("hidden_size_per_layer_input"):
        draw.matrix(base + "per_layer_input_gate.weight", own, c["hidden_size"])
        draw.matrix(base + "per_layer_projection.weight", c["hidden_size"], own)
        draw.norm(base + "post_per_layer_input_norm", c["hidden_size"])


def write_text(folder: Path, c: Config, change: Callable[[Arrays], Arrays] = lambda named: named) -> Path:
    """As a causal language model has it: `model.` names, one file. change: of the random tensors, before they are written."""
    return _write(folder, c, change(weights(c)))


def write_hub(folder: Path, c: Config) -> Path:
    """As on the hub: a multimodal config, its names (another wrapper in each generation), and tensors of towers, which nobody asked for."""
    first, text = ("model.", "model.language_model.") if is_gemma4(c) else ("", "language_model.model.")
    named = {k.replace("model.", text, 1): v for k, v in weights(c).items()}
    for tower in ("vision_tower", "multi_modal_projector", *(("audio_tower", "embed_vision") * is_gemma4(c))):
        named[f"{first}{tower}.x.weight"] = np.zeros((8, 8), np.float32)
    kind = c["model_type"].removesuffix("_text")
    return _write(
        folder,
        {"model_type": kind, "vocab_size": c["vocab_size"], "text_config": c, "vision_config": {}},
        named,
    )


def convert(source: Path, folder: Path, bits: int | None = None) -> Path:
    """mlx-lm's own conversion, with whatever exceptions from `bits` it makes itself."""
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    model, config = load_model(source)
    if bits is not None:
        with contextlib.redirect_stdout(io.StringIO()):  # it reports bits per weight
            model, config = quantize_model(model, config, 32, bits)
    save_model(folder, model)
    save_config(config, folder / "config.json")
    return folder


def _write(folder: Path, config: Config, arrays: Arrays) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: mx.array(v) for k, v in arrays.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


class Gemmas:
    """The checkpoints by name and dialect ("text", "hub", "mlx", "mlx-8bit", "mlx-4bit", "mlx-hub-4bit"), each written once."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folder(self, name: str, dialect: str) -> Path:
        path, c = self._root / f"{name}-{dialect}", CONFIGS[name]
        if path.is_dir():
            return path
        if not dialect.startswith("mlx"):
            return (write_hub if dialect == "hub" else write_text)(path, c)
        bits = int(dialect[-4]) if dialect.endswith("bit") else None
        return convert(self.folder(name, "hub" if "hub" in dialect else "text"), path, bits)
