"""Weights as others publish them, written in numpy by the formats' definitions: FP8 with scales of blocks, rows or whole matrices, and
NVFP4 of ModelOpt and of compressed-tensors. Knows bytes and names; knows nothing of mlxspec.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Tensors = dict[str, tuple[str, np.ndarray]]  # name -> (dtype of a safetensors header, bytes or numbers)
Pack = Callable[[str, np.ndarray], tuple[Tensors, np.ndarray]]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_TINY, _LARGEST = np.float32(1e-12), np.float32(448)


def e4m3(code: int) -> float:
    """The number of a byte, of those without a sign and below 0x7f, which is none."""
    exponent, part = code >> 3, code & 7
    return (8 + part) * 2.0 ** (exponent - 10) if exponent else part * 2.0**-9


E4M3 = np.array([e4m3(code) for code in range(127)], np.float32)


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Codes of the nearest numbers of a growing table, by size; larger ones take the last."""
    at = np.clip(np.searchsorted(table, values), 1, len(table) - 1)
    return np.where(values - table[at - 1] <= table[at] - values, at - 1, at).astype(np.uint8)


def to_e4m3(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes, and what they mean."""
    codes = nearest(np.abs(values), E4M3)
    return codes | (np.signbit(values) << 7).astype(np.uint8), np.copysign(E4M3[codes], values)


def fp8(high: int | None, wide: int | None, suffix: str = "_scale_inv", scale_dtype: str = "F32") -> Pack:
    """Scales of blocks of so many rows and columns; None: of all."""

    def pack(name: str, value: np.ndarray) -> tuple[Tensors, np.ndarray]:
        *stack, rows, columns = value.shape
        tall, broad = high or rows, wide or columns
        num = -(-rows // tall), -(-columns // broad)
        padded = np.zeros((*stack, num[0] * tall, num[1] * broad), np.float32)
        padded[..., :rows, :columns] = np.abs(value)
        blocks = padded.reshape(*stack, num[0], tall, num[1], broad)
        scale = np.maximum(blocks.max((-3, -1)) / _LARGEST, _TINY).astype(np.float32)
        if scale_dtype == "BF16":
            scale = (scale.view(np.uint32) & 0xFFFF0000).view(np.float32)
        whole = scale.repeat(tall, -2).repeat(broad, -1)[..., :rows, :columns]
        codes, means = to_e4m3(np.clip(value / whole, -_LARGEST, _LARGEST))
        kept = scale.reshape(()) if high is wide is None and not stack else scale
        return {name: ("F8_E4M3", codes), name + suffix: (scale_dtype, kept)}, means * whole

    return pack


def nvfp4(is_divisor: bool) -> Pack:
    """is_divisor: as compressed-tensors has it."""

    def pack(name: str, value: np.ndarray) -> tuple[Tensors, np.ndarray]:
        path = name.removesuffix(".weight")
        second = np.float32(np.abs(value).max() / (6 * _LARGEST))
        if is_divisor:
            second = np.float32(1) / (np.float32(1) / second)
        groups = value.reshape(*value.shape[:-1], -1, 16)
        scales, means = to_e4m3(np.abs(groups).max(-1) / 6 / second)
        whole = np.maximum(means * second, np.finfo(np.float32).tiny)[..., None]
        codes = nearest(np.abs(groups / whole), E2M1)
        unpacked = np.copysign(E2M1[codes] * means[..., None], groups).reshape(value.shape) * second
        signed = (codes | (np.signbit(groups) << 3).astype(np.uint8)).reshape(value.shape)
        packed = signed[..., 0::2] | signed[..., 1::2] << 4
        if is_divisor:
            one = np.float32([1 / second])
            unpacked = np.copysign(E2M1[codes] * means[..., None], groups).reshape(value.shape) / one
            names = {"weight_packed": ("U8", packed), "weight_global_scale": ("F32", one)}
            names["input_global_scale"] = ("F32", np.float32([1.0]))
        else:
            names = {"weight": ("U8", packed), "weight_scale_2": ("F32", second.reshape(()))}
            names["input_scale"] = ("F32", np.float32(1.0).reshape(()))
        names["weight_scale"] = ("F8_E4M3", scales)
        return {f"{path}.{part}": tensor for part, tensor in names.items()}, unpacked

    return pack


def _compressed(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "format": kind}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}


FORMATS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "FP8 of Qwen": (
        fp8(128, 128, scale_dtype="BF16"),
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    ),
    "FP8 in small blocks": (fp8(32, 16), {"quant_method": "fp8", "weight_block_size": [32, 16]}),
    "FP8 of compressed-tensors, by rows": (
        fp8(1, None, "_scale"),
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "FP8 of ModelOpt": (fp8(None, None, "_scale"), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "NVFP4 of ModelOpt": (
        nvfp4(is_divisor=False),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {}},
    ),
    "NVFP4 of compressed-tensors": (
        nvfp4(is_divisor=True),
        _compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    ),
}
# |w - w'| at most: relative, by digits (1/2 of the last), and of the largest of those with one scale (half of the smallest step)
BOUNDS = {"FP8": (2.0**-4, 1.1 * 2.0**-10 / 448), "NVFP4": (0.25 + 2.0**-4, 1.1 * 0.25 / 6)}


def is_packed(name: str, value: np.ndarray) -> bool:
    """What those who publish such weights quantize."""
    last = name.rpartition(".")[0].rpartition(".")[2]
    is_matrix = name.endswith(".weight") and value.ndim == 2 and last.endswith("_proj")
    return is_matrix or name.endswith((".in_proj_qkv.weight", ".in_proj_z.weight"))


def packed(arrays: dict[str, np.ndarray], pack: Pack) -> tuple[Tensors, dict[str, np.ndarray]]:
    """A model's tensors as they are published, and as they are meant."""
    tensors: Tensors = {}
    meant = dict(arrays)
    for name, value in arrays.items():
        if is_packed(name, value):
            made, meant[name] = pack(name, value)
            tensors |= made
        else:
            tensors[name] = ("F32", value)
    return tensors, meant


def save(path: Path, tensors: Tensors) -> None:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    pieces, at = [], 0
    for name, (dtype, value) in tensors.items():
        data = value.view(np.uint32) >> 16 if dtype == "BF16" else value
        raw = (data.astype(np.uint16) if dtype == "BF16" else data).tobytes()
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [at, at + len(raw)]}
        pieces.append(raw)
        at += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(pieces))
