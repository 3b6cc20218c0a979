"""Quantized matrix product of 5 to 32 rows as products of 8 x 8 matrices; each weight is read and unpacked once for all rows.

A row's sums are added up in an order of their own, which does not depend on the number of rows.
"""

from __future__ import annotations

import mlx.core as mx

from mlxspec.kernels import launch
from mlxspec.kernels.quantized_weight import ProductKernel, QuantizedWeight

_SIMDGROUPS = 8
_metal = launch.MetalKernel("qmm_few", inputs=["w", "scales", "biases", "x"], outputs=["y"])


def qmm_few_metal(x: mx.array, weight: QuantizedWeight) -> mx.array:
    """Multiply x (M, K) with the weight in one launch, and return (M, N) in x's dtype."""
    num_rows, out_features = x.shape[0], weight.shape[0]
    tiles = -(-num_rows // 8)
    # so many that sums of a lane stay in registers, and those of a threadgroup within 16 KiB
    blocks = 4 if tiles <= 2 else 2
    (y,) = _metal(
        weight.inputs(x),
        outputs=[((num_rows, out_features), x.dtype)],
        template={"TILES": tiles, "BLOCKS": blocks, **weight.template(x.dtype)},
        grid=(32, _SIMDGROUPS * -(-out_features // (8 * blocks)), 1),
        threadgroup=(32, _SIMDGROUPS, 1),
    )
    return y


KERNEL = ProductKernel(
    name="qmm_few",
    fp_name="qmm_few_fp",
    run=qmm_few_metal,
    rows=range(5, 33),
    most_float32=24,
    aligned=64,
    keeps_bits=False,
)
launch.self_check(KERNEL.name, raced=True)(KERNEL.check_affine)
launch.self_check(KERNEL.fp_name, raced=True, text=KERNEL.name)(KERNEL.check_microscaling)
