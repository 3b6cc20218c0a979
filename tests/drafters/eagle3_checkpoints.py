"""Tiny EAGLE-3 checkpoints with random weights in each published layout, and what they propose by the algorithm itself, in numpy: the whole
text anew for every draft, nothing kept. Nothing of mlxspec takes part. Weights are drawn by numpy, so every machine gets the same ones.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

Arrays = dict[str, np.ndarray]
HEADS, KV_HEADS, HEAD_DIM, FFN, EPS, THETA = 4, 2, 16, 96, 1e-5, 1e4


@dataclass(frozen=True, kw_only=True)
class Kind:
    """hidden: None for the target's. rows: of the head, None for the whole vocabulary. rotated: of a head's numbers."""

    hidden: int | None = None
    rows: int | None = 72
    own_embedding: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norms_heads: bool = False
    rotated: int = HEAD_DIM
    layout: str = "speculators"
    more: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "speculators": Kind(norm_before_residual=True),
    "SafeAILab": Kind(layout="SafeAILab"),
    "target's embedding": Kind(layout="SafeAILab", own_embedding=False),
    "whole vocabulary": Kind(layout="model.", rows=None),
    "smaller than the target": Kind(hidden=32, norm_before_fc=True),
    "3.1": Kind(fc_norm=True, norm_output=True, norm_before_residual=True),
    "part of each head rotated": Kind(rotated=8),
    "queries and keys normed": Kind(norms_heads=True),
    "normed and rotated in part": Kind(layout="SafeAILab", norms_heads=True, rotated=8),
    "DeepSpec": Kind(layout="DeepSpec", norms_heads=True, rows=None),
}


def arrays(kind: Kind, vocab: int, size: int, num_layers: int, seed: int = 0) -> Arrays:
    """Under the names of the speculators library."""
    rng, own = np.random.default_rng(seed), kind.hidden or size

    def matrix(*shape: int) -> np.ndarray:
        return (rng.normal(0.0, shape[-1] ** -0.5, shape)).astype(np.float32)

    def norm(num: int) -> np.ndarray:
        return rng.uniform(0.7, 1.3, num).astype(np.float32)

    found = {
        "fc.weight": matrix(own, num_layers * size),
        "norm.weight": norm(own),
        "lm_head.weight": 8.0 * matrix(kind.rows or vocab, own),
        **{
            f"layers.0.{n}.weight": norm(own)
            for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        "layers.0.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, 2 * own),
        "layers.0.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * own),
        "layers.0.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * own),
        "layers.0.self_attn.o_proj.weight": matrix(own, HEADS * HEAD_DIM),
        "layers.0.mlp.gate_proj.weight": matrix(FFN, own),
        "layers.0.mlp.up_proj.weight": matrix(FFN, own),
        "layers.0.mlp.down_proj.weight": matrix(own, FFN),
    }
    if kind.own_embedding:
        found["embed_tokens.weight"] = rng.normal(0.0, 1.0, (vocab, own)).astype(np.float32)
    if kind.norm_before_fc:
        found["input_norm.weight"] = norm(num_layers * size)
    if kind.norms_heads:
        found |= {f"layers.0.self_attn.{n}_norm.weight": norm(HEAD_DIM) for n in "qk"}
    if kind.fc_norm:
        found |= {f"fc_norm.{i}.weight": norm(size) for i in range(num_layers)}
    if kind.rows is not None:
        ids = np.sort(rng.permutation(vocab)[: kind.rows])
        found["d2t"] = (ids - np.arange(kind.rows)).astype(np.int64)
        found["t2d"] = np.isin(np.arange(vocab), ids)
    return found


def config(kind: Kind, vocab: int, size: int, layers: tuple[int, ...]) -> dict[str, Any]:
    """config.json as each of them writes it. layers: 0-based."""
    layer = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": kind.hidden or size,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": EPS,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
    }
    if kind.rotated != HEAD_DIM:
        layer["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": THETA,
            "partial_rotary_factor": kind.rotated / HEAD_DIM,
        }
    flags = {
        name: True
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        if getattr(kind, name)
    }
    own = {"draft_vocab_size": kind.rows or vocab, "target_hidden_size": size, **flags, **kind.more}
    if kind.layout == "speculators":
        ids = [i + 1 for i in layers]
        if ids[0] == 1:  # lists that begin with 1 count otherwise
            ids = list(layers)
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3"},
            "eagle_aux_hidden_state_layer_ids": ids,
            "transformer_layer_config": layer,
            **own,
        }
    if kind.layout == "DeepSpec":
        trained = {"ttt_length": 7, "step_loss_decay": 0.8, "draft_num_hidden_layers": 1}
        aim = {"num_target_layers": max(layers) + 2, "target_model_name_or_path": "owner/name"}
        return {
            "architectures": ["Qwen3Eagle3Model"],
            "target_layer_ids": list(layers),
            "layer_types": ["full_attention"],
            "tie_word_embeddings": False,
            **layer,
            **trained,
            **aim,
            **kind.more,
        }
    nested = {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True}
    return {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": nested, **layer, **own}


def write(
    folder: Path,
    kind: Kind,
    vocab: int,
    size: int,
    layers: tuple[int, ...],
    *,
    bits: int = 0,
    dtype: mx.Dtype = mx.float32,
) -> Arrays:
    """A folder of that kind; returns its values under the names of the speculators library, as they are after quantizing."""
    folder.mkdir(parents=True, exist_ok=True)
    made = arrays(kind, vocab, size, len(layers))
    tensors: dict[str, mx.array] = {}
    for name, value in made.items():
        if bits and value.ndim == 2 and name != "embed_tokens.weight":
            path, form = name.removesuffix(".weight"), {"group_size": 32, "bits": bits}
            packed, scales, biases = mx.quantize(mx.array(value), **form)
            tensors |= {name: packed, f"{path}.scales": scales, f"{path}.biases": biases}
            made[name] = np.array(mx.dequantize(packed, scales, biases, **form))
        else:
            kept = mx.array(value).astype(dtype) if value.ndim == 2 else mx.array(value)
            tensors[name] = kept
            made[name] = np.array(kept.astype(mx.float32)) if value.ndim == 2 else value
    mx.save_safetensors(
        str(folder / "model.safetensors"), {_published(k, kind.layout): v for k, v in tensors.items()}
    )
    (folder / "config.json").write_text(json.dumps(config(kind, vocab, size, layers)))
    return made


def _published(name: str, layout: str) -> str:
    if layout == "SafeAILab":
        return name.replace("layers.0.", "midlayer.")
    return f"model.{name}" if layout == "model." and name not in ("lm_head.weight", "d2t", "t2d") else name


# --- the algorithm


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _rotated(x: np.ndarray, num: int) -> np.ndarray:
    """(n, heads, D): the first `num` numbers of each head turned by its position, which begins with 1."""
    angles = np.arange(1, len(x) + 1)[:, None, None] * THETA ** (-np.arange(0, num, 2) / num)
    low, high, rest = x[..., : num // 2], x[..., num // 2 : num], x[..., num:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)


def _layer(kind: Kind, w: Arrays, embedded: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """(n, H) twice -> (n, H), every cell of a text."""
    at = {
        k.removeprefix("layers.0.").removesuffix(".weight"): v
        for k, v in w.items()
        if k.startswith("layers.0.")
    }
    normed = _norm(hidden, at["hidden_norm"])
    both = np.concatenate([_norm(embedded, at["input_layernorm"]), normed], axis=-1)
    num = len(both)
    q = (both @ at["self_attn.q_proj"].T).reshape(num, HEADS, HEAD_DIM)
    k = (both @ at["self_attn.k_proj"].T).reshape(num, KV_HEADS, HEAD_DIM)
    if kind.norms_heads:
        q, k = _norm(q, at["self_attn.q_norm"]), _norm(k, at["self_attn.k_norm"])
    q, k = _rotated(q, kind.rotated), _rotated(k, kind.rotated)
    v = (both @ at["self_attn.v_proj"].T).reshape(num, KV_HEADS, HEAD_DIM)
    k, v = (np.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(HEAD_DIM)
    scores = np.where(np.tril(np.ones((num, num), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    attended = np.einsum("hij,jhd->ihd", weights, v).reshape(num, -1)
    x = (normed if kind.norm_before_residual else hidden) + attended @ at["self_attn.o_proj"].T
    y = _norm(x, at["post_attention_layernorm"])
    return x + (_silu(y @ at["mlp.gate_proj"].T) * (y @ at["mlp.up_proj"].T)) @ at["mlp.down_proj"].T


def steps(
    kind: Kind, w: Arrays, embedding: np.ndarray, text: list[int], shown: np.ndarray, num: int
) -> tuple[np.ndarray, list[int]]:
    """Logits (num, rows) of `num` greedy steps behind a text of 2 tokens at least, and the target's tokens they say. embedding: the
    target's (V, H). shown (len(text), layers * H): the streams of the token before each token."""
    w = {k: v.astype(np.float64) if v.dtype.kind == "f" else v for k, v in w.items()}
    table = w.get("embed_tokens.weight", embedding.astype(np.float64))
    ids = np.arange(len(w["lm_head.weight"]))
    ids = ids + w["d2t"] if "d2t" in w else ids
    streams = shown[1:].astype(np.float64)
    if kind.norm_before_fc:
        streams = _norm(streams, w["input_norm.weight"])
    if kind.fc_norm:
        parts = np.split(streams, len([k for k in w if k.startswith("fc_norm.")]), axis=1)
        streams = np.concatenate([_norm(p, w[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)], axis=1)
    hidden, tokens = streams @ w["fc.weight"].T, list(text[1:])
    found, said = [], []
    for _ in range(num):
        out = _layer(kind, w, table[tokens], hidden)[-1:]
        last = _norm(out, w["norm.weight"])
        found.append((last @ w["lm_head.weight"].T)[0])
        said.append(int(ids[found[-1].argmax()]))
        tokens = [*tokens, said[-1]]
        hidden = np.concatenate([hidden, last if kind.norm_output else out])
    return np.stack(found), said
