"""What rounds and drafts cost on this machine and how drafts fared, kept in the user's cache folder: written when it was measured and, with
what rounds have taught since, when the process ends. A load beside other work measures badly; what it keeps is put right by later rounds.

One file for each model, machine and code of the rounds. A file that is damaged, too large or of another version is as good as none.
Measures nothing.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
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
from mlxspec.platform import device, folders
from mlxspec.policy.acceptance import Learned
from mlxspec.policy.costs import ENOUGH, CostModel

LARGEST = 1 << 20  # bytes of a file that is read
_MOST_KEPT = 64  # drafters of which a file keeps anything
_DIGITS = 32  # of a file's name
_followed: dict[Path, tuple[int, CostFile, CostModel]] = {}


def known_costs(data: Any, marks: Mapping[str, str]) -> CostModel | None:
    """Costs from a file's data, of the drafters in `marks` (what they are called in the file, by name); None where they cannot be used."""
    try:
        costs = CostModel.from_data(data)
        costs.learned = Learned.from_data(data["learned"], {mark: name for name, mark in marks.items()})
    except (ConfigError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError):
        return None
    costs.drafts = {n: costs.drafts[m] for n, m in marks.items() if m in costs.drafts}
    return costs


class CostFile:
    """One file, and those of its drafters that are loaded now: draft models of other sizes have costs of their own in it."""

    def __init__(self, path: Path, marks: Mapping[str, str]) -> None:
        """marks: what loaded drafters are called in the file."""
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
        return cls(_path(model, config, name, num_ranks), marks_of(drafters))

    def data(self) -> Any:
        """What the file holds, unchecked; None where it holds no JSON of a bounded size."""
        try:
            if self.path.stat().st_size > LARGEST:
                return None
            return json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return None

    def read(self) -> CostModel | None:
        """None where there are none that can be used."""
        return known_costs(self.data(), self._marks)

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
        """Beside what the file has of other drafters, as a whole. A folder that cannot be written to is no error."""
        data, before = costs.as_data(), self.data()
        drafts = {self._marks[n]: d for n, d in data["drafts"].items() if n in self._marks}
        learned = costs.learned.as_data(self._marks)
        if known_costs(before, {}) is not None:
            own = self._marks.values()
            drafts = dict(list({**before["drafts"], **drafts}.items())[-_MOST_KEPT:])
            others = [row for row in before["learned"]["acceptance"] if row[1] not in own]
            learned["acceptance"] = [*others, *learned["acceptance"]][-_MOST_KEPT:]
        beside = self.path.with_suffix(".new")
        try:
            beside.write_text(json.dumps({**data, "drafts": drafts, "learned": learned}), encoding="utf-8")
            beside.replace(self.path)
        except OSError:
            with suppress(OSError):
                beside.unlink(missing_ok=True)


def write_followed() -> None:
    """What rounds have taught this process."""
    for pid, file, costs in _followed.values():
        if pid == os.getpid() and costs.num_measured >= ENOUGH:
            file._write(costs)
    _followed.clear()


def models_of(drafters: Mapping[str, Drafter]) -> list[str]:
    """Drafters that run a model, which costs something."""
    return [name for name, drafter in drafters.items() if isinstance(drafter, ModelDrafter)]


def marks_of(drafters: Mapping[str, Drafter]) -> dict[str, str]:
    """What drafters are called in a file, by name: those that run a model by their size too."""
    marks = {name: name for name in drafters}
    for name in models_of(drafters):
        bits = getattr(drafters[name], "kv_bits", EngineConfig.kv_bits)
        kept = "" if bits == EngineConfig.kv_bits else f", keys and values in {bits} bits"
        marks[name] = f"{name}, {drafters[name].weight_bytes} bytes{kept}"
    return marks


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
