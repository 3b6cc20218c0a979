"""Tiny block drafters with random weights in their published layouts: DFlash, DFlash2 and DSpark; and what they compute, written in numpy
from the algorithm alone.

Knows file layouts, tensor names and the algorithm; knows nothing of mlxspec.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

Arrays = dict[str, np.ndarray]
Config = dict[str, Any]
HEADS, KV_HEADS, DIM, FFN, RANK, GROUP = 4, 2, 16, 96, 8, 16
KINDS = ("DFlash", "DFlash2", "DSpark")


def config(
    kind: str,
    *,
    hidden: int,
    vocab: int,
    target_layers: int,
    layer_ids: tuple[int, ...],
    mask_id: int,
    block: int = 8,
    window: int | None = 7,
    **more: Any,
) -> Config:
    """config.json as published: `dflash_config` beside the sizes of the layers. window: of the second of two layers."""
    inner: Config = {"mask_token_id": mask_id, "target_layer_ids": list(layer_ids)}
    found: Config = {
        "architectures": [f"{kind}DraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "intermediate_size": FFN,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "block_size": block,
        "num_target_layers": target_layers,
    }
    if window is not None:
        found |= {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": window}
    if kind == "DFlash2":
        inner |= {
            "conv_kernel_size": 2,
            "conv_group_size": GROUP,
            "selector_rank": RANK,
            "selector_top_k": 16,
        }
    if kind == "DSpark":
        inner |= {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True}
    return found | {"dflash_config": inner} | more


def weights(kind: str, c: Config, seed: int = 0, *, own_ends: bool = False) -> Arrays:
    """All tensors. own_ends: an embedding and a head of its own too."""
    rng, hidden, out = np.random.default_rng(seed), c["hidden_size"], Arrays()

    def matrix(name: str, *shape: int, size: float = 1.0) -> None:
        out[name] = (rng.standard_normal(shape) * size / np.sqrt(shape[-1])).astype(np.float32)

    def norm(name: str, size: int) -> None:
        out[f"{name}.weight"] = rng.uniform(0.7, 1.3, size).astype(np.float32)

    matrix("fc.weight", hidden, len(c["dflash_config"]["target_layer_ids"]) * hidden)
    norm("hidden_norm", hidden)
    norm("norm", hidden)
    for i in range(c["num_hidden_layers"]):
        base = f"layers.{i}."
        norm(base + "input_layernorm", hidden)
        norm(base + "post_attention_layernorm", hidden)
        for name, shape in {
            "q_proj": (HEADS * DIM, hidden), "k_proj": (KV_HEADS * DIM, hidden), "v_proj": (KV_HEADS * DIM, hidden),
            "o_proj": (hidden, HEADS * DIM),
        }.items():  # fmt: skip
            matrix(f"{base}self_attn.{name}.weight", *shape)
        norm(base + "self_attn.q_norm", DIM)
        norm(base + "self_attn.k_norm", DIM)
        for name, shape in {
            "gate_proj": (FFN, hidden),
            "up_proj": (FFN, hidden),
            "down_proj": (hidden, FFN),
        }.items():
            matrix(f"{base}mlp.{name}.weight", *shape)
        if kind == "DFlash2":
            for conv in ("attention_conv", "mlp_conv"):
                out[f"{base}{conv}.base_kernel"] = rng.uniform(-0.2, 1.0, (2, 2, hidden)).astype(np.float32)
                matrix(f"{base}{conv}.kernel_projection.weight", 4 * (hidden // GROUP), hidden, size=0.3)
    if kind == "DFlash2":
        for name in ("predecessor_codebook", "successor_codebook"):
            matrix(f"candidate_selector.{name}", c["vocab_size"], RANK, size=2.0)
        matrix("candidate_selector.hidden_projection.weight", RANK, hidden)
    if kind == "DSpark":
        matrix("markov_head.markov_w1.weight", c["vocab_size"], RANK, size=3.0)
        matrix("markov_head.markov_w2.weight", c["vocab_size"], RANK, size=3.0)
        matrix("confidence_head.proj.weight", 1, hidden + RANK)
        out["confidence_head.proj.bias"] = np.asarray([0.25], np.float32)
    if own_ends:
        matrix("embed_tokens.weight", c["vocab_size"], hidden)
        matrix("lm_head.weight", c["vocab_size"], hidden, size=4.0)
    return out


def as_speculators(c: Config, arrays: Arrays, rows: np.ndarray | None = None) -> tuple[Config, Arrays]:
    """The same drafter in the speculators library's layout. rows: ids of the target's tokens that its head keeps, ascending; None: it has
    no vocabulary of its own."""
    inner, own = c["dflash_config"], {"block_size", "dflash_config", "num_target_layers", "architectures"}
    layer = {k: v for k, v in c.items() if k not in own}
    if "sliding_window" in layer:
        layer["sliding_window"] -= 1  # without the block's first
    kind = "dspark" if "markov_rank" in inner else "dflash"
    found = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "speculators_config": {"algorithm": kind},
        "transformer_layer_config": layer,
        "block_size": c["block_size"],
        "draft_vocab_size": c["vocab_size"] if rows is None else len(rows),
        "aux_hidden_state_layer_ids": [i + 1 for i in inner["target_layer_ids"]],
        "mask_token_id": inner["mask_token_id"],
        "sample_from_anchor": kind == "dspark",
        **{k: inner[k] for k in ("markov_rank", "markov_head_type", "enable_confidence_head") if k in inner},
    }
    out = dict(arrays)
    if rows is not None:
        for name in {"lm_head.weight", "markov_head.markov_w2.weight"} & out.keys():
            out[name] = arrays[name][rows]
        out["d2t"] = rows - np.arange(len(rows))
        out["t2d"] = np.isin(np.arange(c["vocab_size"]), rows)
        out["verifier_norm.weight"] = np.ones(c["hidden_size"], np.float32)
    return found, out


def write(folder: Path, c: Config, arrays: Arrays, *, dtype: mx.Dtype = mx.float32) -> Path:
    """As published: one file, names without a prefix."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        k: mx.array(v).astype(dtype) if v.dtype == np.float32 else mx.array(v) for k, v in arrays.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(c, indent=1))
    return folder


