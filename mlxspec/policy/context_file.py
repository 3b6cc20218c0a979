"""Keeps the longest context that `mlxspec tune --context` found for a model on this machine, in the user's cache folder: one file for each
model, its drafters, the bits of its keys and values, the memory budget and the machine. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from mlx.utils import tree_flatten

from mlxspec.config import EngineConfig
from mlxspec.drafters.base import Drafter
from mlxspec.models.base import Model
from mlxspec.platform import device, kept_json


def context_file(
    model: Model, drafters: Iterable[Drafter], config: EngineConfig, budget: int, name: str
) -> Path:
    """budget: in bytes, the default one if the config names none."""
    report = device.report()
    parameters: object = getattr(model, "parameters", dict)()
    described = [
        version("mlx"),
        report.backend,
        report.device,
        name,
        budget,
        config.kv_bits,
        sorted((d.name, d.weight_bytes) for d in drafters if d.weight_bytes),
        [(key, list(value.shape), str(value.dtype)) for key, value in tree_flatten(parameters)],
    ]
    return kept_json.kept_file("contexts", described)


def kept_context(path: Path) -> int | None:
    """In tokens; None where none has been found yet."""
    data = kept_json.read(path)
    found = data.get("context") if isinstance(data, dict) else None
    return found if type(found) is int and found >= 2 else None


def keep_context(path: Path, name: str, context: int) -> None:
    """context: in tokens."""
    kept_json.write(path, {"model": name, "context": context})
