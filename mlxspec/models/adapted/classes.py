"""Finds the classes that a model_type runs by: those of a module of ours, or of the installed mlx-lm. Nothing of a checkpoint is run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx_lm.models
from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING

# A module of ours, written as mlx-lm's are: a line gives its Model and ModelArgs by model_type. It comes before mlx-lm's of that name.
OWN = dict[str, Callable[[], tuple[Any, Any]]]()
MLX_LM = f"mlx-lm {version('mlx-lm')}"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_PUBLISHED = frozenset({"weight_scale", "weight_scale_inv", "weight_scale_2", "weight_packed", "qweight"})
_SHARED = ("base", "cache")  # files of mlx-lm that know no config
_ACTS = (  # the beginning of an activation's name, and how code spells it
    ("silu|swish", r"silu|swiglu"),
    ("gelu", r"gelu|geglu"),
    ("relu2|sqrelu", r"relu2|relu_squared|square\("),
    ("relu", r"\brelu\b"),
)
_CODE = Path(mlx_lm.models.__path__[0])


def maker_of(config: Mapping[str, Any]) -> str:
    """Return the name of the code that runs models of this model_type: "mlxspec", or mlx-lm with its version."""
    return "mlxspec" if config.get("model_type") in OWN else MLX_LM


def has_code(config: Mapping[str, Any]) -> bool:
    """Return whether mlxspec or the installed mlx-lm has code for the model_type of this config.json. The code is only read, not run."""
    return config.get("model_type") in OWN or any("class ModelArgs" in text for text in _texts(config))


def reads_parts(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Return whether mlx-lm's code for this model_type reads tensors in a published quantization format (such as weight_scale) itself, as
    its text names all of those that are in `names`. names: names of the checkpoint's tensors."""
    parts = {name.rpartition(".")[2] for name in names} & _PUBLISHED
    texts = _texts(config)
    return bool(parts) and any(all(re.search(rf"\b{part}\b", text) for part in parts) for text in texts)


def names_part(config: Mapping[str, Any], part: str) -> bool:
    """Return whether mlx-lm's code for this model_type has an attribute named `part`. A tensor of this name is then no sign of a
    quantization format."""
    return any(re.search(rf"self\.{re.escape(part)}\b", text) for text in _texts(config))


def names_key(config: Mapping[str, Any], key: str) -> bool:
    """Return whether mlx-lm's code for this model_type, or a file of mlx-lm that this code imports, uses the key `key` of config.json."""
    used = re.compile(rf"""\.{re.escape(key)}\b|["']{re.escape(key)}["']""")
    return any(used.search(text) for text in _all_texts(config))


def computes(config: Mapping[str, Any], activation: str) -> bool:
    """Return whether mlx-lm's code for this model_type computes an activation that config.json names, by its text."""
    spelled = next((code for name, code in _ACTS if re.match(name, activation)), re.escape(activation))
    return any(re.search(spelled, text, re.IGNORECASE) for text in _all_texts(config))


def _all_texts(config: Mapping[str, Any]) -> list[str]:
    """Return the source texts of mlx-lm's files that may run this model_type, and of the model files that they import."""
    found = dict.fromkeys(_texts(config))
    waiting = list(found)
    while waiting:
        for one, several in re.findall(r"from \.(\w+) import|from \. import ([\w, ]+)", waiting.pop()):
            for name in (one or several).split(", "):
                path = _CODE / f"{name.strip()}.py"
                text = path.read_text(encoding="utf-8") if path.is_file() and name not in _SHARED else ""
                if text and text not in found:
                    found[text] = None
                    waiting.append(text)
    return list(found)


def _texts(config: Mapping[str, Any]) -> list[str]:
    """Return the source texts of mlx-lm's files that may run this model_type."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or not _NAME.fullmatch(kind):
        return []
    files = {
        MODEL_REMAPPING.get(kind, kind),
        *(to for (a, _), to in MODEL_ARCHITECTURE_REMAPPING.items() if a == kind),
    }
    paths = [path for path in (_CODE / f"{name}.py" for name in files) if path.is_file()]
    return [path.read_text(encoding="utf-8") for path in paths]


def classes_of(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return the classes Model and ModelArgs that run this config.json. Raises ValueError where no code has this model_type."""
    kind = config["model_type"]
    if kind in OWN:
        return OWN[kind]()
    named = config.get("architectures") or ()
    named = (named,) if isinstance(named, str) else named
    remapped = (MODEL_ARCHITECTURE_REMAPPING.get((kind, name)) for name in named)
    name = next(filter(None, remapped), None) or MODEL_REMAPPING.get(kind, kind)
    try:
        module = import_module(f"mlx_lm.models.{name}")
    except ImportError as error:
        raise ValueError(f"Model type {name} not supported.") from error
    return module.Model, module.ModelArgs
