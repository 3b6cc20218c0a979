"""A table of the code that runs each model_type: how its config is read, its tensors are named, its modules are built.

A lookup, never an import by a name out of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mlxspec.errors import ModelError
from mlxspec.loading.gemma_weights import sanitize_gemma3, sanitize_gemma4
from mlxspec.loading.qwen_weights import sanitize_qwen3, sanitize_qwen3_5
from mlxspec.loading.weights import Weights
from mlxspec.models import qwen3_config
from mlxspec.models.gemma import Gemma
from mlxspec.models.gemma_config import GemmaConfig, gemma3_config, gemma4_config
from mlxspec.models.qwen3_5 import Qwen35
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp

Config = Qwen35Config | GemmaConfig
Trunk = Qwen35 | Gemma
Head = Qwen35Mtp


class Architecture(NamedTuple):
    """The functions that build the models of an architecture. parse: returns the checked config of a config.json. build: returns the
    modules for this config, without weights. sanitize: returns the tensors of the trunk and of the MTP head, under mlxspec's names, from
    all tensors of a folder and the config. head: returns the MTP head's module for a config and a trunk; None where the architecture has
    none."""

    parse: Callable[[Mapping[str, Any]], Any]
    build: Callable[[Any], Trunk]
    sanitize: Callable[[Weights, Any], tuple[Weights, Weights]]
    head: Callable[[Any, Any], Head] | None = None


_QWEN35 = Architecture(
    parse=Qwen35Config.from_dict,
    build=Qwen35,
    sanitize=lambda weights, config: sanitize_qwen3_5(weights, tied=config.tied),
    head=Qwen35Mtp,
)
_QWEN3_NEXT = _QWEN35._replace(parse=qwen3_config.qwen3_next_config)
_QWEN3 = Architecture(
    parse=qwen3_config.qwen3_config,
    build=Qwen35,
    sanitize=lambda weights, config: sanitize_qwen3(weights, tied=config.tied),
)
_GEMMA3 = Architecture(
    parse=gemma3_config,
    build=Gemma,
    sanitize=lambda weights, config: (sanitize_gemma3(weights, tied=config.tied), {}),
)


def _sanitize_gemma4(weights: Weights, config: GemmaConfig) -> tuple[Weights, Weights]:
    without_keys = {i for i, layer in enumerate(config.layers) if layer.source is not None}
    return sanitize_gemma4(weights, tied=config.tied, without_keys=without_keys), {}


_GEMMA4 = Architecture(
    parse=gemma4_config,
    build=Gemma,
    sanitize=_sanitize_gemma4,
)

ARCHITECTURES = {
    **dict.fromkeys(("qwen3", "qwen3_moe"), _QWEN3),
    "qwen3_next": _QWEN3_NEXT,
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _QWEN35),
    **dict.fromkeys(("gemma3", "gemma3_text"), _GEMMA3),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), _GEMMA4),
}

# what models of known types are made of that is not built here
_LACKING = dict.fromkeys(
    ("qwen4_exp", "qwen4_exp_text"), "hyper-connections, an n-gram table and sparse attention with an indexer"
)


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a config.json. Raises ModelError for a model_type that mlxspec's own code does not run."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ModelError("config.json names no model_type.")
    if kind in _LACKING:
        raise ModelError(
            f"Models of type {kind} are not supported: they have {_LACKING[kind]}, which neither mlxspec nor the installed mlx-lm has."
        )
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"Models of type {kind[:80]!a} are not supported; supported are: {', '.join(sorted(ARCHITECTURES))}, and "
            "what the installed mlx-lm has code for."
        )
    return ARCHITECTURES[kind]
