"""What an MTP head drafts behind a text, computed anew from the whole text: from modules of mlx-lm or of transformers, put together as the
heads were trained. Nothing of mlxspec takes part.

Cell t is made of the embedding of token t + 1 and of the target's hidden behind token t, for t = 0, 1, ...: there is no cell in which one
of the two is missing. A drafted token has no hidden of the target; there the head's own output of the cell before takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

# (tokens (n,), hiddens (n, H)) -> outputs behind the head's norm (n, H), with causal attention over all cells
Head = Callable[[list[int], np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """hiddens: tokens (n,) -> the target's hiddens behind its final norm (n, H). lm_head (V, H)."""

    hiddens: Callable[[list[int]], np.ndarray]
    head: Head
    lm_head: np.ndarray

    def draft(self, text: list[int], num: int) -> list[tuple[int, float, float]]:
        """`num` greedy drafts behind `text` (2 tokens at least): token, its probability, and how far its logit lies above the next."""
        tokens, hiddens = text[1:], self.hiddens(text[:-1])
        found = []
        for _ in range(num):
            outputs = self.head(tokens, hiddens)
            logits = outputs[-1].astype(np.float64) @ self.lm_head.T.astype(np.float64)
            second, best = np.sort(logits)[-2:]
            token = int(logits.argmax())
            found.append((token, 1 / float(np.exp(logits - best).sum()), float(best - second)))
            tokens, hiddens = [*tokens, token], np.concatenate([hiddens, outputs[-1:]])
        return found


def of_mlx_lm(folder: Path, hub: Path | None = None) -> Reference:
    """Of a raw text-only folder of one file. hub: the same model as mlx-lm can read it, where it cannot read that."""
    from mlx_lm.models.qwen3_5 import DecoderLayer
    from mlx_lm.utils import load_model

    model = load_model(hub or folder)[0]
    model.set_dtype(mx.float32)
    arrays = raw_arrays(folder)
    trunk, args = model.language_model.model, model.language_model.args

    def hiddens(tokens: list[int]) -> np.ndarray:
        return np.array(trunk(mx.array([tokens], mx.int32))[0])

    return Reference(
        hiddens=hiddens,
        head=mlx_lm_head(DecoderLayer(args, args.full_attention_interval - 1), args.rms_norm_eps, arrays),
        lm_head=_lm_head(arrays),
    )


def mlx_lm_head(layer: Any, eps: float, arrays: dict[str, np.ndarray]) -> Head:
    """layer: a full-attention layer of mlx-lm, its weights not yet filled. arrays: raw tensors of the whole model."""
    raw, own = {k.removeprefix("mtp."): v for k, v in arrays.items() if k.startswith("mtp.")}, {}
    table = arrays["model.embed_tokens.weight"]
    for name, value in raw.items():
        if not name.startswith("layers.0."):
            continue
        name, value = name.removeprefix("layers.0."), value + 1 if "norm" in name else value
        base, _, kind = name.rpartition("experts.")
        if base and kind == "gate_up_proj":
            gate, up = np.split(value, 2, axis=1)
            own |= {base + "switch_mlp.gate_proj.weight": gate, base + "switch_mlp.up_proj.weight": up}
        elif base and kind == "down_proj":
            own[base + "switch_mlp.down_proj.weight"] = value
        else:
            own[name] = value
    layer.load_weights([(k, mx.array(v)) for k, v in own.items()], strict=True)

    def norm(name: str, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, mx.array(raw[name] + 1), eps)

    def run(tokens: list[int], hiddens: np.ndarray) -> np.ndarray:
        e = norm("pre_fc_norm_embedding.weight", mx.array(table[tokens]))
        h = norm("pre_fc_norm_hidden.weight", mx.array(hiddens))
        x = mx.concatenate([e, h], axis=-1) @ mx.array(raw["fc.weight"]).T
        return np.array(norm("norm.weight", layer(x[None], mask="causal")[0]))

    return run


def raw_arrays(folder: Path) -> dict[str, np.ndarray]:
    """The folder's tensors as they are stored, in float32."""
    return {k: np.array(v.astype(mx.float32)) for k, v in mx.load(str(folder / "model.safetensors")).items()}


def _lm_head(arrays: dict[str, np.ndarray]) -> np.ndarray:
    return arrays.get("lm_head.weight", arrays["model.embed_tokens.weight"])
