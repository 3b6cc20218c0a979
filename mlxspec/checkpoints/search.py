"""Searches the hub for models that mlxspec can run, by words in their ids. Fetches no file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlxspec.errors import ConfigError, ModelError
from mlxspec.loading import download
from mlxspec.loading.published import description, of_mlx
from mlxspec.models.runnable import judge

_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_MOST = 400  # models that the hub is asked for: those that mlxspec does not run are left out here


@dataclass(frozen=True, kw_only=True)
class Found:
    """One repository. model_type, quantization: as its config has them, "" where the hub does not say. size: bytes of its tensors, 0 where
    the hub does not say. base_models: what its card names as `base_model`."""

    name: str
    model_type: str
    quantization: str
    size: int
    downloads: int
    base_models: tuple[str, ...]
    gated: bool


def search(words: str, *, limit: int = 20, all_kinds: bool = False) -> list[Found]:
    """Models whose ids hold `words`, the most downloaded first; only those of kinds that mlxspec runs unless all_kinds. Raises ConfigError,
    ModelError."""
    from huggingface_hub import HfApi

    if not words.strip():
        raise ConfigError("No word was given to search for; try `mlxspec models qwen3.5 4bit`.")
    expand = ["config", "downloads", "gated", "cardData", "safetensors"]
    with download.explained("the list of models", None):
        infos = list(
            HfApi().list_models(
                search=words, sort="downloads", limit=limit if all_kinds else _MOST, expand=expand
            )
        )
    found = [_found(info) for info in infos if all_kinds or _runs(info)]
    return found[:limit]


def _runs(info: Any) -> bool:
    """Whether the kind and the format of a model are among those that mlxspec runs, as far as the hub says."""
    try:
        judge(_config(info)).unpacked(is_excerpt=True)
    except ModelError:
        return False
    return True


def _config(info: Any) -> dict[str, Any]:
    return info.config if isinstance(info.config, dict) else {}


def _found(info: Any) -> Found:
    config = _config(info)
    parameters = getattr(info.safetensors, "parameters", None) or {}
    bits, method = of_mlx(config).get("bits"), description(config).get("quant_method")
    return Found(
        name=info.id,
        model_type=str(config.get("model_type") or "")[:80],
        quantization=f"{bits} bits" if type(bits) is int else str(method or "")[:20],
        size=sum(int(n) * _BYTES.get(dtype, 1) for dtype, n in parameters.items()),
        downloads=info.downloads or 0,
        base_models=download.base_models(info),
        gated=bool(info.gated),
    )
