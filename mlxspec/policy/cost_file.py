"""Keeps the costs of rounds and drafts on this machine, and the acceptance rates of drafters, in the user's cache folder: written when it
was measured and, with what rounds have taught since, when the process ends. A load beside other work measures badly; what it keeps is put
right by later rounds.

One file for each model, its drafters and the machine. What other code has measured is doubted: it is where measuring begins. A file that is
damaged, too large or of another form is as good as none. Measures nothing.
"""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten

from mlxspec import cache as caches
from mlxspec import kernels, models
from mlxspec.config import EngineConfig
from mlxspec.drafters.base import Drafter
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.errors import ConfigError
from mlxspec.models.base import Model
from mlxspec.platform import device, kept_json
from mlxspec.policy.costs import ENOUGH, CostModel

_followed: dict[Path, tuple[int, str, CostModel]] = {}  # by file: the process, the model's name and its costs


def known_costs(data: Any) -> CostModel | None:
    """Costs from a file's data, doubted where other code measured them; None where they cannot be used."""
    try:
        costs = CostModel.from_data(data)
    except ConfigError:
        return None
    if data.get("code") != _code():
        costs.doubt()
    return costs


class CostFile:
    """One file. model: the name of the model as it was loaded."""

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
        """num_ranks: among which the model is divided. What rounds take holds what their sums over ranks take."""
        report = device.report()
        parameters: object = getattr(model, "parameters", dict)()
        described = [
            report.backend,
            report.device,
            report.blas,
            report.compile_enabled,
            name,
            config.exact,
            config.kv_bits,
            num_ranks,
            getattr(getattr(model, "config", None), "made_by", ""),
            [
                (d, drafters[d].weight_bytes, getattr(drafters[d], "kv_bits", None))
                for d in models_of(drafters)
            ],
            [(key, list(value.shape), str(value.dtype)) for key, value in tree_flatten(parameters)],
        ]
        return cls(kept_json.kept_file("costs", described), name)

    def data(self) -> Any:
        """As `kept_json.read`."""
        return kept_json.read(self.path)

    def write(self, costs: CostModel) -> None:
        """Measured just now: whoever was followed before is no longer."""
        _followed.pop(self.path, None)
        _write(self.path, self.model, costs)

    def follow(self, costs: CostModel) -> None:
        """Keep what `costs` has become by the end of the process."""
        if not _followed:
            atexit.register(write_followed)
        _followed[self.path] = os.getpid(), self.model, costs


def write_followed() -> None:
    """What rounds have taught this process."""
    for path, (pid, model, costs) in _followed.items():
        if pid == os.getpid() and costs.num_measured >= ENOUGH:
            _write(path, model, costs)
    _followed.clear()


def judged_drafters(model: str) -> dict[str, tuple[int, int]]:
    """By drafter: how many of its drafts for this model were compared with the text on this machine, and how many began right."""
    found: dict[str, tuple[int, int]] = {}
    for path in kept_json.kept_files("costs"):
        data = kept_json.read(path)
        costs = known_costs(data)
        if costs is not None and data.get("model") == model:
            for name, (judged, right) in costs.judged.items():
                before = found.get(name, (0, 0))
                found[name] = before[0] + judged, before[1] + right
    return found


def _write(path: Path, model: str, costs: CostModel) -> None:
    kept_json.write(path, {"model": model, "code": _code()} | costs.as_data())


def models_of(drafters: Mapping[str, Drafter]) -> list[str]:
    """Drafters that run a model, which costs something."""
    return [name for name, drafter in drafters.items() if isinstance(drafter, ModelDrafter)]


@cache
def _code() -> str:
    """Of the code that rounds run, MLX's version included: whatever changes what they cost changes it."""
    found = hashlib.sha256(version("mlx").encode())
    for package in (kernels, caches, models):
        for file in sorted(Path(package.__path__[0]).rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()
