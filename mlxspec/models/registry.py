"""Which class runs which model_type. A lookup, never an import by a name out of a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxspec.errors import ModelError
from mlxspec.models.qwen3_5 import Qwen35
from mlxspec.models.qwen3_5_config import Qwen35Config

QWEN35_TYPES = frozenset({"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})


def build(config: Mapping[str, Any]) -> tuple[Qwen35, Qwen35Config]:
    """The module tree for a config.json, with weights not yet loaded. Raises ModelError on a model_type we do not run."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ModelError("config.json names no model_type.")
    if kind not in QWEN35_TYPES:
        raise ModelError(
            f"Models of type {kind[:80]!a} are not supported; supported are: {', '.join(sorted(QWEN35_TYPES))}."
        )
    parsed = Qwen35Config.from_dict(config)
    return Qwen35(parsed), parsed
