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
    """Replace the bfloat16 tensors in `weights` by float16 ones, lazily. Tensors of vision and sound towers stay. All tensors stay where
    the embedding is in a format that MLX dequantizes to bfloat16, as two dtypes would make MLX compute in float32."""
    if _unpacks_to_bfloat16(weights):
        return
    for name, value in weights.items():
        if value.dtype == mx.bfloat16 and not is_of_a_tower(name):
            weights[name] = value.astype(mx.float16)
    if isinstance(weights, FolderWeights):
        weights.is_narrowed = True


def narrow_module(module: nn.Module) -> None:
    """Replace the bfloat16 parameters of mlx-lm's module by float16 ones, lazily, except those that its class keeps in their dtype."""
    named = dict(tree_flatten(module.parameters()))
    may = getattr(module, "cast_predicate", lambda _: True)
    if not _unpacks_to_bfloat16(named):
        changed = [(k, v.astype(mx.float16)) for k, v in named.items() if v.dtype == mx.bfloat16 and may(k)]
        module.update(tree_unflatten(changed))


def _unpacks_to_bfloat16(weights: Weights) -> bool:
    return any("embed" in k and k.endswith(".scales") and v.dtype == mx.uint8 for k, v in weights.items())


def weight_beyond(modules: Sequence[nn.Module]) -> str | None:
    """Return which weight of evaluated modules exceeds float16, as the beginning of a sentence ("NAME holds a number"); None where all
    fit."""
    for module in modules:
        for name, value in tree_flatten(module.parameters()):
            if mx.issubdtype(value.dtype, mx.floating) and not mx.isfinite(value).all().item():
                return f"{printable(name)} holds a number"
    return None


def prompt_beyond(model: Model, tokens: Sequence[int], head: Qwen35Mtp | None = None) -> str | None:
    """Run a trial prompt, and return "a trial prompt gives a number" where the model or its MTP head gives a number that exceeds float16;
    None where all fit. tokens: the prompt."""
    ids, num = mx.array(list(tokens), mx.int32), len(tokens)
    rows = FlatRows((num,), is_prompt=True)
    outs: list[Any] = [model.forward(ids, rows, model.make_cache(1), certain=True, logits_at="last")]
    if head is not None:
        rows = FlatRows((num - 1,))
        outs.append(head.forward(ids[1:], outs[0].hidden[:-1], rows, head.make_cache(1), logits_at="last"))
    fit = [mx.isfinite(out.hidden).all() & mx.isfinite(out.logits.max()) for out in outs]
    return None if mx.stack(fit).all().item() else "a trial prompt gives a number"


class Float16Trial:
    """The result of trying float16 with the weights in some files, kept in the user's cache folder, so that later loads need no trial.
    found: None where there is no result, "" where all numbers fit, else the beginning of a sentence as `weight_beyond` returns it."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the kept result for these files, if there is one. files: all files that the weights of a load are read from."""
        about = sorted((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files)
        self._path = kept_json.kept_file("float16", [mx.__version__, about])
        found = kept_json.read(self._path)
        self.found: str | None = found if isinstance(found, str) else None

    def keep(self, found: str | None) -> None:
        """Keep a result for later loads. found: as `weight_beyond` returns it, None where all numbers fit."""
        self.found = found or ""
        kept_json.write(self._path, self.found)


def reason(dtype: mx.Dtype, *, is_asked: bool, is_tried: bool, beyond: str | None = None) -> str:
    """Return a sentence on the dtype in which a model is computed, and why.

    is_asked: whether the caller named the dtype. is_tried: whether float16 was to replace bfloat16. beyond: what exceeds float16, as
    `weight_beyond` returns it.
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
    """Return, before a load, the sentence of `reason`. model: the model without evaluated weights, in the stored dtype. files: the files of
    the load."""
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
