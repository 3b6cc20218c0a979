"""Writes quantized integers as AWQ, GPTQ and compressed-tensors lay them out, in numpy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False}


def compressed(bits: int, side: int = 32, *, symmetric: bool = True) -> dict[str, Any]:
    how = {"num_bits": bits, "type": "int", "group_size": side, "strategy": "group", "symmetric": symmetric}
    groups = {"group_0": {"targets": ["Linear"], "weights": how}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


class Format(NamedTuple):
    told: dict[str, Any]
    bits: int
    layout: str
    symmetric: bool = False


FORMATS = {
    "AWQ": Format(AWQ, 4, "awq"),
    **{f"GPTQ-{bits}": Format(GPTQ | {"bits": bits}, bits, "gptq") for bits in (2, 4, 8)},
    "GPTQ-v2": Format(GPTQ | {"checkpoint_format": "gptq_v2"}, 4, "gptq"),
    **{f"integers-{bits}": Format(compressed(bits), bits, "compressed", symmetric=True) for bits in (4, 8)},
    "integers-zero": Format(compressed(4, symmetric=False), 4, "compressed"),
}


class Integers(NamedTuple):
    """numbers (out, in), zeros and scales (out, groups)."""

    numbers: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray


def integers(
    rows: int, columns: int, bits: int, side: int, *, symmetric: bool = False, seed: int = 0
) -> Integers:
    rng = np.random.default_rng(seed)
    groups = (rows, columns // side)
    zeros = np.full(groups, 1 << (bits - 1)) if symmetric else rng.integers(1, 1 << bits, groups)
    # powers of two, so that a product with a zero is exact in 16 bits
    scales = np.exp2(rng.integers(-8, -3, groups)).astype(np.float16)
    return Integers(rng.integers(0, 1 << bits, (rows, columns)), zeros, scales)


def words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """(n, m) -> (n, m * bits / 32) int32. order: which number of a word lies in each place; None: as they come."""
    each = 32 // bits
    grouped = numbers.reshape(numbers.shape[0], -1, each).astype(np.uint32)
    found = np.zeros(grouped.shape[:2], np.uint32)
    for place, i in enumerate(order or range(each)):
        found |= grouped[:, :, i] << np.uint32(bits * place)
    return found.view(np.int32)


def written(path: str, made: Integers, kind: Format) -> dict[str, np.ndarray]:
    """The tensors of one matrix."""
    numbers, zeros, scales = made
    if kind.layout == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        parts = {
            "qweight": words(numbers.T, 4, order),
            "qzeros": words(zeros.T, 4, order),
            "scales": scales.T,
        }
    elif kind.layout == "gptq":
        less = 0 if kind.told.get("checkpoint_format") == "gptq_v2" else 1
        groups = np.arange(numbers.shape[1], dtype=np.int32) // (numbers.shape[1] // scales.shape[1])
        parts = {
            "qweight": words(numbers, kind.bits).T,
            "qzeros": words(zeros.T - less, kind.bits),
            "scales": scales.T,
            "g_idx": groups,
        }
    else:
        parts = {
            "weight_packed": words(numbers, kind.bits),
            "weight_scale": scales,
            "weight_shape": np.array(numbers.shape, np.int64),
        }
        if not kind.symmetric:
            parts["weight_zero_point"] = words(zeros.T, kind.bits).T
    return {f"{path}.{name}": np.ascontiguousarray(value) for name, value in parts.items()}
