"""The sampling that a model's makers recommend: `generation_config.json` in its folder. Knows that file; knows no engine."""

from __future__ import annotations

import json
from typing import Any

from mlxspec.config import SamplingParams
from mlxspec.errors import ConfigError, MlxspecError

# transformers' names, and ours
_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}


def recommended(model: str, revision: str | None = None) -> tuple[dict[str, Any], str | None]:
    """Fields of SamplingParams, empty where the file is absent or asks for no sampling; and a sentence where it cannot be used."""
    from mlxspec.loading import hub

    try:
        path = hub.resolve(model, revision=revision, download=False) / "generation_config.json"
        if not path.is_file():
            return {}, None
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ConfigError("it is no JSON object")
        if not data.get("do_sample", "temperature" in data):
            return {}, None
        found = {ours: data[name] for name, ours in _FIELDS.items() if data.get(name) is not None}
        found.setdefault("temperature", 1.0)  # what transformers samples with unless told otherwise
        SamplingParams(**found)
    except (MlxspecError, OSError, ValueError, TypeError, RecursionError) as error:
        return {}, f"The sampling that {model} recommends cannot be used: {str(error).rstrip('.')}."
    return found, None
