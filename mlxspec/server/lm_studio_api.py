"""LM Studio's answers about models, in both versions of its API: the forms, and how a model is described in them. Loads nothing."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, NamedTuple

from mlxspec.checkpoints.cache import quantization
from mlxspec.errors import MlxspecError
from mlxspec.loading import hub
from mlxspec.loading.tokenizer import read_json
from mlxspec.server.forms import base as t
from mlxspec.server.forms.shared import Count, ModelName

_SERVERS = "what the server was started with holds; the answer tells it"


class LoadRequest(t.Fields):
    model: ModelName
    harmless = t.harmless(
        "config context_length eval_batch_size flash_attention num_experts offload_kv_cache_to_gpu echo_load_config ttl",
        _SERVERS,
    )


class UnloadRequest(t.Fields):
    instance_id: ModelName


class LlamaLoadRequest(t.Fields):
    model: ModelName


_Config = t.answer("LmStudioConfig", context_length=Count)
Loaded = t.answer(
    "LmStudioLoaded", type=Literal["llm"], instance_id=str, model_instance_id=str, status=Literal["loaded"], load_time_seconds=float,
    load_config=_Config, config=_Config,
)  # fmt: skip
Unloaded = t.answer("LmStudioUnloaded", instance_id=str)
OldModel = t.answer(
    "LmStudioOldModel", "loaded_context_length", id=str, object=Literal["model"], type=Literal["llm", "vlm", "embeddings"], publisher=str,
    arch=str, compatibility_type=Literal["mlx"], quantization=str, state=Literal["loaded", "not-loaded"], max_context_length=Count,
    loaded_context_length=Count,
)  # fmt: skip
OldModels = t.answer("LmStudioOldModels", object=Literal["list"], data=t.many(OldModel))
_Can = t.answer("LmStudioCapabilities", vision=bool, trained_for_tool_use=bool)
_Stored = t.answer("LmStudioQuantization", name=str, bits_per_weight=float | None)
_Instance = t.answer("LmStudioInstance", id=str, config=_Config)
NewModel = t.answer(
    "LmStudioModel", "capabilities", type=Literal["llm", "embedding"], publisher=str, key=str, display_name=str, architecture=str,
    quantization=_Stored, size_bytes=Count, params_string=str | None, loaded_instances=t.many(_Instance), max_context_length=Count,
    format=Literal["mlx"], capabilities=_Can, description=str | None,
)  # fmt: skip
NewModels = t.answer("LmStudioModels", models=t.many(NewModel))


class ModelFiles(NamedTuple):
    """The facts that are read from a model's files. publisher: the first part of its repository's name; arch: the model type; context:
    the longest context in tokens, 0 where it is not known; size: bytes of the weights."""

    publisher: str = ""
    arch: str = ""
    quantization: str = ""
    size: int = 0
    context: int = 0


class ModelTold(NamedTuple):
    """The facts about a model for LM Studio's answers. stored: those from its files; context: in tokens, 0 where it is not known; can:
    its capabilities, in the words of Ollama's API; makes_vectors: it serves embeddings and ranks only."""

    name: str
    stored: ModelFiles
    is_loaded: bool
    context: int
    can: Collection[str]
    makes_vectors: bool


def stored(model: str) -> ModelFiles:
    """Return the facts that a model's files contain; empty ones for a model that is not on this machine. Reads the disk."""
    try:
        folder = hub.resolve(model, download=False)
        config = read_json(folder / "config.json")
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    except (MlxspecError, OSError):
        return ModelFiles()
    text = config.get("text_config")
    length = (text if isinstance(text, dict) else config).get("max_position_embeddings")
    return ModelFiles(
        publisher=(hub.repo_of(folder) or folder.parent.name).partition("/")[0],
        arch=str(config.get("model_type", "")),
        quantization=quantization(config),
        size=size,
        context=length if type(length) is int and length > 0 else 0,
    )


def old_model(told: ModelTold) -> dict[str, Any]:
    """Return a model in the form of LM Studio's /api/v0."""
    return {
        "id": told.name,
        "object": "model",
        "type": "embeddings" if told.makes_vectors else "vlm" if "vision" in told.can else "llm",
        "publisher": told.stored.publisher,
        "arch": told.stored.arch,
        "compatibility_type": "mlx",
        "quantization": told.stored.quantization.replace(" bits", "bit"),
        "state": "loaded" if told.is_loaded else "not-loaded",
        "max_context_length": told.context,
        **({"loaded_context_length": told.context} if told.is_loaded else {}),
    }


def new_model(told: ModelTold) -> dict[str, Any]:
    """Return a model in the form of LM Studio's /api/v1."""
    bits = told.stored.quantization.partition(" ")[0]
    can = {"vision": "vision" in told.can, "trained_for_tool_use": "tools" in told.can}
    instance = {"id": told.name, "config": {"context_length": told.context}}
    return {
        "type": "embedding" if told.makes_vectors else "llm",
        "publisher": told.stored.publisher,
        "key": told.name,
        "display_name": told.name.rpartition("/")[2],
        "architecture": told.stored.arch,
        "quantization": {
            "name": told.stored.quantization,
            "bits_per_weight": int(bits) if bits.isdecimal() else None,
        },
        "size_bytes": told.stored.size,
        "params_string": None,
        "loaded_instances": [instance] * told.is_loaded,
        "max_context_length": told.context,
        "format": "mlx",
        **({} if told.makes_vectors else {"capabilities": can}),
        "description": None,
    }


def loaded(name: str, context: int, seconds: float) -> dict[str, Any]:
    """Return LM Studio's answer to a request to load a model. context: in tokens; seconds: the time that loading took. Members have both
    of the names that LM Studio's documentation has had for them."""
    config = {"context_length": context}
    return {
        "type": "llm",
        "instance_id": name,
        "model_instance_id": name,
        "status": "loaded",
        "load_time_seconds": round(seconds, 3),
        "load_config": config,
        "config": config,
    }
