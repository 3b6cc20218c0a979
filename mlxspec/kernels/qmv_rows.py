"""Quantized matrix product of few rows: y = x W^T for 1 to 8 rows of x and a 4-bit or 8-bit affine W, read once for all rows.

`qmv_rows` picks the Metal kernel or MLX's own quantized matmul (the twin). The kernel adds each row up in the order of MLX's own one-row
kernel, which MLX's few-row kernels do not on newer GPUs; `exact` asks for that, otherwise the kernel has to have won its race (`tune`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from mlxspec.kernels import launch
from mlxspec.platform.host import numbers

MAX_ROWS = 8
_GROUPS = (32, 64, 128)
_BITS = (4, 8)
_ALIGNED = 512  # MLX's one-row kernel adds in another order where in_features is no multiple of this
_NAME = "qmv_rows"

_kernel = launch.MetalKernel(_NAME, inputs=["w", "scales", "biases", "x"], outputs=["y"])


@dataclass(frozen=True)
class QuantizedWeight:
    """codes (N, K * bits / 32) uint32, scales and biases (N, K / group_size) in the compute dtype, of an affine format."""

    codes: mx.array
    scales: mx.array
    biases: mx.array
    group_size: int
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): out_features, in_features."""
        return self.scales.shape[0], self.scales.shape[1] * self.group_size

    @classmethod
    def of(cls, weight: mx.array, group_size: int = 64, bits: int = 4) -> QuantizedWeight:
        """Quantize a float weight (N, K)."""
        codes, scales, biases = mx.quantize(weight, group_size=group_size, bits=bits)
        return cls(codes, scales, biases, group_size, bits)


def supports(x: mx.array, weight: QuantizedWeight) -> bool:
    """Whether the Metal kernel takes these."""
    return (
        (weight.bits in _BITS and weight.group_size in _GROUPS)
        and (x.ndim == 2 and 1 <= x.shape[0] <= MAX_ROWS and weight.shape[1] % _ALIGNED == 0)
        and (x.dtype in launch.FLOATS and x.dtype == weight.scales.dtype == weight.biases.dtype)
    )


def qmv_rows(x: mx.array, weight: QuantizedWeight, *, exact: bool = False) -> mx.array:
    """x (M, K) -> (M, N) in x's dtype. `exact`: every row bit for bit what it would be alone, wherever the kernel runs."""
    wanted = exact or launch.wins(_NAME, _race_key(x, weight))
    if wanted and supports(x, weight) and launch.in_use(_NAME):
        return qmv_rows_metal(x, weight)
    return qmv_rows_ops(x, weight)


def qmv_rows_ops(x: mx.array, weight: QuantizedWeight) -> mx.array:
    """MLX's own operation."""
    w = weight
    return mx.quantized_matmul(
        x, w.codes, w.scales, w.biases, transpose=True, group_size=w.group_size, bits=w.bits
    )


def qmv_rows_metal(x: mx.array, weight: QuantizedWeight) -> mx.array:
    """The kernel: one launch."""
    num_rows, out_features = x.shape[0], weight.shape[0]
    simdgroups = 2 if num_rows == 1 else 4
    (y,) = _kernel(
        [weight.codes, weight.scales, weight.biases, x],
        outputs=[((num_rows, out_features), x.dtype)],
        template={"T": x.dtype, "M": num_rows, "GROUP": weight.group_size, "BITS": weight.bits},
        grid=(32, -(-out_features // 4), 1),
        threadgroup=(32, simdgroups, 1),
    )
    return y


def tune(weight: QuantizedWeight, dtype: mx.Dtype | None = None) -> dict[str, float]:
    """Race the kernel against MLX's own operation on this weight for 1 to 8 rows; returns MLX's time over ours by width. Nothing where the
    kernel is not in use."""
    found: dict[str, float] = {}
    for num_rows in range(1, MAX_ROWS + 1):
        x = mx.ones((num_rows, weight.shape[1]), dtype or weight.scales.dtype)
        if supports(x, weight) and launch.in_use(_NAME):
            key = _race_key(x, weight)
            found[key] = launch.race(
                _NAME, key, partial(qmv_rows_metal, x, weight), partial(qmv_rows_ops, x, weight)
            )
    return found


def _race_key(x: mx.array, weight: QuantizedWeight) -> str:
    out_features, in_features = weight.shape
    dtype = str(x.dtype).removeprefix("mlx.core.")
    kind = f"{dtype}, {weight.bits} bit, group {weight.group_size}"
    return f"{in_features} to {out_features}, {kind}, {x.shape[0]} rows"


@launch.self_check(_NAME, raced=True)
def _self_check() -> launch.Check:
    """Against numpy's product with the dequantized weight; notes whether rows are bit for bit MLX's own one-row result."""
    rng = np.random.default_rng(0)
    worst, same = 0.0, True
    for bits in _BITS:
        for dtype, limit in ((mx.float32, 1e-5), (mx.bfloat16, 1e-2)):
            values = [
                mx.array(rng.standard_normal(size, np.float32)).astype(dtype)
                for size in ((70, 1024), (5, 1024))
            ]
            weight, x = QuantizedWeight.of(values[0], 64, bits), values[1]
            plain = mx.dequantize(weight.codes, weight.scales, weight.biases, group_size=64, bits=bits)
            got = qmv_rows_metal(x, weight)
            wanted = mx.array(numbers(x) @ numbers(plain).T)
            worst = max(worst, launch.largest_error([got], [wanted]) / limit)
            alone = mx.concatenate([qmv_rows_ops(x[i : i + 1], weight) for i in range(x.shape[0])])
            same = same and bool(mx.array_equal(got, alone).item())
    note = f"rows are {'' if same else 'not '}bit for bit MLX's own one-row results"
    return launch.Check(error=worst, limit=1.0, note=note)
