"""The default sampling of a chat and of a server: what the model's `generation_config.json` recommends, else what is usual.

Knows that file; knows no engine.
"""

from __future__ import annotations

import json
from typing import Any

from mlxspec.config import SamplingParams
from mlxspec.errors import ConfigError, MlxspecError

USUAL = {
    "temperature": 0.8,
    "top_p": 0.95,
}  # as in llama.cpp and programs around it: greedy answers of small models repeat themselves
# transformers' names, and ours
_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}


def recommended(model: str, revision: str | None = None) -> tuple[dict[str, Any], str | None]:
    """Return the sampling that a model's generation_config.json recommends, by field of SamplingParams, and a sentence where the file
    cannot be used, else None. The fields are empty where the file requests greedy decoding (`do_sample` false), USUAL where it gives
    no sampling."""
    from mlxspec.loading import hub

    try:
        path = hub.resolve(model, revision=revision, download=False) / "generation_config.json"
        if not path.is_file():
            return USUAL, None
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ConfigError("it is no JSON object")
        if data.get("do_sample") is False:
            return {}, None
        if "do_sample" not in data and "temperature" not in data:
            return USUAL, None
        found = {ours: data[name] for name, ours in _FIELDS.items() if data.get(name) is not None}
        found.setdefault("temperature", 1.0)  # what transformers samples with unless told otherwise
        SamplingParams(**found)
    except (MlxspecError, OSError, ValueError, TypeError, RecursionError) as error:
        return USUAL, f"The sampling that {model} recommends cannot be used: {str(error).rstrip('.')}."
    return found, None
