"""Repacks integers that are published in other layouts to MLX's affine format, lazily and number for number.

A matrix W (out, in) is scale * (q - zero) in groups along a row, with unsigned q of 2, 4 or 8 bits; MLX has scale * q + bias.
    AWQ                 qweight (in, out / 8), qzeros (groups, out / 8): 8 numbers of 4 bits in a word, in the order 0 2 4 6 1 3 5 7
    GPTQ                qweight (in * bits / 32, out), qzeros (groups, out * bits / 32): in order; zeros are stored less 1 (not in v2)
    compressed-tensors  weight_packed (out, in * bits / 32): MLX's own words; weight_zero_point (out * bits / 32, groups), else the middle
MXFP4 of compressed-tensors has MLX's bytes under other names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlxspec.errors import ModelError
from mlxspec.loading.names import printable

_GROUPS = (128, 64, 32)  # that MLX has
_OF_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # where each number of a word lies
Weights = dict[str, mx.array]


def repack(weights: Weights, told: Mapping[str, Any]) -> None:
    """Replace, in `weights`, the integers and scales of AWQ, GPTQ and compressed-tensors by MLX's arrays `weight`, `scales` and
    `biases`. told: the description of the format from config.json. Raises ModelError where the parts do not fit together, or the
    columns are quantized in another order than they are stored."""
    for path in [name.removesuffix(".qweight") for name in weights if name.endswith(".qweight")]:
        parts = {
            part: weights.pop(f"{path}.{part}", None) for part in ("qweight", "qzeros", "scales", "g_idx")
        }
        _put(weights, path, *(_of_awq(path, parts) or _of_gptq(path, parts, told)))
    for path in [name.removesuffix(".weight_packed") for name in weights if name.endswith(".weight_packed")]:
        if f"{path}.weight_global_scale" in weights:
            continue  # NVFP4
        packed, scale = weights.pop(f"{path}.weight_packed"), weights.pop(f"{path}.weight_scale", None)
        zero, shape = (weights.pop(f"{path}.weight_{part}", None) for part in ("zero_point", "shape"))
        if scale is None or packed.ndim != 2:
            raise _misfit(path)
        if packed.dtype == scale.dtype == mx.uint8:  # MXFP4
            if packed.shape[1] != 16 * scale.shape[1]:
                raise _misfit(path)
            weights |= {f"{path}.weight": packed.view(mx.uint32), f"{path}.scales": scale}
            continue
        _put(weights, path, *_of_compressed(path, packed, scale, zero, shape))


def _put(weights: Weights, path: str, words: mx.array, scale: mx.array, zero: mx.array, columns: int) -> None:
    """Put the arrays of one matrix in MLX's affine format into `weights`. path: of its module; words (out, in * bits / 32) uint32;
    scale, zero (out, groups); columns: its number of columns `in`. Raises ModelError for a size of groups that MLX does not have."""
    if not mx.issubdtype(scale.dtype, mx.floating) or columns % scale.shape[1]:
        raise _misfit(path)
    side = columns // scale.shape[1]
    group = next((g for g in _GROUPS if side % g == 0), None)
    if group is None:
        raise ModelError(f"{printable(path)} is quantized in groups of {side}, which MLX does not have.")
    scale, zero = (mx.repeat(x, side // group, axis=1) if side != group else x for x in (scale, zero))
    biases = (-zero.astype(mx.float32) * scale.astype(mx.float32)).astype(scale.dtype)
    weights |= {f"{path}.weight": words, f"{path}.scales": mx.contiguous(scale), f"{path}.biases": biases}


def _of_awq(path: str, parts: Mapping[str, Any]) -> tuple[mx.array, mx.array, mx.array, int] | None:
    """Return words, scales, zeros and number of columns of a matrix that is stored as AWQ does, for `_put`; None where its parts have
    another layout. parts: the matrix's arrays by name."""
    packed, zeros, scale = _words(path, parts)
    if packed.shape[1] * 8 != scale.shape[1] or packed.shape[1] == scale.shape[1]:
        return None
    if zeros.shape != (scale.shape[0], packed.shape[1]):
        raise _misfit(path)
    numbers = _numbers(packed, 4, _OF_AWQ)  # (in, out)
    return _packed(numbers.T, 4), scale.T, _numbers(zeros, 4, _OF_AWQ).T, packed.shape[0]


