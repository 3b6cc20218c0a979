"""Unpacks weights that are published in FP8 or NVFP4, lazily: the very numbers that the formats mean, in float32.

FP8: each weight is a float of 8 bits (E4M3), times a scale of a block of weights, of a row, or of the whole matrix:
    NAME, NAME_scale_inv    Qwen's and DeepSeek's repositories, in blocks of 128 x 128
    NAME, NAME_scale        ModelOpt and compressed-tensors
NVFP4: floats of 4 bits (E2M1), two in a byte, the first in its low half, times an E4M3 scale of 16 neighbours of a row, times one number:
    weight, weight_scale, weight_scale_2                  ModelOpt multiplies by the last
    weight_packed, weight_scale, weight_global_scale      compressed-tensors divides by it
Scales of activations and of keys and values are left out: both are computed in floats here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx

from mlxspec.errors import ModelError
from mlxspec.loading.names import printable
from mlxspec.loading.published import storage
from mlxspec.loading.repacking import repack

Weights = dict[str, mx.array]

_BLOCKS = (128, 64, 32, 16, 256, 512, 1)  # sides of blocks that are tried where none is told
_UNUSED = tuple(f".{name}_scale" for name in ("input", "input_global", "output", "activation", "k", "v", "q"))


class Published(NamedTuple):
    """The stored form of a matrix that was unpacked. format: its name; size: number of weights; nbytes: bytes with the scales."""

    format: str
    size: int
    nbytes: int


def unpack(
    weights: Weights, dtypes: Mapping[str, str], told: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Published]:
    """Replace, in `weights`, matrices in FP8 and NVFP4 by floats, and integers of AWQ, GPTQ and compressed-tensors by MLX's arrays.
    Returns the stored form of each matrix that became floats, by name.

    dtypes: dtypes of the tensors, as safetensors headers spell them. told: the description of the format from config.json
    (published.description). Raises ModelError for a format that is not read, and for scales that do not fit.
    """
    for name in [n for n in weights if n.endswith(_UNUSED)]:
        del weights[name]
    if not storage({"quantization_config": told}, names=weights):
        return {}
    repack(weights, told)
    as_bytes = ("F8_E4M3", "U8") if "FP8" in storage({"quantization_config": told}) else ("F8_E4M3",)
    block = _block(told)
    found: dict[str, Published] = {}
    for name in list(weights):
        if name.endswith((".weight_scale_2", ".weight_global_scale")) and weights[name].dtype == mx.float32:
            path, is_divisor = name.rpartition(".")[0], name.endswith("global_scale")
            packed, scale = f"{path}.weight{'_packed' if is_divisor else ''}", f"{path}.weight_scale"
            if packed not in weights or scale not in weights:
                continue
            first, scales, second = (weights.pop(part) for part in (packed, scale, name))
            values = _of_nvfp4(path, first, scales, second, is_divisor=is_divisor)
            nbytes = first.nbytes + scales.nbytes + second.nbytes
            found[f"{path}.weight"] = Published("NVFP4", values.size, nbytes)
            weights[f"{path}.weight"] = values
    for name, dtype in dtypes.items():
        beside = [scale for scale in (f"{name}_scale_inv", f"{name}_scale") if scale in weights]
        if dtype in as_bytes and beside and name in weights:
            first, scales = weights.pop(name), weights.pop(beside[0])
            values, how = _of_fp8(name, first, scales, dtypes[beside[0]], block)
            found[name] = Published(how, values.size, first.nbytes + scales.nbytes)
            weights[name] = values
    return found


def _block(told: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns of a block of FP8 by the description in config.json, None where it has none."""
    sides = told.get("weight_block_size")
    if not isinstance(sides, list) or len(sides) != 2 or not all(type(n) is int and n > 0 for n in sides):
        return None
    return sides[0], sides[1]


