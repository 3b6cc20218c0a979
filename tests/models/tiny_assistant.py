"""A tiny Gemma 4 assistant with random weights for the checkpoints of tiny_gemma.py, as a folder of its own.

Knows file layouts and tensor names; knows nothing of mlxspec.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
from tiny_gemma import Arrays, Config

HIDDEN, LAYERS = 32, 3


def config(target: Config, num_centroids: int = 0, chosen: int = 2, *, hidden: int = HIDDEN) -> Config:
    """`num_centroids` 0: every token is scored."""
    text = {
        k: target[k] for k in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    } | {k: target[k] for k in ("global_head_dim", "sliding_window", "rms_norm_eps", "rope_parameters")}
    text |= {
        "model_type": "gemma4_text",
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_kv_shared_layers": LAYERS,
        "layer_types": ["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "attention_k_eq_v": target["attention_k_eq_v"],
        "num_global_key_value_heads": target.get("num_global_key_value_heads"),
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "tie_word_embeddings": True,
    }
    return {
        "model_type": "gemma4_assistant",
        "text_config": text,
        "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": num_centroids > 0,
        "num_centroids": num_centroids or 2048,
        "centroid_intermediate_top_k": chosen,
        "tie_word_embeddings": True,
    }


def write(folder: Path, c: Config, change: Callable[[Arrays], Arrays] = lambda named: named) -> Path:
    """change: of the random tensors, before they are written."""
    rng, text = np.random.default_rng(11), c["text_config"]
    target, heads, hidden = c["backbone_hidden_size"], text["num_attention_heads"], text["hidden_size"]
    named: Arrays = {}

    def matrix(name: str, *shape: int) -> None:
        named[f"{name}.weight"] = rng.standard_normal(shape) / np.sqrt(shape[-1])

    def norm(name: str, size: int) -> None:
        named[f"{name}.weight"] = rng.uniform(0.6, 1.4, size)

    matrix("pre_projection", hidden, 2 * target)
    matrix("post_projection", target, hidden)
    matrix("model.embed_tokens", text["vocab_size"], hidden)
    norm("model.norm", hidden)
    for i, kind in enumerate(text["layer_types"]):
        base = f"model.layers.{i}."
        dim = text["global_head_dim"] if kind == "full_attention" else text["head_dim"]
        matrix(base + "self_attn.q_proj", heads * dim, hidden)
        matrix(base + "self_attn.o_proj", hidden, heads * dim)
        norm(base + "self_attn.q_norm", dim)
        matrix(base + "mlp.gate_proj", 64, hidden)
        matrix(base + "mlp.up_proj", 64, hidden)
        matrix(base + "mlp.down_proj", hidden, 64)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            norm(f"{base}{name}_layernorm", hidden)
        named[base + "layer_scalar"] = rng.uniform(0.6, 1.4, 1)
    tensors = {k: mx.array(v.astype(np.float32)) for k, v in change(named).items()}
    if c["use_ordered_embeddings"]:
        centroids = rng.standard_normal((c["num_centroids"], hidden)).astype(np.float32)
        tensors["masked_embedding.centroids.weight"] = mx.array(centroids)
        tensors["masked_embedding.token_ordering"] = mx.array(rng.permutation(text["vocab_size"])).astype(
            mx.int64
        )
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(c, indent=1))
    return folder