class Reference:
    """What a block gives, from all committed features at once: no cache, float64. causal: which layers are: those with a window, unless it
    is changed. starts_at_anchor: the newest token's place predicts the first token."""

    def __init__(self, kind: str, c: Config, arrays: Arrays, embed: np.ndarray, head: np.ndarray) -> None:
        """embed, head (V, H): the target's, used where the drafter has none of its own."""
        self.kind, self.c, self.starts_at_anchor = kind, c, kind == "DSpark"
        self.causal = [self._window(i) is not None for i in range(c["num_hidden_layers"])]
        self.dim, self.heads = c["head_dim"], c["num_attention_heads"]
        self.groups = self.heads // c["num_key_value_heads"]
        self.w = {k: v.astype(np.float64) for k, v in arrays.items()}
        self.embed = self.w.get("embed_tokens.weight", embed.astype(np.float64))
        self.head = self.w.get("lm_head.weight", head.astype(np.float64))

    def block(self, features: np.ndarray, newest: int, num_drafts: int) -> tuple[np.ndarray, np.ndarray]:
        """features (n, layers * H) of positions 0 to n - 1, behind which the newest token stands -> hidden (num_drafts, H) of the places
        that predict, and their own logits (num_drafts, V)."""
        c, w = self.c, self.w
        mask = c["dflash_config"]["mask_token_id"]
        masks = num_drafts - 1 if self.starts_at_anchor else num_drafts
        context = self._norm("hidden_norm", features.astype(np.float64) @ w["fc.weight"].T)
        x, n = self.embed[[newest] + [mask] * masks], len(features)
        for i in range(c["num_hidden_layers"]):
            base = f"layers.{i}."
            seen, back = self._conv(base + "attention_conv", self._norm(base + "input_layernorm", x))
            x = x + back(self._attention(base + "self_attn.", seen, context, n, i))
            seen, back = self._conv(base + "mlp_conv", self._norm(base + "post_attention_layernorm", x))
            gate, up = (seen @ w[f"{base}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + back((gate / (1 + np.exp(-gate)) * up) @ w[f"{base}mlp.down_proj.weight"].T)
        hidden = self._norm("norm", x)[len(x) - num_drafts :]
        return hidden, hidden @ self.head.T

    def behind(self, hidden: np.ndarray, logits: np.ndarray, before: int) -> np.ndarray:
        """One place's logits (V,) behind the token before it; -inf for what is no candidate."""
        if self.kind == "DFlash":
            return logits
        if self.kind == "DSpark":
            return (
                logits
                + self.w["markov_head.markov_w2.weight"] @ self.w["markov_head.markov_w1.weight"][before]
            )
        best = np.argsort(logits)[-self.c["dflash_config"]["selector_top_k"] :]
        one, two = (self.w[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor"))
        between = one[before] * (self.w["candidate_selector.hidden_projection.weight"] @ hidden)
        out = np.full_like(logits, -np.inf)
        out[best] = logits[best] + two[best] @ between
        return out

    def sureness(self, hidden: np.ndarray, before: int) -> float:
        """DSpark's confidence head."""
        seen = np.concatenate([hidden, self.w["markov_head.markov_w1.weight"][before]])
        told = self.w["confidence_head.proj.weight"][0] @ seen + self.w["confidence_head.proj.bias"][0]
        return float(1 / (1 + np.exp(-told)))

    def _window(self, i: int) -> int | None:
        kinds = self.c.get("layer_types")
        return self.c["sliding_window"] if kinds and kinds[i] == "sliding_attention" else None

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        mean = (x**2).mean(-1, keepdims=True)
        return x / np.sqrt(mean + self.c["rms_norm_eps"]) * self.w[f"{name}.weight"]

    def _conv(self, name: str, x: np.ndarray) -> tuple[np.ndarray, Any]:
        if f"{name}.base_kernel" not in self.w:
            return x, lambda y: y
        base = self.w[f"{name}.base_kernel"]  # (2, K, H)
        said = (x @ self.w[f"{name}.kernel_projection.weight"].T).reshape(len(x), 2, base.shape[1], -1)

        def run(which: int, y: np.ndarray) -> np.ndarray:
            out = np.zeros_like(y)
            for i in range(len(y)):
                for t in range(min(base.shape[1], i + 1)):
                    out[i] += (base[which, t] + np.repeat(said[i, which, t], GROUP)) * y[i - t]
            return out

        return run(0, x), lambda y: run(1, y)

    def _attention(self, base: str, x: np.ndarray, context: np.ndarray, n: int, layer: int) -> np.ndarray:
        w, num, window = self.w, len(x), self._window(layer)
        places = np.arange(n + num)
        both = np.concatenate([context, x])
        k = self._turn(self._heads(base + "k_norm", both @ w[base + "k_proj.weight"].T), places)
        v = (both @ w[base + "v_proj.weight"].T).reshape(n + num, -1, self.dim)
        q = self._turn(self._heads(base + "q_norm", x @ w[base + "q_proj.weight"].T), places[n:])
        first = 0 if window is None else max(0, n - (window - 1))
        outs = np.zeros((num, self.heads, self.dim))
        for h in range(self.heads):
            kv = h // self.groups
            scores = q[:, h] @ k[first:, kv].T / np.sqrt(self.dim)
            if self.causal[layer]:
                scores = np.where(places[first:] <= places[n:, None], scores, -np.inf)
            chances = np.exp(scores - scores.max(-1, keepdims=True))
            outs[:, h] = chances / chances.sum(-1, keepdims=True) @ v[first:, kv]
        return outs.reshape(num, -1) @ w[base + "o_proj.weight"].T

    def _heads(self, name: str, x: np.ndarray) -> np.ndarray:
        return self._norm(name, x.reshape(len(x), -1, self.dim))

    def _turn(self, x: np.ndarray, places: np.ndarray) -> np.ndarray:
        angles = places[:, None] * self.c["rope_theta"] ** (-np.arange(0, self.dim, 2) / self.dim)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
