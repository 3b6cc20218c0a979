"""Puts a folder's arrays into a module tree, packed or unpacked, in the wanted dtype; and evaluates what was filled lazily.

Knows arrays, formats and modules; knows no folder layout and no architecture.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxspec.errors import ModelError
from mlxspec.loading import progress
from mlxspec.loading.names import printable
from mlxspec.loading.progress import amount
from mlxspec.loading.published import description, storage
from mlxspec.loading.vision_weights import in_dtype
from mlxspec.loading.weights import Packed, Weights, cast, dequantize, formats, missing_and_extra
from mlxspec.platform import device, memory

STAYS_PACKED = (
    "The quantized weights stay packed, since unpacked they would take more than 6 GiB or more than half of this machine's memory. They "
    "are multiplied about ten times slower here, and prompts are read a hundred times slower."
)
HEAD_GROUP = 64  # of an MTP head that is quantized when it is loaded

ROUTERS = ("mlp.gate", "shared_expert_gate", "router.proj")  # who decides between experts


def fill(
    module: nn.Module,
    weights: Weights,
    dtype: mx.Dtype | None,
    what: str,
    foreign: str | None = None,
    *,
    whole: bool = False,
) -> bool:
    """Put `weights` into `module`, and return whether matrices stay quantized in memory. They are dequantized where that is faster. what:
    the module's name in messages. foreign: the name of an unsupported quantization, or None. whole: vectors are cast to `dtype` too, for
    modules whose operations need one dtype. Raises ModelError where tensors are missing, left over, or of another shape or dtype."""
    asked, dtype = dtype, _dtype_or_default(dtype)
    shapes = {name: place.shape for name, place in tree_flatten(module.parameters())}
    packed = formats(weights, shapes)
    if packed and not device.has_gpu():
        # there MLX multiplies with all formats but the one with a scale for each expert
        fits = memory.floats_fit(4 * sum(math.prod(shape) for shape in shapes.values()))
        unpacked = {path: how for path, how in packed.items() if fits or how.scaled}
        weights = dequantize(weights, unpacked, dtype or mx.float32)
        packed = {path: how for path, how in packed.items() if path not in unpacked}
    if packed:
        _quantize_like(module, packed)
    norms = {f"{path}.weight": m for path, m in module.named_modules() if isinstance(m, nn.RMSNorm)}
    if whole and dtype is not None:
        weights = in_dtype(weights, dtype)
    else:
        weights = cast(weights, dtype, norms, scales_dtype=asked)
    expected = dict(tree_flatten(module.parameters()))
    difference = missing_and_extra(expected, weights)
    if difference:
        because = (
            f"; it is quantized in the way of {printable(foreign)}, which is not supported" if foreign else ""
        )
        raise ModelError(f"{what} cannot be loaded: {difference}{because}.")
    for name, value in weights.items():
        place = expected[name]
        if value.shape != place.shape:
            raise ModelError(
                f"{what} cannot be loaded: {name} has shape {value.shape}, expected {place.shape}."
            )
        floats = mx.issubdtype(value.dtype, mx.floating) and mx.issubdtype(place.dtype, mx.floating)
        if not floats and value.dtype != place.dtype:
            raise ModelError(
                f"{what} cannot be loaded: {name} holds {_dtype(value)}, expected {_dtype(place)}."
            )
    module.load_weights(list(weights.items()), strict=True)
    for norm in norms.values() if not whole else ():
        if norm.weight.dtype != module.dtype:
            norm.weight = norm.weight.astype(mx.float32)
    module.eval()
    return bool(packed)


def evaluate(modules: Sequence[nn.Module]) -> None:
    """Evaluate the weights of modules that were loaded lazily, array by array. The next array is read while the one before is cast or
    dequantized."""
    # layers draw initial values: unless their keys are evaluated, the draws of all loads stay as one growing graph
    mx.eval(mx.random.state)
    arrays = [a for _, a in tree_flatten([m.parameters() for m in modules])]
    with progress.steps("loading", sum(a.nbytes for a in arrays)) as step:
        for array, following in zip_longest(arrays, arrays[1:]):
            if following is not None:
                mx.async_eval(array, following)
            mx.eval(array)
            step(array.nbytes)


def check_finite(module: nn.Module, what: str) -> None:
    """Raise ModelError where an evaluated weight of the module has a value that is infinite or not a number. what: the module's name in the
    message."""
    for name, value in tree_flatten(module.parameters()):
        if mx.issubdtype(value.dtype, mx.floating) and not mx.isfinite(value).all().item():
            raise ModelError(f"{what} cannot be used: {printable(name)} holds values that are no numbers.")


def is_packed(module: nn.Module) -> bool:
    """Return whether matrices of the module are quantized in memory."""
    return any(name.endswith(".scales") for name, _ in tree_flatten(module.parameters()))


def quantize_floats(head: nn.Module, bits: int) -> None:
    """Quantize the float matrices of a drafter to `bits` bits, before it is fused. Routers of experts stay floats, and 16 bits change
    nothing."""

    def is_packable(path: str, part: nn.Module) -> bool:
        is_matrix = hasattr(part, "to_quantized") and not path.endswith(ROUTERS)
        return is_matrix and part.weight.shape[-1] % HEAD_GROUP == 0

    if bits < 16:
        nn.quantize(head, HEAD_GROUP, bits, class_predicate=is_packable)
        head.bits_at_load = bits


def unpacked_dtype(weights: Weights, dtype: mx.Dtype | None) -> mx.Dtype | None:
    """Return the dtype for loading. Where `dtype` is None and matrices were dequantized, as MLX does not have their format, this is the
    dtype of most of the other matrices; else it is `dtype`."""
    stored = getattr(weights, "stored", {})
    if dtype is not None or not stored or not device.has_gpu():
        return dtype
    sizes: Counter[mx.Dtype] = Counter({mx.bfloat16: 1})
    for name, value in weights.items():
        if name not in stored and value.ndim > 1 and mx.issubdtype(value.dtype, mx.floating):
            sizes[value.dtype] += value.size
    return sizes.most_common(1)[0][0]


def unpacked_notice(weights: Weights, dtype: mx.Dtype) -> list[str]:
    """Return a sentence on matrices that were dequantized as MLX does not have their format, with their sizes; an empty list where there
    are none."""
    stored = getattr(weights, "stored", {}).values()
    if not stored:
        return []
    formats = " and ".join(sorted({how.format for how in stored}))
    held, size = sum(how.nbytes for how in stored), dtype.size * sum(how.size for how in stored)
    return [
        f"{len(stored)} matrices are stored as {formats} in {amount(held)}. They are unpacked, and take {amount(size)} as "
        f"{str(dtype).removeprefix('mlx.core.')}; `mlxspec convert --bits 8` or `--mode nvfp4` writes a folder that takes less."
    ]


def foreign_format(config: Mapping[str, Any]) -> str | None:
    """Return the name of the folder's quantization where it is not supported, for an error message; else None."""
    try:
        storage(config)
    except ModelError:
        return str(description(config).get("quant_method"))
    return None


def _quantize_like(module: nn.Module, packed: Mapping[str, Packed]) -> None:
    """Quantize the submodules at the paths in `packed`, each in its format, so that they can take quantized tensors."""

    def how(path: str, m: nn.Module) -> dict[str, Any] | bool:
        if path not in packed or not hasattr(m, "to_quantized"):
            return False
        group_size, bits, mode, scaled = packed[path]
        form = {"group_size": group_size, "bits": bits, "mode": mode}
        return form | {"global_scale": True} if scaled else form

    nn.quantize(module, class_predicate=how)


def _dtype_or_default(dtype: mx.Dtype | None) -> mx.Dtype | None:
    return mx.float32 if dtype is None and not device.has_gpu() else dtype


def _dtype(x: mx.array) -> str:
    return str(x.dtype).removeprefix("mlx.core.")
