"""Multimodal folders as transformers itself writes them: its classes around the text weights of our tiny checkpoints, with the smallest
towers it builds. Needs PyTorch; import it inside tests that say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import tiny_gemma
import torch
import transformers

_QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}
_GEMMA_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "image_size": 56,
    "patch_size": 14,
}


def save_qwen(folder: Path, s: tiny.Shape) -> Any:
    """The model whose folder was written."""
    kind = "Qwen3_5Moe" if s.num_experts else "Qwen3_5"
    config = getattr(transformers, f"{kind}Config")(
        text_config=tiny.text_config(s),
        vision_config=_QWEN_TOWER | {"out_hidden_size": s.hidden},
        tie_word_embeddings=s.tied,
    )
    return _save(folder, getattr(transformers, f"{kind}ForConditionalGeneration"), config, tiny.weights(s))


def save_gemma(folder: Path, c: tiny_gemma.Config) -> Any:
    kind = "Gemma4" if tiny_gemma.is_gemma4(c) else "Gemma3"
    towers: dict[str, Any] = {"vision_config": _GEMMA_TOWER}
    if kind == "Gemma4":
        towers["audio_config"] = None
    config = getattr(transformers, f"{kind}Config")(text_config=c, **towers)
    return _save(
        folder, getattr(transformers, f"{kind}ForConditionalGeneration"), config, tiny_gemma.weights(c)
    )


def _save(folder: Path, kind: Any, config: Any, arrays: dict[str, Any]) -> Any:
    config._attn_implementation = "eager"
    model = kind(config).float().eval()
    own = {
        k.replace("model.", "model.language_model.", 1) if k.startswith("model.") else k: torch.from_numpy(v)
        for k, v in arrays.items()
        if not k.startswith("mtp.")
    }
    report = model.load_state_dict(own, strict=False)
    assert not report.unexpected_keys
    assert not [k for k in report.missing_keys if "language_model" in k and "embed_tokens" not in k], report
    model.tie_weights()
    model.save_pretrained(folder)
    return model
