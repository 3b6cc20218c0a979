"""float16 instead of bfloat16. GPUs of Apple's generations 13 and 14 (M1 and M2) have no bfloat16 arithmetic and emulate it.

There, what a folder stores in bfloat16 is read as float16, unless a value does not fit into float16: a weight, or a number that a trial
prompt gives. Knows arrays, modules and models; knows no tokenizer and no drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxspec.kernels.flat import FlatRows
from mlxspec.loading.names import printable
from mlxspec.loading.weights import FolderWeights, Weights, is_of_a_tower
from mlxspec.models.base import Model
from mlxspec.models.qwen3_5_mtp import Qwen35Mtp
from mlxspec.platform import device, kept_json


def narrow(weights: Weights) -> None:
    """Replace bfloat16 tensors by float16 ones, lazily. Towers stay, since no trial prompt runs through them. All stay where the embedding
    is in a format that MLX unpacks to bfloat16: two dtypes would make MLX compute in float32."""
    if _unpacks_to_bfloat16(weights):
        return
    for name, value in weights.items():
        if value.dtype == mx.bfloat16 and not is_of_a_tower(name):
            weights[name] = value.astype(mx.float16)
    if isinstance(weights, FolderWeights):
        weights.is_narrowed = True


def narrow_module(module: nn.Module) -> None:
    """Replace bfloat16 parameters of a module of mlx-lm by float16 ones, lazily, except those that its class wants as they are."""
    named = dict(tree_flatten(module.parameters()))
    may = getattr(module, "cast_predicate", lambda _: True)
    if not _unpacks_to_bfloat16(named):
        changed = [(k, v.astype(mx.float16)) for k, v in named.items() if v.dtype == mx.bfloat16 and may(k)]
        module.update(tree_unflatten(changed))


def _unpacks_to_bfloat16(weights: Weights) -> bool:
    return any("embed" in k and k.endswith(".scales") and v.dtype == mx.uint8 for k, v in weights.items())


def weight_beyond(modules: Sequence[nn.Module]) -> str | None:
    """Return which weight of evaluated modules float16 cannot hold, as the subject and verb of a sentence; None where all fit."""
    for module in modules:
        for name, value in tree_flatten(module.parameters()):
            if mx.issubdtype(value.dtype, mx.floating) and not mx.isfinite(value).all().item():
                return f"{printable(name)} holds a number"
    return None


def prompt_beyond(model: Model, tokens: Sequence[int], head: Qwen35Mtp | None = None) -> str | None:
    """Return whether the model, or its MTP head behind it, gives a number that float16 cannot hold while it reads a trial prompt, in the
    form of `weight_beyond`."""
    ids, num = mx.array(list(tokens), mx.int32), len(tokens)
    rows = FlatRows((num,), is_prompt=True)
    outs: list[Any] = [model.forward(ids, rows, model.make_cache(1), certain=True, logits_at="last")]
    if head is not None:
        rows = FlatRows((num - 1,))
        outs.append(head.forward(ids[1:], outs[0].hidden[:-1], rows, head.make_cache(1), logits_at="last"))
    fit = [mx.isfinite(out.hidden).all() & mx.isfinite(out.logits.max()) for out in outs]
    return None if mx.stack(fit).all().item() else "a trial prompt gives a number"


class Float16Trial:
    """The result of a trial of files, kept in the user's cache folder: later loads need no trial. found: None where nothing is known, ""
    where all fits, else as `weight_beyond`."""

    def __init__(self, files: Sequence[Path]) -> None:
        """files: all that the weights of a load are read from."""
        about = sorted((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files)
        self._path = kept_json.kept_file("float16", [mx.__version__, about])
        found = kept_json.read(self._path)
        self.found: str | None = found if isinstance(found, str) else None

    def keep(self, found: str | None) -> None:
        """Keep what was found, None for nothing that does not fit."""
        self.found = found or ""
        kept_json.write(self._path, self.found)


def reason(dtype: mx.Dtype, *, is_asked: bool, is_tried: bool, beyond: str | None = None) -> str:
    """Return a sentence on what a model is computed in, and why.

    is_asked: the caller named the dtype. is_tried: float16 was to take the place of bfloat16. beyond: as `weight_beyond` has it.
    """
    name = str(dtype).removeprefix("mlx.core.")
    if is_asked:
        return f"{name}, as requested by --dtype (dtype)."
    if beyond:
        return (
            f"{name}, as stored, although this GPU emulates it: {beyond} that float16 cannot hold. --dtype float16 computes in float16 "
            "nevertheless."
        )
    if is_tried and dtype == mx.float16:
        return f"{name}: this GPU (generation {device.gpu_generation()}) emulates bfloat16. --dtype bfloat16 computes as stored."
    if is_tried and dtype == mx.bfloat16:
        return f"{name}, although this GPU emulates it: MLX unpacks the format of the embedding to it."
    if not device.has_gpu() and dtype == mx.float32:
        return f"{name}, in which models are fastest without a GPU."
    return f"{name}, as stored."


def expected_dtype(model: Any, files: Sequence[Path]) -> str:
    """Return `reason`'s sentence before a load. model: without weights, as stored. files: those of a load."""
    dtype, is_tried = model.dtype, device.emulates_bfloat16()
    beyond = Float16Trial(files).found if is_tried else None
    if is_tried and dtype == mx.bfloat16 and not _unpacks_to_bfloat16(dict(tree_flatten(model.parameters()))):
        dtype = mx.bfloat16 if beyond else mx.float16
    said = reason(dtype, is_asked=False, is_tried=is_tried, beyond=beyond)
    is_open = dtype == mx.float16 != model.dtype and beyond is None
    return (
        f"{said} bfloat16 stays if the first load finds a number that float16 cannot hold."
        if is_open
        else said
    )
