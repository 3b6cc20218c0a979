"""Quantized matrix product of 1 to 8 rows, each added up in the order of MLX's own one-row kernel; each weight is read once for all rows.

MLX's few-row kernels add in another order: for affine formats on newer GPUs, for microscaling formats on all.
"""

from __future__ import annotations

import mlx.core as mx

from mlxspec.kernels import launch
from mlxspec.kernels.quantized_weight import ProductKernel, QuantizedWeight

MAX_ROWS = 8
_ROWS_OF_4 = 6  # a simdgroup takes 4 outputs for up to so many rows, else 3: sums of more do not fit into its registers
_metal = launch.MetalKernel("qmv_rows", inputs=["w", "scales", "biases", "x"], outputs=["y"])


def qmv_rows_metal(x: mx.array, weight: QuantizedWeight) -> mx.array:
    """Multiply x (M, K) with the weight in one launch, and return (M, N) in x's dtype."""
    num_rows, out_features = x.shape[0], weight.shape[0]
    outputs = 4 if num_rows <= _ROWS_OF_4 else 3
    simdgroups = 2 if num_rows == 1 else 4
    (y,) = _metal(
        weight.inputs(x),
        outputs=[((num_rows, out_features), x.dtype)],
        template={"M": num_rows, "OUTPUTS": outputs, **weight.template(x.dtype)},
        grid=(32, -(-out_features // outputs), 1),
        threadgroup=(32, simdgroups, 1),
    )
    return y


KERNEL = ProductKernel(
    name="qmv_rows",
    fp_name="qmv_rows_fp",
    run=qmv_rows_metal,
    rows=range(1, MAX_ROWS + 1),
    most_float32=MAX_ROWS,
    aligned=512,  # MLX's one-row kernel adds in another order where in_features is no multiple of this
    keeps_bits=True,
)
launch.self_check(KERNEL.name, raced=True)(KERNEL.check_affine)
launch.self_check(KERNEL.fp_name, raced=True, text=KERNEL.name)(KERNEL.check_microscaling)
