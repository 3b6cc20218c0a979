"""Data for qmv_rows and the comparison that must hold; used by its tests and by the planted faults."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from checks_gdn import assert_close, numpy_of, same_bits

from mlxspec.kernels import qmv_rows as kernel
from mlxspec.kernels.qmv_rows import QuantizedWeight

ROUNDING = {mx.float32: 2e-6, mx.float16: 6e-4, mx.bfloat16: 5e-3}


def draw(
    num_rows: int,
    out: int,
    size: int,
    *,
    dtype: mx.Dtype = mx.float32,
    group: int = 64,
    bits: int = 4,
    seed: int = 0,
) -> tuple[mx.array, QuantizedWeight]:
    rng = np.random.default_rng(seed)
    x, w = (
        mx.array(rng.standard_normal((n, size)).astype(np.float32)).astype(dtype) for n in (num_rows, out)
    )
    return x, QuantizedWeight.of(w, group, bits)


def check_rows(x: mx.array, weight: QuantizedWeight) -> mx.array:
    """Against float64, and each row bit for bit that row alone."""
    shape, bits = weight.shape, weight.bits
    codes = np.array(weight.codes).view(np.uint8)
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1)
    codes = codes.reshape(shape[0], -1, weight.group_size).astype(np.float64)
    plain = codes * numpy_of(weight.scales)[..., None] + numpy_of(weight.biases)[..., None].astype(np.float64)
    got = kernel.qmv_rows_metal(x, weight)
    assert_close(got, numpy_of(x).astype(np.float64) @ plain.reshape(shape).T, "y", ROUNDING[x.dtype])
    for i in range(x.shape[0]):
        assert same_bits(kernel.qmv_rows_metal(x[i : i + 1], weight), got[i : i + 1]), (
            f"row {i} is not bitwise what it is alone"
        )
    return got