def _of_nvfp4(
    path: str, packed: mx.array, scale: mx.array, second: mx.array, *, is_divisor: bool
) -> mx.array:
    """Return the values (..., out, in) float32 of NVFP4 matrices. path: of the module; packed (..., out, in / 2) and scale (..., out, in
    / 16) uint8; second: a second scale, one number or one for each matrix; is_divisor: whether values are divided by it. Raises
    ModelError where the parts do not fit together."""
    stack = packed.shape[:-2]
    fits = (
        packed.ndim >= 2 and scale.shape[:-1] == packed.shape[:-1] and 8 * scale.shape[-1] == packed.shape[-1]
    )
    bytes_only = packed.dtype == scale.dtype == mx.uint8
    one_each = second.size in (1, math.prod(stack))
    if not fits or not bytes_only or not one_each or 0 in packed.shape:
        raise ModelError(f"The parts of {printable(path)} do not fit together as NVFP4.")
    values = mx.dequantize(
        packed.view(mx.uint32), scale, group_size=16, bits=4, mode="nvfp4", dtype=mx.float32
    )
    second = second.reshape(*stack, 1, 1) if second.size > 1 else second.reshape(())
    return values / second if is_divisor else values * second


def _of_fp8(
    name: str, packed: mx.array, scale: mx.array, scale_dtype: str, block: tuple[int, int] | None
) -> tuple[mx.array, str]:
    """Return the values (..., out, in) float32 of FP8 matrices, and a name of the format. packed (..., out, in) uint8; scale: one
    number, or one for each matrix, row or block; scale_dtype: dtype of `scale` as safetensors spells it; block: rows and columns of a
    block, None where unknown. Raises ModelError where the scales do not fit."""
    values = mx.from_fp8(packed, dtype=mx.float32)
    if scale_dtype == "F8_E8M0":  # powers of two
        scale = mx.power(2.0, scale.astype(mx.float32) - 127.0)
    scale = scale.astype(mx.float32)
    *stack, rows, columns = packed.shape if packed.ndim >= 2 else (0, 0)
    if scale.size == 1 and (block is None or scale.ndim < 2):
        return values * scale.reshape(()), "FP8 with one scale"
    if stack and scale.size == stack[0] and scale.shape[0] == stack[0]:
        return values * scale.reshape(-1, 1, 1), "FP8 with a scale for each expert"
    if scale.shape == (*stack, rows, 1) or (not stack and scale.shape == (rows,)):
        return values * scale.reshape(*stack, rows, 1), "FP8 with a scale for each row"
    sides = None
    if scale.ndim == packed.ndim and scale.shape[:-2] == tuple(stack):
        sides = _sides((rows, columns), scale.shape[-2:], block)
    if sides is None:
        raise ModelError(
            f"The scales of {printable(name)} have shape {scale.shape}, which does not fit its shape {packed.shape}."
        )
    high, wide = sides
    if rows % high or columns % wide:  # the last blocks are cut
        scale = mx.repeat(mx.repeat(scale, high, axis=-2)[..., :rows, :], wide, axis=-1)[..., :columns]
        return values * scale, f"FP8 in blocks of {high} x {wide}"
    blocks = values.reshape(*stack, rows // high, high, columns // wide, wide) * scale[..., :, None, :, None]
    return blocks.reshape(packed.shape), f"FP8 in blocks of {high} x {wide}"


def _sides(
    shape: tuple[int, int], num: tuple[int, ...], told: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Return rows and columns of the blocks of a matrix, None where no size fits. shape: of the matrix; num: number of blocks along its
    rows and columns; told: the size that config.json gives, None where it gives none."""

    def fits(side: int, axis: int) -> bool:
        return -(-shape[axis] // side) == num[axis]

    if told is not None:
        return told if fits(told[0], 0) and fits(told[1], 1) else None
    sides = [next((side for side in _BLOCKS if fits(side, axis)), None) for axis in (0, 1)]
    return None if sides[0] is None or sides[1] is None else (sides[0], sides[1])
