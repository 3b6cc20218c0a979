"""Writes the demo that reads pictures: a Hugging Face folder with a tower, whose tokenizer has three tokens more than the target's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from demo_data.chat import CHAT_TEMPLATE
from safetensors.torch import save_file

from .export import _tensor, _write_json, config
from .vision_network import FRAMES, Reader
from .vision_phase import IMAGE, IMAGES, TEXT, TOWER, VISION_END, VISION_START

TOKENS = {VISION_START: "<|vision_start|>", VISION_END: "<|vision_end|>", IMAGE: "<|image_pad|>"}
_TEXT_ONLY = "{{ raise_exception('This demo model reads text only.') }}"
_PICTURE = "{% set ns.text = ns.text + '<|vision_start|><|image_pad|><|vision_end|>' %}"
_ELSE = "{% if part.type == 'text' %}{% set ns.text = ns.text + part.text %}{% else %}"
_OR_IMAGE = (
    "{% if part.type == 'text' %}{% set ns.text = ns.text + part.text %}"
    "{% elif part.type in ['image', 'image_url'] %}" + _PICTURE + "{% else %}"
)
TEMPLATE = CHAT_TEMPLATE.replace(_ELSE, _OR_IMAGE).replace(
    _TEXT_ONLY, "{{ raise_exception('This demo model reads text and images only.') }}"
)


def vision_config() -> dict[str, object]:
    """config.json."""
    text = config(TEXT)
    outer = {k: text.pop(k) for k in ("tie_word_embeddings", "dtype")}
    text.pop("architectures")
    text["model_type"] = "qwen3_5_text"
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text | {"tie_word_embeddings": outer["tie_word_embeddings"]},
        "vision_config": {
            "model_type": "qwen3_5_vision",
            "depth": TOWER.depth,
            "hidden_size": TOWER.hidden,
            "intermediate_size": TOWER.ffn,
            "num_heads": TOWER.heads,
            "out_hidden_size": TOWER.out,
            "in_channels": 3,
            "patch_size": TOWER.patch,
            "temporal_patch_size": FRAMES,
            "spatial_merge_size": TOWER.merge,
            "num_position_embeddings": TOWER.places**2,
            "hidden_act": "gelu_pytorch_tanh",
            "deepstack_visual_indexes": [],
        },
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "image_token_id": IMAGE,
        "eos_token_id": 2,
        **outer,
    }


def settings() -> dict[str, object]:
    """preprocessor_config.json."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": IMAGES.min_pixels, "longest_edge": IMAGES.max_pixels},
        "patch_size": TOWER.patch,
        "temporal_patch_size": FRAMES,
        "merge_size": TOWER.merge,
        "image_mean": list(IMAGES.mean),
        "image_std": list(IMAGES.std),
        "rescale_factor": IMAGES.scale,
        "resample": 3,
    }


def _name(name: str) -> str:
    if name.startswith("visual."):
        return f"model.{name}"
    name = name.removeprefix("text.")
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def export_vision(reader: Reader, target: Path, out: Path, *, steps: int = 0) -> None:
    """target: the shipped target's folder, whose tokenizer is extended. steps: of training, kept with the weights."""
    out.mkdir(parents=True, exist_ok=True)
    state = {_name(name): _tensor(_name(name), value) for name, value in reader.state_dict().items()}
    weight = state["model.visual.patch_embed.proj.weight"]
    assert weight.ndim == 5
    save_file(state, out / "model.safetensors", metadata={"format": "pt", "steps": str(steps)})
    (out / "model.safetensors").chmod(0o644)
    _write_json(out / "config.json", vision_config())
    _write_json(out / "preprocessor_config.json", settings())
    shutil.copy(target / "generation_config.json", out / "generation_config.json")
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [like | {"id": i, "content": text} for i, text in TOKENS.items()]
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False) + "\n")
    described = json.loads((target / "tokenizer_config.json").read_text())
    _write_json(out / "tokenizer_config.json", described | {"chat_template": TEMPLATE})
    (out / "chat_template.jinja").write_text(TEMPLATE + "\n")