def _of_gptq(
    path: str, parts: Mapping[str, Any], told: Mapping[str, Any]
) -> tuple[mx.array, mx.array, mx.array, int]:
    packed, zeros, scale = _words(path, parts)
    rows = scale.shape[1]
    bits = zeros.shape[1] * 32 // rows
    if packed.shape[1] != rows or zeros.shape != (scale.shape[0], rows * bits // 32) or bits not in (2, 4, 8):
        raise _misfit(path)
    columns = packed.shape[0] * 32 // bits
    order = parts["g_idx"]
    if order is not None:
        groups = mx.arange(columns) // (columns // scale.shape[0])
        if order.shape != groups.shape or not mx.array_equal(order, groups).item():
            raise ModelError(
                f"The columns of {printable(path)} are quantized in another order (desc_act), which is not supported."
            )
    less = 0 if told.get("checkpoint_format") == "gptq_v2" else 1
    # a word holds numbers of one column of (in, out), which is MLX's word of a row
    return mx.contiguous(packed.T), scale.T, _numbers(zeros, bits).T.astype(mx.int32) + less, columns


def _of_compressed(
    path: str, packed: mx.array, scale: mx.array, zero: mx.array | None, shape: mx.array | None
) -> tuple[mx.array, mx.array, mx.array, int]:
    if shape is None or shape.size != 2 or packed.dtype not in (mx.int32, mx.uint32):
        raise _misfit(path)
    rows, columns = (int(n) for n in shape.tolist())
    bits = packed.shape[1] * 32 // columns if columns > 0 else 0
    scale = scale.reshape(rows, -1) if scale.ndim == 1 else scale
    if bits not in (4, 8) or packed.shape != (rows, columns * bits // 32) or scale.shape[0] != rows:
        raise _misfit(path)
    if zero is None:
        middle = mx.full(scale.shape, 1 << (bits - 1), mx.int32)
    elif zero.shape == (rows * bits // 32, scale.shape[1]):
        middle = _numbers(mx.contiguous(zero.T).view(mx.uint32), bits).T
    else:
        raise _misfit(path)
    return packed.view(mx.uint32), scale, middle, columns


def _words(path: str, parts: Mapping[str, Any]) -> tuple[mx.array, mx.array, mx.array]:
    found = [parts[name] for name in ("qweight", "qzeros", "scales")]
    if any(x is None or x.ndim != 2 or x.size == 0 for x in found):
        raise _misfit(path)
    packed, zeros, scale = found
    if packed.dtype not in (mx.int32, mx.uint32) or zeros.dtype != packed.dtype:
        raise _misfit(path)
    return packed.view(mx.uint32), zeros.view(mx.uint32), scale


def _numbers(words: mx.array, bits: int, places: tuple[int, ...] | None = None) -> mx.array:
    """Return the numbers (n, m * 32 / bits) that are packed in words (n, m). places: the place within a word of each number, None where
    they are in order."""
    shifts = mx.array(places or list(range(32 // bits)), mx.uint32) * bits
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).reshape(words.shape[0], -1)


def _packed(numbers: mx.array, bits: int) -> mx.array:
    """Return numbers (n, m) packed in order into words (n, m * bits / 32) uint32."""
    each = 32 // bits
    shifts = mx.arange(each, dtype=mx.uint32) * bits
    return (numbers.reshape(numbers.shape[0], -1, each) << shifts).sum(axis=-1).astype(mx.uint32)


def _misfit(path: str) -> ModelError:
    return ModelError(f"The parts of {printable(path)} do not fit together as quantized integers.")
