"""Tiny multimodal checkpoints of every family: the text weights of `tiny` and `tiny_gemma`, and a vision tower with random weights.

Knows file layouts and tensor names; knows nothing of mlxspec. Weights are drawn by numpy, so every machine gets the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import tiny
import tiny_gemma

Arrays = dict[str, np.ndarray]
IMAGE, START, END = 190, 191, 192  # token ids


@dataclass(frozen=True, kw_only=True)
class Family:
    """text: key of `tiny.SHAPES` or `tiny_gemma.CONFIGS`. vision: `vision_config`. settings: preprocessor_config.json. draw: tensors of the
    tower as on the hub. wide: whether image tokens attend to each other, as the text config says it."""

    kind: str
    text: str
    vision: dict[str, Any]
    settings: dict[str, Any]
    draw: Callable[[Family], Arrays]
    wide: bool = False
    outer: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        if self.kind == "qwen3_5":
            base = tiny.hub_config(tiny.SHAPES[self.text])
        else:
            text = tiny_gemma.CONFIGS[self.text]
            base = {
                "model_type": self.kind,
                "vocab_size": text["vocab_size"],
                "text_config": {**text, "pad_token_id": 0},
            }
            if self.kind == "gemma4_unified":
                base["text_config"]["model_type"] = "gemma4_unified_text"
            if self.wide:
                base["text_config"]["use_bidirectional_attention"] = "vision"
        return base | {"vision_config": self.vision} | self.outer

    def arrays(self) -> Arrays:
        """All tensors, as on the hub."""
        if self.kind == "qwen3_5":
            return _renamed(tiny.weights(tiny.SHAPES[self.text]), "model.language_model.") | self.draw(self)
        text = "language_model.model." if self.kind == "gemma3" else "model.language_model."
        return _renamed(tiny_gemma.weights(tiny_gemma.CONFIGS[self.text]), text) | self.draw(self)

    def write(self, folder: Path, change: Callable[[Arrays], Arrays] = lambda arrays: arrays) -> Path:
        """change: of the tensors, before they are written."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {k: mx.array(v) for k, v in change(self.arrays()).items()}
        mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config(), indent=1))
        (folder / "preprocessor_config.json").write_text(json.dumps(self.settings, indent=1))
        return folder


def _renamed(arrays: Arrays, text: str) -> Arrays:
    return {k.replace("model.", text, 1) if k.startswith("model.") else k: v for k, v in arrays.items()}


class _Draw:
    def __init__(self, seed: int, prefix: str) -> None:
        self._random, self._prefix = np.random.default_rng(seed), prefix
        self.arrays: Arrays = {}

    def linear(self, name: str, out: int, *inputs: int, bias: bool = True) -> None:
        self.put(f"{name}.weight", self.normal(out, *inputs) / np.sqrt(np.prod(inputs)))
        if bias:
            self.put(f"{name}.bias", 0.2 * self.normal(out))

    def norm(self, name: str, size: int, *, around: float = 1.0, bias: bool = False) -> None:
        self.put(f"{name}.weight", around + 0.2 * self.normal(size))
        if bias:
            self.put(f"{name}.bias", 0.2 * self.normal(size))

    def put(self, name: str, values: np.ndarray) -> None:
        self.arrays[self._prefix + name] = np.asarray(values, np.float32)

    def normal(self, *shape: int) -> np.ndarray:
        return self._random.standard_normal(shape, dtype=np.float32)


def _qwen(f: Family) -> Arrays:
    v, draw = f.vision, _Draw(f.vision["hidden_size"], "model.visual.")
    size, inner, patch = v["hidden_size"], v["intermediate_size"], v["patch_size"]
    draw.linear("patch_embed.proj", size, 3, 2, patch, patch)
    draw.put("pos_embed.weight", draw.normal(v["num_position_embeddings"], size))
    for i in range(v["depth"]):
        base = f"blocks.{i}."
        draw.norm(base + "norm1", size, bias=True)
        draw.norm(base + "norm2", size, bias=True)
        draw.linear(base + "attn.qkv", 3 * size, size)
        draw.linear(base + "attn.proj", size, size)
        draw.linear(base + "mlp.linear_fc1", inner, size)
        draw.linear(base + "mlp.linear_fc2", size, inner)
    draw.norm("merger.norm", size, bias=True)
    draw.linear("merger.linear_fc1", 4 * size, 4 * size)
    draw.linear("merger.linear_fc2", v["out_hidden_size"], 4 * size)
    return draw.arrays


