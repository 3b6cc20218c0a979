"""The demo model with a vision tower of random weights: a folder as they are found in the wild, with tokenizer, template and an MTP head.

What it says of an image means nothing; but its text, its drafters and its prompts are real ones.
"""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
from PIL import Image

import mlxspec.demo

DEMO = Path(mlxspec.demo.__file__).parent / "target"
START, IMAGE, END = 2048, 2049, 2050
_ADDED = {"<|vision_start|>": START, "<|image_pad|>": IMAGE, "<|vision_end|>": END}
_ROWS = 2056
_SIZE, _INNER, _PATCH = 128, 96, 16
_VISION = {
    "model_type": "qwen3_5_vision",
    "depth": 2,
    "hidden_size": _SIZE,
    "intermediate_size": _INNER,
    "num_heads": 2,
    "out_hidden_size": 192,
    "in_channels": 3,
    "patch_size": _PATCH,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 36,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
}
_SETTINGS = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 4096, "longest_edge": 65536},
    "patch_size": _PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "rescale_factor": 1 / 255,
}
_REFUSES = "{% else %}{{ raise_exception('This demo model reads text only.') }}{% endif %}"
_TAKES = "{% elif part.type == 'image' %}{% set ns.text = ns.text + '<|vision_start|><|image_pad|><|vision_end|>' %}"


def write(folder: Path) -> Path:
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {**config, "model_type": "qwen3_5_text", "vocab_size": _ROWS},
        "vision_config": _VISION,
        "image_token_id": IMAGE,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "tie_word_embeddings": False,
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
    }
    (folder / "config.json").write_text(json.dumps(outer))
    (folder / "preprocessor_config.json").write_text(json.dumps(_SETTINGS))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [{**like, "id": i, "content": text} for text, i in _ADDED.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = folder / "chat_template.jinja"
    source = template.read_text()
    assert source.count(_REFUSES) == 1
    template.write_text(source.replace(_REFUSES, _TAKES + _REFUSES))
    weights = dict(mx.load(str(folder / "model.safetensors")).items())
    for name, value in list(weights.items()):
        if value.shape[0] == 2048 and ("embed_tokens" in name or "lm_head" in name):
            more = mx.zeros((_ROWS - 2048, *value.shape[1:]), value.dtype)
            weights[name] = mx.concatenate([value, more])
    weights |= _tower()
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    return folder


def _tower() -> dict[str, mx.array]:
    rng, found = np.random.default_rng(1), {}

    def put(name: str, *shape: int, scale: float = 1.0) -> None:
        drawn = rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        found[f"model.visual.{name}"] = mx.array(drawn).astype(mx.bfloat16)

    def linear(name: str, out: int, *inputs: int) -> None:
        put(f"{name}.weight", out, *inputs, scale=float(np.prod(inputs)) ** -0.5)
        put(f"{name}.bias", out, scale=0.1)

    def norm(name: str) -> None:
        found[f"model.visual.{name}.weight"] = mx.ones(_SIZE).astype(mx.bfloat16)
        found[f"model.visual.{name}.bias"] = mx.zeros(_SIZE).astype(mx.bfloat16)

    linear("patch_embed.proj", _SIZE, 3, 2, _PATCH, _PATCH)
    put("pos_embed.weight", 36, _SIZE)
    for i in range(2):
        norm(f"blocks.{i}.norm1")
        norm(f"blocks.{i}.norm2")
        linear(f"blocks.{i}.attn.qkv", 3 * _SIZE, _SIZE)
        linear(f"blocks.{i}.attn.proj", _SIZE, _SIZE)
        linear(f"blocks.{i}.mlp.linear_fc1", _INNER, _SIZE)
        linear(f"blocks.{i}.mlp.linear_fc2", _SIZE, _INNER)
    norm("merger.norm")
    linear("merger.linear_fc1", 4 * _SIZE, 4 * _SIZE)
    linear("merger.linear_fc2", 192, 4 * _SIZE)
    return found


def picture(width: int = 96, height: int = 64, seed: int = 0, form: str = "PNG") -> bytes:
    """A file of noise."""
    drawn = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(drawn).save(file, form)
    return file.getvalue()
