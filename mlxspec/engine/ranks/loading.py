"""The steps of loading that ranks take together, while each of them loads its share of a model. A process alone skips them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxspec.engine.engine import Engine
from mlxspec.engine.measure import kept_costs
from mlxspec.engine.ranks.peers import Peers, files_of
from mlxspec.kernels import launch
from mlxspec.models.ranks import ALONE, Ranks
from mlxspec.policy.cost_file import CostFile
from mlxspec.policy.costs import CostModel


class LoadTogether:
    """peers: the ranks among which the model is divided, None for a process alone. Methods raise RankError, on every rank, where ranks
    differ."""

    def __init__(self, peers: Peers | None) -> None:
        self.peers = peers

    @property
    def ranks(self) -> Ranks:
        return ALONE if self.peers is None else self.peers.ranks

    def compare_files(self, folders: Sequence[Path]) -> None:
        """Every rank reads the same files."""
        if self.peers is None:
            return
        files = {name: digest for path in folders for name, digest in files_of(path).items()}
        self.peers.compare("file", files)

    def use_the_same_kernels(self) -> None:
        """Every rank takes rank 0's choices between kernels."""
        if self.peers is not None:
            launch.adopt(self.peers.share(launch.speedups())[0])

    def compare_forms(self, modules: Sequence[nn.Module]) -> None:
        """Every rank holds its arrays in the same dtypes: on a machine with little memory quantized weights stay packed."""
        if self.peers is None:
            return
        arrays = tree_flatten([m.parameters() for m in modules])
        found = [(name, str(array.dtype)) for name, array in arrays]
        digest = hashlib.sha256(repr(found).encode()).hexdigest()[:16]
        self.peers.compare("form of the weights", {"arrays": digest})

    def first(self, value: Any) -> Any:
        """Rank 0's value, plain JSON; every rank must ask."""
        return value if self.peers is None else self.peers.share(value)[0]

    def costs(self, engine: Engine) -> CostModel:
        """The costs of rounds of this engine, as rank 0 keeps it or as guessed; what rounds teach until the process ends is kept. Sums over
        the ranks are included."""
        drafters, config, file = engine.chain.drafters, engine.config, None
        if self.peers is None or self.peers.leads:
            file = CostFile.of(engine.model, drafters, config, engine.name, self.ranks.size)
        costs = kept_costs(engine.model, drafters, self.first(None if file is None else file.data()))
        if file is not None:
            file.follow(costs)
        return costs
