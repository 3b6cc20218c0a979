"""Finds the classes that a model_type runs by: those of a module of ours, or of the installed mlx-lm. Nothing of a checkpoint is run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx_lm.models
from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING
from mlx_lm.utils import _get_classes as classes_of_mlx_lm

# A module of ours, written as mlx-lm's are: a line gives its Model and ModelArgs by model_type. It comes before mlx-lm's of that name.
OWN: dict[str, Callable[[], tuple[Any, Any]]] = {}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_CODE = Path(mlx_lm.models.__path__[0])


def has_code(config: Mapping[str, Any]) -> bool:
    """Whether there is code for this model_type that says how a model is made. Runs nothing."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or not _NAME.fullmatch(kind):
        return False
    files = {
        MODEL_REMAPPING.get(kind, kind),
        *(to for (a, _), to in MODEL_ARCHITECTURE_REMAPPING.items() if a == kind),
    }
    paths = [path for path in (_CODE / f"{name}.py" for name in files) if path.is_file()]
    return kind in OWN or any("class ModelArgs" in path.read_text(encoding="utf-8") for path in paths)


def classes_of(config: dict[str, Any]) -> tuple[Any, Any]:
    """Model and ModelArgs of a config.json that `has_code` for."""
    own = OWN.get(config["model_type"])
    found: tuple[Any, Any] = classes_of_mlx_lm(config) if own is None else own()
    return found