def _siglip(f: Family) -> Arrays:
    v, draw = f.vision, _Draw(3, "")
    size, inner, patch = v["hidden_size"], v["intermediate_size"], v["patch_size"]
    top = "vision_tower.vision_model."
    draw.linear(top + "embeddings.patch_embedding", size, 3, patch, patch)
    draw.put(top + "embeddings.position_embedding.weight", draw.normal((v["image_size"] // patch) ** 2, size))
    for i in range(v["num_hidden_layers"]):
        base = f"{top}encoder.layers.{i}."
        for name in ("layer_norm1", "layer_norm2"):
            draw.norm(base + name, size, bias=True)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            draw.linear(f"{base}self_attn.{name}", size, size)
        draw.linear(base + "mlp.fc1", inner, size)
        draw.linear(base + "mlp.fc2", size, inner)
    draw.norm(top + "post_layernorm", size, bias=True)
    hidden = tiny_gemma.CONFIGS[f.text]["hidden_size"]
    draw.put("multi_modal_projector.mm_input_projection_weight", draw.normal(size, hidden) / np.sqrt(size))
    draw.norm("multi_modal_projector.mm_soft_emb_norm", size, around=0.0)
    return draw.arrays


def _gemma4(f: Family) -> Arrays:
    v, draw = f.vision, _Draw(4, "model.")
    size, inner, dim = v["hidden_size"], v["intermediate_size"], v["head_dim"]

    def linear(name: str, out: int, given: int) -> None:
        draw.linear(f"{name}.linear", out, given, bias=False)
        if v["use_clipped_linears"]:
            for bound, sign in (("min", -1), ("max", 1)):
                draw.put(f"{name}.input_{bound}", np.array(sign * (1.2 + 0.1 * sign)))
                draw.put(f"{name}.output_{bound}", np.array(sign * (1.5 - 0.1 * sign)))

    top = "vision_tower."
    draw.linear(top + "patch_embedder.input_proj", size, 3 * v["patch_size"] ** 2, bias=False)
    draw.put(
        top + "patch_embedder.position_embedding_table", draw.normal(2, v["position_embedding_size"], size)
    )
    for i in range(v["num_hidden_layers"]):
        base = f"{top}encoder.layers.{i}."
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            draw.norm(f"{base}{name}_layernorm", size)
        for name in ("q", "k", "v"):
            linear(f"{base}self_attn.{name}_proj", v["num_attention_heads"] * dim, size)
        linear(base + "self_attn.o_proj", size, v["num_attention_heads"] * dim)
        draw.norm(base + "self_attn.q_norm", dim)
        draw.norm(base + "self_attn.k_norm", dim)
        linear(base + "mlp.gate_proj", inner, size)
        linear(base + "mlp.up_proj", inner, size)
        linear(base + "mlp.down_proj", size, inner)
    if v["standardize"]:
        draw.put(top + "std_bias", draw.normal(size))
        draw.put(top + "std_scale", 1 + 0.2 * draw.normal(size))
    hidden = tiny_gemma.CONFIGS[f.text]["hidden_size"]
    draw.linear("embed_vision.embedding_projection", hidden, size, bias=False)
    return draw.arrays


def _unified(f: Family) -> Arrays:
    v, draw = f.vision, _Draw(5, "model.")
    size, patch = v["mm_embed_dim"], 3 * (v["patch_size"] * v["pooling_kernel_size"]) ** 2
    top = "vision_embedder."
    draw.norm(top + "patch_ln1", patch, bias=True)
    draw.linear(top + "patch_dense", size, patch)
    draw.norm(top + "patch_ln2", size, bias=True)
    draw.put(top + "pos_embedding", draw.normal(v["mm_posemb_size"], 2, size))
    draw.norm(top + "pos_norm", size, bias=True)
    hidden = tiny_gemma.CONFIGS[f.text]["hidden_size"]
    draw.linear("embed_vision.embedding_projection", hidden, size, bias=False)
    return draw.arrays


_THIRD = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255}
_QWEN = {
    "model_type": "qwen3_5_vision",
    "depth": 2,
    "intermediate_size": 96,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 36,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
}
_QWEN_SETTINGS = {
    **_THIRD,
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 256, "longest_edge": 16384},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
_QWEN_OUTER = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
_GEMMA4 = {
    "model_type": "gemma4_vision",
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "position_embedding_size": 300,
    "use_clipped_linears": False,
    "standardize": False,
}
_GEMMA4_SETTINGS = {
    "image_processor_type": "Gemma4ImageProcessor",
    "do_normalize": False,
    "max_soft_tokens": 70,
    "patch_size": 4,
    "pooling_kernel_size": 3,
}
_GEMMA4_OUTER = {
    "audio_config": None,
    "image_token_id": IMAGE,
    "boi_token_id": START,
    "eoi_token_id": END,
    "eoi_token_index": END,
}

FAMILIES = {
    "qwen-64": Family(
        kind="qwen3_5",
        text="tied",
        vision={**_QWEN, "hidden_size": 128},
        settings=_QWEN_SETTINGS,
        draw=_qwen,
        outer=_QWEN_OUTER,
    ),
    "qwen-72": Family(
        kind="qwen3_5",
        text="tied",
        vision={**_QWEN, "hidden_size": 144},
        settings=_QWEN_SETTINGS,
        draw=_qwen,
        outer=_QWEN_OUTER,
    ),
    "gemma3": Family(
        kind="gemma3",
        text="gemma3",
        vision={
            "model_type": "siglip_vision_model",
            "num_hidden_layers": 2,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 7,
            "vision_use_head": False,
        },
        settings={
            **_THIRD,
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 56, "width": 56},
            "resample": 2,
        },
        draw=_siglip,
        outer={
            "mm_tokens_per_image": 16,
            "image_token_index": IMAGE,
            "boi_token_index": START,
            "eoi_token_index": END,
        },
    ),
    "gemma4-clipped": Family(
        kind="gemma4",
        text="gemma4-e",
        vision={**_GEMMA4, "use_clipped_linears": True},
        settings=_GEMMA4_SETTINGS,
        draw=_gemma4,
        outer=_GEMMA4_OUTER,
    ),
    "gemma4-standard": Family(
        kind="gemma4",
        text="gemma4-dense",
        vision={**_GEMMA4, "standardize": True},
        settings=_GEMMA4_SETTINGS,
        draw=_gemma4,
        wide=True,
        outer=_GEMMA4_OUTER,
    ),
    "gemma4-unified": Family(
        kind="gemma4_unified",
        text="gemma4-dense",
        vision={
            "model_type": "gemma4_unified_vision",
            "patch_size": 4,
            "pooling_kernel_size": 3,
            "mm_embed_dim": 40,
            "mm_posemb_size": 100,
            "output_proj_dims": 40,
        },
        settings=_GEMMA4_SETTINGS,
        draw=_unified,
        wide=True,
        outer=_GEMMA4_OUTER,
    ),
}


def load(folder: Path, dtype: mx.Dtype | None = None) -> Any:
    """The `Assembled` model of a folder, with its vision."""
    from mlxspec.loading.weights import read_folder
    from mlxspec.models.assemble import assemble_lazily
    from mlxspec.models.vision.settings import image_settings

    config = json.loads((folder / "config.json").read_text())
    return assemble_lazily(config, lambda: read_folder(folder), dtype, images=partial(image_settings, folder))
