"""What llama.cpp's and Ollama's clients ask about a server: `/props`, `/slots`, `/api/ps`. No text of any request is in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxspec import __version__
from mlxspec.config import SamplingParams
from mlxspec.server.models import Models
from mlxspec.server.ollama_api import ollama_model

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine

_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed")


def props(name: str, engine: Engine, params: SamplingParams) -> dict[str, Any]:
    """Of a model in memory."""
    template = None if engine.tokenizer is None else engine.tokenizer.template
    settings = {field: getattr(params, field) for field in _SETTINGS}
    settings |= {"n_predict": params.max_tokens, "repeat_penalty": params.repetition_penalty}
    return {
        "default_generation_settings": {"n_ctx": engine.max_context, "params": settings},
        "total_slots": engine.config.max_rows,
        "model_alias": name,
        "model_path": engine.name,
        "modalities": {"vision": engine.vision is not None, "audio": False},
        "chat_template": "" if template is None else template.source,
        "build_info": f"mlxspec {__version__}",
    }


def slots(models: Models) -> list[dict[str, Any]]:
    """Places for rows of the model in memory; none where no model is."""
    facts, num_running = models.loaded_facts(), models.gauges()["rows_running"]
    return [
        {
            "id": i,
            "n_ctx": facts["n_ctx"],
            "speculative": bool(facts["draft"]),
            "is_processing": i < num_running,
        }
        for i in range(facts.get("max_rows", 0))
    ]


def running(models: Models) -> dict[str, Any]:
    """Ollama's list of models in memory."""
    found = [name for name in models.names if models.meta(name)["loaded"]]
    size = int(models.gauges()["memory_bytes"])
    return {
        "models": [
            {
                **ollama_model(name, models.created),
                "size": size,
                "size_vram": size,
                "context_length": models.facts(name)["n_ctx"],
            }
            for name in found
        ]
    }
