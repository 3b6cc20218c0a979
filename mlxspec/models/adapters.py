"""LoRA and DoRA adapters in mlx-lm's format, folded into a model's weights before anything runs.

mlx-lm's own loader puts the adapter's layers in, as the model's modules have mlx-lm's names; each is then fused with the layer it adapts.
Nothing is left of the adapter at run time, so drafters, caches and kernels see an ordinary model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxspec.errors import ModelError

ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")


def fuse_adapter(model: nn.Module, adapter: str) -> None:
    """Add the adapter in a folder to the weights of `model`, lazily; a quantized layer is quantized again. Raises ModelError."""
    folder = _folder(adapter)
    from mlx_lm.tuner import dora, lora, utils

    try:
        utils.load_adapters(_WithLayers(model), str(folder))
    except KeyError as error:
        raise ModelError(f"The adapter in {folder} has no {error} in adapter_config.json.") from error
    except (ValueError, TypeError, AttributeError, RuntimeError, OSError) as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise ModelError(f"The adapter in {folder} cannot be used: {said}.") from error
    kinds = (lora.LoRALinear, lora.LoRASwitchLinear, lora.LoRAEmbedding, dora.DoRALinear, dora.DoRAEmbedding)
    fused = [(name, layer.fuse()) for name, layer in model.named_modules() if isinstance(layer, kinds)]
    if not fused and not _is_full(folder):
        raise ModelError(f"The adapter in {folder} adapts no layer of this model.")
    model.update_modules(tree_unflatten(fused))


class _WithLayers:
    """The model with its decoder layers where mlx-lm's loader looks for them; everything else is the model's own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @property
    def layers(self) -> list[nn.Module]:
        return list(self._model.language_model.model.layers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _is_full(folder: Path) -> bool:
    """Whether the folder holds whole layers that were trained, not what is added to them."""
    config = json.loads((folder / ADAPTER_FILES[0]).read_text(encoding="utf-8"))
    return bool(config.get("fine_tune_type") == "full")


def _folder(adapter: str) -> Path:
    try:
        folder = Path(adapter).expanduser()
        missing = [name for name in ADAPTER_FILES if not (folder / name).is_file()]
        is_folder = folder.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"{adapter} can be no folder of an adapter.") from error
    if not is_folder:
        raise ModelError(
            f"There is no folder {adapter}; an adapter is a folder as mlx-lm's training writes it."
        )
    if missing:
        raise ModelError(f"The adapter in {folder} lacks {missing[0]}.")
    return folder
