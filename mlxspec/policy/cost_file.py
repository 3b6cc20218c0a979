"""What rounds and drafts cost on this machine, kept in the user's cache folder: written when it was measured and, with what rounds have
taught since, when the process ends. A load beside other work measures badly; so what it keeps is put right by later rounds.

One file for each model, machine and code of the rounds. Knows files and what they are named by; measures nothing.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

from mlx.utils import tree_flatten

from mlxspec import cache as caches
from mlxspec import kernels, models
from mlxspec.config import EngineConfig
from mlxspec.drafters.base import Drafter
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.models.base import Model
from mlxspec.platform import device, folders
from mlxspec.policy.cost import ENOUGH, CostModel, read_costs, write_costs

_DIGITS = 32  # of a file's name
_followed: dict[Path, tuple[int, CostFile, CostModel]] = {}


class CostFile:
    """One file, and those of its drafters that are loaded now: draft models of other sizes have costs of their own in it."""

    def __init__(self, path: Path, marks: Mapping[str, str]) -> None:
        """marks: what loaded model drafters are called in the file."""
        self.path, self._marks = path, dict(marks)

    @classmethod
    def of(
        cls,
        model: Model,
        drafters: Mapping[str, Drafter],
        config: EngineConfig,
        name: str,
        num_ranks: int = 1,
    ) -> CostFile:
        """num_ranks: among which the model is divided. What rounds take holds what their sums over ranks take, so each number of ranks has
        a file of its own."""
        marks = {n: _mark(n, drafters[n]) for n in models_of(drafters)}
        return cls(_path(model, config, name, num_ranks), marks)

    def read(self) -> CostModel | None:
        """None where there are none that can be used."""
        costs = read_costs(self.path)
        if costs is not None:
            costs.drafts = {n: costs.drafts[m] for n, m in self._marks.items() if m in costs.drafts}
        return costs

    def write(self, costs: CostModel) -> None:
        """Measured just now: whoever was followed before is no longer."""
        _followed.pop(self.path, None)
        self._write(costs)

    def follow(self, costs: CostModel) -> None:
        """Keep what `costs` has become by the end of the process."""
        if not _followed:
            atexit.register(write_followed)
        _followed[self.path] = os.getpid(), self, costs

    def _write(self, costs: CostModel) -> None:
        """Beside what the file has of other drafters. A guess is not written, until drafts have replaced it."""
        before = read_costs(self.path)
        others = {} if before is None else before.drafts
        own = {
            m: costs.drafts[n] for n, m in self._marks.items() if n in costs.drafts and not costs.is_guess(n)
        }
        write_costs(self.path, costs, others | own)


def write_followed() -> None:
    """What rounds have taught this process."""
    for pid, file, costs in _followed.values():
        if pid == os.getpid() and costs.num_rounds + costs.num_drafts >= ENOUGH:
            file._write(costs)
    _followed.clear()


def models_of(drafters: Mapping[str, Drafter]) -> list[str]:
    """Drafters that run a model, which costs something."""
    return [name for name, drafter in drafters.items() if isinstance(drafter, ModelDrafter)]


def _mark(name: str, drafter: Drafter) -> str:
    bits = getattr(drafter, "kv_bits", EngineConfig.kv_bits)
    kept = "" if bits == EngineConfig.kv_bits else f", keys and values in {bits} bits"
    return f"{name}, {drafter.weight_bytes} bytes{kept}"


def _path(model: Model, config: EngineConfig, name: str, num_ranks: int = 1) -> Path:
    report = device.report()
    parameters: object = getattr(model, "parameters", dict)()
    described = [
        _code(),
        version("mlx"),
        report.backend,
        report.device,
        report.blas,
        report.compile_enabled,
        name,
        config.rollback,
        *([f"{num_ranks} ranks"] if num_ranks > 1 else []),
        *([config.kv_bits] if config.kv_bits != EngineConfig.kv_bits else []),
        [(key, list(value.shape), str(value.dtype)) for key, value in tree_flatten(parameters)],
    ]
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:_DIGITS]
    return folders.private_folder("costs")[0] / f"{digest}.json"


@cache
def _code() -> str:
    """Of the code that rounds run: whatever changes what they cost changes it, releases included."""
    found = hashlib.sha256()
    for package in (kernels, caches, models):
        for file in sorted(Path(package.__path__[0]).rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()
