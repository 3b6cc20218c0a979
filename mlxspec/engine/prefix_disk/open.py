"""Opens an engine's prefix store on disk: which folder, what its parts are called, what it takes of memory."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

import mlx.nn as nn

from mlxspec.config import EngineConfig
from mlxspec.drafters.base import Drafter
from mlxspec.engine.prefix_disk.disk import PrefixDisk, states_of
from mlxspec.engine.prefix_disk.folder import PieceFolder, default_folder
from mlxspec.engine.prefix_disk.mover import Mover
from mlxspec.engine.prefix_disk.plan import BLOCK, SOURCES, PieceNames
from mlxspec.engine.prefix_disk.signature import of_drafter, of_sources, of_target
from mlxspec.engine.prefix_store import TARGET
from mlxspec.models.base import Model
from mlxspec.models.vision.base import VisionTower

_HEADER = 64 << 10  # bytes, more than a piece's header takes
_log = logging.getLogger("mlxspec")


def open_disk(
    model: Model,
    drafters: Collection[Drafter],
    config: EngineConfig,
    name: str,
    *,
    near: int,
    tower: VisionTower | None = None,
) -> PrefixDisk | None:
    """None where the options ask for none, and where the states of a drafter or of a tower cannot be told apart. tower: that reads the
    images of prompts. Raises ConfigError for a folder that cannot be used."""
    if not config.prefix_disk:
        return None
    hearing = [d.name for d in drafters if d.needs.every_hidden]
    strange = [d.name for d in drafters if d.needs.every_hidden and d.modules is None]
    if strange:
        _log.warning(
            "There is no prefix store on disk: the drafter %s does not say by which `modules` its states are made.",
            strange[0],
        )
        return None
    if tower is not None and not isinstance(tower, nn.Module):
        _log.warning(
            "There is no prefix store on disk: the vision tower is no mlx.nn.Module, so its weights are unknown."
        )
        return None
    path = default_folder() if config.prefix_dir is None else Path(config.prefix_dir).expanduser().absolute()
    folder = PieceFolder(path, config.prefix_disk)
    layers = sorted({i for d in drafters for i in d.needs.layers})
    target = of_target(model, config, layers, tower)
    roots = {TARGET: target, SOURCES: of_sources(target)}
    roots |= {d.name: root for d in drafters if (root := of_drafter(target, d)) is not None}
    cache = model.make_cache(0, kv_bits=config.kv_bits)
    per_token, state = cache.snapshot_bytes()
    is_half = config.prefix_states == "half"
    return PrefixDisk(
        Mover(folder),
        PieceNames(roots, block=BLOCK, form="half" if is_half else ""),
        model=name,
        hearing=hearing,
        near=near,
        halves=states_of(cache) if is_half else (),
        largest=BLOCK * per_token + state + _HEADER,
    )
