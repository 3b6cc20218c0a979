"""Answers requests of llama.cpp's and Ollama's clients about a server: `/props`, `/slots`, `/api/ps`. No answer has text of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxspec import __version__
from mlxspec.config import MAX_CONTEXT, SamplingParams
from mlxspec.engine.worker import Load
from mlxspec.errors import ConfigError
from mlxspec.server.models import Known, Models
from mlxspec.server.ollama_api import ollama_model

# Codex gives these to the model in the place of its own
_INSTRUCTIONS = (
    "You are a coding agent in the user's terminal. Work on the task until it is done: look at the files with the tools you are given "
    "before you change them, make small changes, and check them by running what the project has. Say briefly what you did, and ask only "
    "where the task cannot be understood."
)
_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed")


def props(name: str, known: Known, params: SamplingParams, load: Load) -> dict[str, Any]:
    """Return the properties of a model in llama.cpp's form. mlxspec adds `computed_in`, the dtype and the reason for it; `stores_off`,
    the stores that are not written to disk at the moment; and `exact_width`, the largest number of tokens of a bit-exact round, null
    where it is not known."""
    facts = known.facts
    settings = {field: getattr(params, field) for field in _SETTINGS}
    longest = -1 if params.max_tokens == MAX_CONTEXT else params.max_tokens
    settings |= {"n_predict": longest, "repeat_penalty": params.repetition_penalty}
    return {
        "default_generation_settings": {"n_ctx": facts["n_ctx"], "params": settings},
        "total_slots": facts["max_rows"],
        "model_alias": name,
        "model_path": known.path,
        "modalities": {"vision": "vision" in facts["capabilities"], "audio": False},
        "chat_template": known.template or "",
        "build_info": f"mlxspec {__version__}",
        "computed_in": facts["computed_in"],
        "stores_off": list(load.stores_off),
        "exact_width": load.exact_width,
    }


def codex_model(name: str, meta: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Return a model in the form that Codex reads from `/v1/models`. Without a context size Codex assumes 272,000 tokens, and shortens a
    conversation too late. meta: the facts of the model; empty for one that has never been loaded. place: the model's place in the
    list."""
    sees = "vision" in meta.get("capabilities", ())
    return {
        "slug": name,
        "display_name": name,
        "description": None,
        "supported_reasoning_levels": [],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": place,
        "upgrade": None,
        "base_instructions": _INSTRUCTIONS,
        "supports_reasoning_summaries": False,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": None,
        "truncation_policy": {"mode": "tokens", "limit": 10_000},
        "supports_parallel_tool_calls": True,
        "context_window": meta.get("n_ctx"),
        "experimental_supported_tools": [],
        "input_modalities": ["text", "image"] if sees else ["text"],
    }


def tokenizer_info(known: Known) -> dict[str, Any]:
    """Return the tokenizer of a model in vLLM's form. Raises ConfigError for a model without one."""
    if known.special is None:
        raise ConfigError("This model has no tokenizer.")
    named = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"))
    length = known.facts["n_ctx"]
    return {**named, **known.special, "chat_template": known.template, "model_max_length": length}


def adapters(known: Known, scales: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the adapters of a model in llama.cpp's form. scales: the default scale of each adapter; 0 where it is missing."""
    return [{"id": i, "path": name, "scale": scales.get(name, 0.0)} for i, name in enumerate(known.adapters)]


def slots(models: Models) -> list[dict[str, Any]]:
    """Return the rows that the model in memory can decode at the same time, as llama.cpp's slots; empty while no model is loaded."""
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
    """Return the list of models in memory in Ollama's form."""
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
