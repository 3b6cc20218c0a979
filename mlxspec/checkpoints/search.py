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
    """A model that a search of the hub found. model_type, quantization: by its config, "" where the hub does not have them. size: bytes
    of its tensors, 0 where the hub does not have it. base_models: the `base_model` of its card."""

    name: str
    model_type: str
    quantization: str
    size: int
    downloads: int
    base_models: tuple[str, ...]
    gated: bool


def search(words: str, *, limit: int = 20, all_kinds: bool = False) -> list[Found]:
    """Return the models on the hub whose ids contain `words`, the most downloaded first. limit: most models to return. all_kinds:
    include models of kinds that mlxspec does not run. Raises ConfigError where there is no word, ModelError where the hub cannot be
    reached."""
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
    """Return whether mlxspec runs the kind and the format of a model, as far as the hub's answer shows."""
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
