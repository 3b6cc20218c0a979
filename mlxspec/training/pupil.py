"""The drafter of a loaded model that is to be taught: its weights as its folder has them, its form for gradients, and how it is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.checkpoints.adapted_head import folder_of
from mlxspec.checkpoints.pairing import paired
from mlxspec.config import SpecConfig
from mlxspec.engine.engine import Engine
from mlxspec.errors import ModelError
from mlxspec.loading.weights import Weights
from mlxspec.models.assemble_drafter import assemble_dflash_lazily, assemble_eagle3_lazily
from mlxspec.models.dflash import DFlash
from mlxspec.models.eagle3 import Eagle3Config, Eagle3Head, sanitize_eagle3
from mlxspec.models.fill import fill, is_packed, quantize_floats
from mlxspec.models.folder import ModelFolder
from mlxspec.models.qwen3_5 import Qwen35
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from mlxspec.models.registry import Trunk, architecture
from mlxspec.training.block_network import BlockNetwork
from mlxspec.training.network import ChainNetwork, Head, Network, float_weights

_OTHERS = "Only MTP heads of Qwen3.5 models, EAGLE-3 drafters and block drafters can be adapted yet"


class Pupil:
    """title: for sentences. beside: the drafter's own folder, None for a model's own head. base: what it is without having been adapted, as
    it drafts."""

    def __init__(self, engine: Engine, drafter: str | None) -> None:
        """drafter: the folder or id that was named. Raises ModelError where the model has no drafter that can be taught."""
        name = next((n for n in ("mtp", "eagle3", "dflash") if n in engine.chain.drafters), None)
        loaded = None if name is None else (engine.chain.drafters[name].modules or (None,))[0]
        if name is None or loaded is None or not isinstance(engine.model, Trunk):
            raise ModelError(f"{_OTHERS}, and this model has none of them; --draft-model names one.")
        self.folder, self.beside = folder_of(engine.name), None
        if name != "mtp":
            own = paired(self.folder.path)[0] if drafter is None else None
            self.beside = folder_of(drafter or "") if own is None else ModelFolder(own)
        makers = {"mtp": _head, "eagle3": _eagle3, "dflash": _block}
        read, self._made, made = makers[name](engine.model, self.beside or self.folder, loaded)
        self._dtype: mx.Dtype = loaded.dtype
        self.base, self._fixed = float_weights(self._made(read()), loaded)
        self.network: Network = made(self._fixed)

    def as_drafting(self, weights: Weights) -> Head:
        """Weights that were adapted, as `load` makes a drafter of them."""
        return float_weights(self._made(weights))[0]

    def stored(self, head: Head) -> Weights:
        """As files have it: matrices in the drafter's dtype, norms in float32."""
        return self._fixed | {
            name: value if value.ndim == 1 else value.astype(self._dtype) for name, value in head.items()
        }


# what reads the folder, what fills a module with such weights, and what makes the form for gradients
_Maker = tuple[Callable[[], Weights], Callable[[Weights], nn.Module], Callable[[Head], Network]]


def _head(target: Trunk, folder: ModelFolder, loaded: Any) -> _Maker:
    kind = architecture(folder.config())
    parsed = kind.parse(folder.config())
    if not isinstance(loaded, Qwen35Mtp) or not isinstance(target, Qwen35):
        raise ModelError(f"{_OTHERS}.")
    if not isinstance(parsed, Qwen35Config) or parsed.num_experts:
        raise ModelError("An MTP head with experts cannot be adapted yet.")

    def made(weights: Weights) -> Qwen35Mtp:
        bare = new()
        if not fill(bare, weights, target.dtype, "The MTP head") and is_packed(target):
            quantize_floats(bare, SpecConfig.draft_bits)
        return bare

    def new() -> Qwen35Mtp:
        return Qwen35Mtp(parsed, target)

    return (
        lambda: kind.sanitize(folder.read(), parsed)[1],
        made,
        lambda fixed: ChainNetwork(target, new, fixed, loaded),
    )


def _eagle3(target: Trunk, folder: ModelFolder, loaded: Eagle3Head) -> _Maker:
    config = folder.config()
    parsed, names = Eagle3Config.from_dict(config), sanitize_eagle3(folder.read()).keys()
    return (
        folder.read,
        lambda weights: assemble_eagle3_lazily(config, lambda: weights, target, loaded.dtype, is_fused=False),
        lambda fixed: ChainNetwork(target, lambda: Eagle3Head(parsed, target, names), fixed, loaded),
    )


def _block(target: Trunk, folder: ModelFolder, loaded: DFlash) -> _Maker:
    config, parsed = folder.config(), loaded.config
    return (
        folder.read,
        lambda weights: assemble_dflash_lazily(config, lambda: weights, target, loaded.dtype, is_fused=False),
        lambda fixed: BlockNetwork(target, lambda: DFlash(parsed, target), fixed, loaded),
    )
