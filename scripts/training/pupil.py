"""The drafter of a loaded model that is to be taught: its weights as its folder has them, its form for gradients, and how it is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlxspec.checkpoints import adapted_head
from mlxspec.checkpoints.adapted_head import AdaptedHead, Card, folder_of
from mlxspec.checkpoints.pairing import paired
from mlxspec.config import SpecConfig
from mlxspec.engine.engine import Engine
from mlxspec.errors import ModelError
from mlxspec.loading.weights import Weights
from mlxspec.models.assemble_drafter import assemble_drafter
from mlxspec.models.dflash import DFlash
from mlxspec.models.drafter_module import sanitize_drafter
from mlxspec.models.eagle3 import Eagle3Config, Eagle3Head
from mlxspec.models.fill import fill, is_packed, quantize_floats
from mlxspec.models.folder import ModelFolder
from mlxspec.models.qwen3_5 import Qwen35
from mlxspec.models.qwen3_5_config import Qwen35Config
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from mlxspec.models.registry import Trunk, architecture
from training import kept
from training.block_network import BlockNetwork
from training.network import ChainNetwork, Head, Network, float_weights

Keep = Callable[[Weights, Card], object]
_OTHERS = "Only MTP heads of Qwen3.5 models, EAGLE-3 drafters, block drafters and draft models can be adapted"


class Maker(NamedTuple):
    """read: the tensors of its folder; filled: such tensors in its module, not fused; network: its form for gradients, of what is not
    trained; dtype: of what is stored; loaded: the same drafter where its norms count, because loading may have shifted them."""

    read: Callable[[], Weights]
    filled: Callable[[Weights], nn.Module]
    network: Callable[[Head], Network]
    dtype: mx.Dtype
    loaded: nn.Module | None = None


class Pupil:
    """base: what it is without having been adapted, as it drafts. lock: a file that one run at a time may hold."""

    def __init__(
        self, maker: Maker, lock: Path, keep: Keep, adapted: Callable[[], AdaptedHead | None] = lambda: None
    ) -> None:
        """keep: stores what it has become; adapted: finds what was adapted of it before."""
        self.lock, self.keep, self.adapted = lock, keep, adapted
        read, self._made, made, self._dtype, loaded = maker
        self.base, self._fixed = float_weights(self._made(read()), loaded)
        self.network: Network = made(self._fixed)

    @classmethod
    def of(cls, engine: Engine, drafter: str | None) -> Pupil:
        """drafter: the folder or id that was named. Raises ModelError where the model has no drafter that can be taught."""
        taught = ("mtp", "eagle3", "dflash", *(() if drafter is None else ("draft-model",)))
        name = next((n for n in taught if n in engine.chain.drafters), None)
        loaded = None if name is None else (engine.chain.drafters[name].modules or (None,))[0]
        if name is None or loaded is None or not isinstance(engine.model, Trunk):
            raise ModelError(
                f"{_OTHERS}, and this model has none of them; --draft-model names one, and --new makes one."
            )
        folder, beside = folder_of(engine.name), None
        if name != "mtp":
            own = paired(folder.path)[0] if drafter is None else None
            beside = folder_of(drafter or "") if own is None else ModelFolder(own)
        makers = {"mtp": _head, "eagle3": _eagle3, "dflash": _block, "draft-model": _draft_model}
        return cls(
            makers[name](engine.model, beside or folder, loaded),
            kept.lock_of(folder, beside),
            lambda weights, card: kept.keep(folder, weights, card, beside),
            lambda: adapted_head.find(folder, beside),
        )

    @property
    def num_parameters(self) -> int:
        return sum(weight.size for weight in self.base.values())

    def begun(self, texts: Sequence[Sequence[int]]) -> Pupil:
        """Itself, which no texts change; see NewDrafter."""
        return self

    def as_drafting(self, weights: Weights) -> Head:
        """Weights that were adapted, as `load` makes a drafter of them."""
        return float_weights(self._made(weights))[0]

    def stored(self, head: Head) -> Weights:
        """As files have it: matrices in the drafter's dtype, norms in float32."""
        return self._fixed | {
            name: value if value.ndim == 1 else value.astype(self._dtype) for name, value in head.items()
        }


def _head(target: Trunk, folder: ModelFolder, loaded: Any) -> Maker:
    kind = architecture(folder.config())
    parsed = kind.parse(folder.config())
    if (
        not isinstance(loaded, Qwen35Mtp)
        or not isinstance(target, Qwen35)
        or not isinstance(parsed, Qwen35Config)
    ):
        raise ModelError(f"{_OTHERS}.")

    def made(weights: Weights) -> Qwen35Mtp:
        bare = new()
        if not fill(bare, weights, target.dtype, "The MTP head") and is_packed(target):
            quantize_floats(bare, SpecConfig.draft_bits)
        return bare

    def new() -> Qwen35Mtp:
        return Qwen35Mtp(parsed, target)

    return Maker(
        lambda: kind.sanitize(folder.read(), parsed)[1],
        made,
        lambda fixed: ChainNetwork(target, new, fixed, loaded),
        loaded.dtype,
        loaded,
    )


def _eagle3(target: Trunk, folder: ModelFolder, loaded: Eagle3Head) -> Maker:
    return eagle3_maker(target, folder.config(), folder.read, loaded)


def eagle3_maker(
    target: Trunk,
    config: Mapping[str, Any],
    read: Callable[[], Weights],
    like: Eagle3Head,
    stored: mx.Dtype | None = None,
) -> Maker:
    """like: a fused one with its vocabulary. stored: dtype of files, None for that of `like`."""
    parsed, names = Eagle3Config.from_dict(config), sanitize_drafter(read()).keys()
    return Maker(
        read,
        lambda weights: assemble_drafter(
            "eagle3", config, lambda: weights, target, like.dtype, is_fused=False
        ),
        lambda fixed: ChainNetwork(target, lambda: Eagle3Head(parsed, target, names), fixed, like),
        stored or like.dtype,
    )


def _draft_model(target: Trunk, folder: ModelFolder, loaded: Any) -> Maker:
    if not isinstance(loaded, Trunk):
        raise ModelError("A draft model that runs by mlx-lm's code cannot be adapted.")
    from training.lora_network import LoraNetwork  # mlx-lm is slow to import

    network = LoraNetwork(target, folder, loaded)
    return Maker(lambda: network.begun, network.filled, lambda fixed: network, mx.float32)


def _block(target: Trunk, folder: ModelFolder, loaded: DFlash) -> Maker:
    config, parsed = folder.config(), loaded.config
    return Maker(
        folder.read,
        lambda weights: assemble_drafter(
            "dflash", config, lambda: weights, target, loaded.dtype, is_fused=False
        ),
        lambda fixed: BlockNetwork(target, lambda: DFlash(parsed, target), fixed, loaded),
        loaded.dtype,
    )
