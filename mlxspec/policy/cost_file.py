"""Keeps the costs of rounds and drafts on this machine, and the acceptance rates of drafters, in the user's cache folder: what the rounds
of a process taught, written when the process ends.

One file for each model, its drafters and the machine. What rounds of other code taught is where a process begins all the same: its own
rounds put it right. A file that is damaged, too large or of another form is as good as none. Measures nothing.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten

from mlxspec.config import EngineConfig
from mlxspec.drafters.base import Drafter
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.errors import ConfigError
from mlxspec.models.base import Model
from mlxspec.platform import device, kept_json
from mlxspec.policy.acceptance import TRUST
from mlxspec.policy.costs import CostModel

_followed: dict[Path, tuple[int, CostFile, CostModel]] = {}  # by file: the process, the file and its costs


class CostFile:
    """The file that keeps one model's costs on this machine. model: the name of the model as it was loaded."""

    def __init__(self, path: Path, model: str) -> None:
        self.path, self.model = path, model

    @classmethod
    def of(
        cls,
        model: Model,
        drafters: Mapping[str, Drafter],
        config: EngineConfig,
        name: str,
        num_ranks: int = 1,
    ) -> CostFile:
        """Return the file for this model, these drafters and this configuration. num_ranks: the number of ranks that divide the model,
        whose sums are part of what rounds take."""
        own = [(d, drafters[d].weight_bytes, getattr(drafters[d], "kv_bits", 0)) for d in models_of(drafters)]
        return cls(kept_json.kept_file("costs", [*described(model, config, name), num_ranks, own]), name)

    def data(self) -> Any:
        """Return the file's content as JSON, None where it cannot be read (`kept_json.read`)."""
        return kept_json.read(self.path)

    def write(self, costs: CostModel) -> None:
        """Write what `costs` has learned to the file."""
        kept_json.write(self.path, {"model": self.model} | costs.as_data())

    def follow(self, costs: CostModel) -> None:
        """Write what `costs` has learned when the process ends."""
        if not _followed:
            atexit.register(write_followed)
        _followed[self.path] = os.getpid(), self, costs


def described(model: Model, config: EngineConfig, name: str) -> list[Any]:
    """Return a description of a model on this machine as plain JSON, by which its file is found. name: of the model as it was loaded."""
    report = device.report()
    parameters: object = getattr(model, "parameters", dict)()
    return [
        report.backend,
        report.device,
        report.blas,
        report.compile_enabled,
        name,
        config.exact,
        config.kv_bits,
        getattr(getattr(model, "config", None), "made_by", ""),
        [(key, list(value.shape), str(value.dtype)) for key, value in tree_flatten(parameters)],
    ]


def write_followed() -> None:
    """Write the files of all costs given to `CostFile.follow`."""
    for pid, file, costs in _followed.values():
        if pid == os.getpid() and costs.num_learned >= TRUST:
            file.write(costs)
    _followed.clear()


def judged_drafters(model: str) -> dict[str, tuple[int, int]]:
    """Return, by drafter, how many of its drafts for this model were compared with the text on this machine, and how many began right."""
    found: dict[str, tuple[int, int]] = {}
    for path in kept_json.kept_files("costs"):
        data, costs = kept_json.read(path), CostModel()
        try:
            costs.learn_from(data)
        except ConfigError:
            continue
        if data.get("model") == model:
            for name, (judged, right) in costs.judged.items():
                before = found.get(name, (0, 0))
                found[name] = before[0] + judged, before[1] + right
    return found


def models_used() -> list[str]:
    """Return the names of models whose rounds were measured here, as they were loaded, the last first."""
    dated = []
    for path in kept_json.kept_files("costs"):
        data = kept_json.read(path)
        if isinstance(data, dict) and isinstance(data.get("model"), str):
            dated.append((path.stat().st_mtime, data["model"]))
    return list(dict.fromkeys(name for _, name in sorted(dated, reverse=True)))


def models_of(drafters: Mapping[str, Drafter]) -> list[str]:
    """Return the names of the drafters that run a model."""
    return [name for name, drafter in drafters.items() if isinstance(drafter, ModelDrafter)]
