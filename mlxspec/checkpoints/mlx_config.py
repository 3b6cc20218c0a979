"""Makes the config.json of a converted folder from the source's, in the dialect that mlx-lm reads. Knows keys; knows no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxspec.models.gemma_config import GemmaConfig
from mlxspec.models.registry import Config

# mlx-lm has no class for a text-only Qwen3.5, and for Gemma's another naming of tensors; what it calls the wrapper takes both.
_WRAPPERS = {
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4_unified",
}
_NAMES_THETA = ("qwen3_moe", "qwen3_next")  # mlx-lm reads it at the top level only
_DROPPED = (
    "_name_or_path",
    "vision_config",
    "audio_config",
    "quantization",
    "quantization_config",
    "auto_map",
    "model_file",
)
_OUTSIDE = (
    "architectures",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
)


def mlx_config(
    source: Mapping[str, Any], parsed: Config, quantization: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the config.json of a converted model, in the form that mlx-lm reads. source: the config.json of the source; parsed: the
    same, checked; quantization: its entry on the format of the written tensors, None for floats."""
    config = {k: v for k, v in source.items() if k not in _DROPPED}
    kind = str(config["model_type"])
    if kind in _WRAPPERS:
        outer = {k: config[k] for k in _OUTSIDE if k in config}
        config = outer | {"model_type": _WRAPPERS[kind], "text_config": config}
    inner = config.get("text_config")
    text = dict(inner) if isinstance(inner, Mapping) else config
    text.update({k: v for k, v in _spelled_out(text, parsed).items() if text.get(k) is None})
    text["tie_word_embeddings"] = parsed.tied  # as the tensors are
    if text is not config:
        config |= {"text_config": text, "vocab_size": parsed.vocab_size, "tie_word_embeddings": parsed.tied}
    if quantization is not None:
        config |= {"quantization": dict(quantization), "quantization_config": dict(quantization)}
    return dict(sorted(config.items()))


def _spelled_out(text: Mapping[str, Any], parsed: Config) -> dict[str, Any]:
    """Return the values that transformers omits from config.json and for which mlx-lm would use a default. text: the text model's part
    of config.json."""
    if not isinstance(parsed, GemmaConfig):
        found: dict[str, Any] = {}
        interval = _interval([not linear for linear in parsed.is_linear])
        if interval and any(parsed.is_linear):
            found["full_attention_interval"] = interval
        if text.get("model_type") in _NAMES_THETA:
            found["rope_theta"] = parsed.rope_theta
        if text.get("model_type") == "qwen3_next":
            found["partial_rotary_factor"] = parsed.rope_dims / parsed.head_dim
        return found
    full = [layer for layer in parsed.layers if layer.window is None]
    found = {}
    interval = _interval([layer.window is None for layer in parsed.layers])
    if interval:
        found["sliding_window_pattern"] = interval
    if full and str(text.get("model_type")).startswith("gemma4"):
        found["global_head_dim"] = full[0].head_dim
        if full[0].num_kv_heads != next(
            (x.num_kv_heads for x in parsed.layers if x.window), full[0].num_kv_heads
        ):
            found["num_global_key_value_heads"] = full[0].num_kv_heads
    return found


def _interval(full: Sequence[bool]) -> int | None:
    """Return n where every n-th layer, and no other, has full attention; None for any other pattern. full: whether each layer has full
    attention."""
    if True not in full:
        return None
    n = full.index(True) + 1
    return n if all(x == ((i + 1) % n == 0) for i, x in enumerate(full)) else None
