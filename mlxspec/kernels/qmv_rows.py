"""Quantized matrix product of few rows: y = x W^T for 1 to 8 rows of x and a quantized W, read once for all rows.

`qmv_rows` picks the Metal kernel or MLX's own quantized matmul (the twin). W is affine with 4 or 8 bits, or of a microscaling format:
mxfp4, nvfp4, mxfp8. The kernel adds each row up in the order of MLX's own one-row kernel. MLX's few-row kernels do not: for affine formats
on newer GPUs, for microscaling formats on all. `exact` asks for that order, otherwise the kernel has to have won its race. Affine
and microscaling formats are checked separately: on a GPU that decodes one kind wrongly, the other stays in use.

A race is won by some numbers of rows and lost by others, so a plain step may run MLX's kernel and a verify ours. That is allowed only where
the self-check found that both give a row the same bits. Where it did not, a won race is ignored and the report says so; `exact` still uses
the kernel, because it then does every product of 1 to 8 rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from mlxspec.kernels import launch
from mlxspec.platform.host import numbers

MAX_ROWS = 8
AFFINE = "affine"
_AFFINE_GROUPS, _AFFINE_BITS = (32, 64, 128), (4, 8)
MICROSCALING = {"mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}  # mode: group size, bits
_ALIGNED = 512  # MLX's one-row kernel adds in another order where in_features is no multiple of this
_NAME, _FP_NAME = "qmv_rows", "qmv_rows_fp"  # one Metal function, checked and raced under two names

_kernel = launch.MetalKernel(_NAME, inputs=["w", "scales", "biases", "x"], outputs=["y"])


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight as `mx.quantize` packs it: codes (N, K * bits / 32) uint32, and one scale a group.

    Affine formats: scales and biases (N, K / group_size) in the compute dtype. Microscaling formats: scales (N, K / group_size) uint8,
    which hold e8m0 (mxfp4, mxfp8) or e4m3 (nvfp4) numbers; biases None.
    """

    codes: mx.array
    scales: mx.array
    biases: mx.array | None
    group_size: int
    bits: int
    mode: str = AFFINE

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): out_features, in_features."""
        return self.scales.shape[0], self.scales.shape[1] * self.group_size

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.biases is None else self.biases.nbytes)

    @property
    def kernel(self) -> str:
        """The name under which `launch` checks and races the kernel for this format."""
        return _NAME if self.mode == AFFINE else _FP_NAME

    @property
    def format(self) -> str:
        """Such as "4 bit, group 64" or "mxfp4"."""
        return f"{self.bits} bit, group {self.group_size}" if self.mode == AFFINE else self.mode

    @classmethod
    def of(cls, weight: mx.array, group_size: int = 64, bits: int = 4, mode: str = AFFINE) -> QuantizedWeight:
        """Quantize a float weight (N, K). Raises ValueError where MLX has no such format."""
        codes, scales, *biases = mx.quantize(weight, group_size=group_size, bits=bits, mode=mode)
        return cls(codes, scales, biases[0] if biases else None, group_size, bits, mode)


def supports(x: mx.array, weight: QuantizedWeight) -> bool:
    """Whether the Metal kernel takes these."""
    return x.ndim == 2 and _supports(x.shape[0], weight, x.dtype)


def is_ours(num_rows: int, weight: QuantizedWeight, dtype: mx.Dtype, *, exact: bool = False) -> bool:
    """Whether `qmv_rows` launches the Metal kernel for so many rows of `dtype`."""
    wanted = exact or launch.wins(weight.kernel, race_key(num_rows, weight, dtype))
    is_fit = launch.in_use if exact else launch.may_mix
    return wanted and _supports(num_rows, weight, dtype) and is_fit(weight.kernel)


def _supports(num_rows: int, weight: QuantizedWeight, dtype: mx.Dtype) -> bool:
    rows = 1 <= num_rows <= MAX_ROWS and weight.shape[1] % _ALIGNED == 0
    return rows and dtype in launch.FLOATS and _is_known(weight, dtype)


def _is_known(weight: QuantizedWeight, dtype: mx.Dtype) -> bool:
    if weight.mode != AFFINE:
        known = MICROSCALING.get(weight.mode) == (weight.group_size, weight.bits)
        return known and weight.scales.dtype == mx.uint8
    same = weight.biases is not None and dtype == weight.scales.dtype == weight.biases.dtype
    return same and weight.bits in _AFFINE_BITS and weight.group_size in _AFFINE_GROUPS


def qmv_rows(x: mx.array, weight: QuantizedWeight, *, exact: bool = False) -> mx.array:
    """x (M, K) -> (M, N) in x's dtype. `exact`: every row bit for bit what it would be alone, wherever the kernel runs."""
    if x.ndim == 2 and is_ours(x.shape[0], weight, x.dtype, exact=exact):
        return qmv_rows_metal(x, weight)
    return qmv_rows_ops(x, weight)


def qmv_rows_ops(x: mx.array, weight: QuantizedWeight) -> mx.array:
    """MLX's own operation."""
    w = weight
    return mx.quantized_matmul(
        x, w.codes, w.scales, w.biases, transpose=True, group_size=w.group_size, bits=w.bits, mode=w.mode
    )


def qmv_rows_metal(x: mx.array, weight: QuantizedWeight) -> mx.array:
    """The kernel: one launch."""
    num_rows, out_features = x.shape[0], weight.shape[0]
    simdgroups = 2 if num_rows == 1 else 4
    biases = weight.scales if weight.biases is None else weight.biases  # where there are none, none is read
    (y,) = _kernel(
        [weight.codes, weight.scales, biases, x],
        outputs=[((num_rows, out_features), x.dtype)],
        template={
            "T": x.dtype,
            "M": num_rows,
            "GROUP": weight.group_size,
            "BITS": weight.bits,
            "AFFINE": int(weight.mode == AFFINE),
        },
        grid=(32, -(-out_features // 4), 1),
        threadgroup=(32, simdgroups, 1),
    )
    return y


def tune(weight: QuantizedWeight, dtype: mx.Dtype | None = None) -> dict[str, float]:
    """All races of this weight, for 1 to 8 rows: MLX's time over ours by `race_key`. dtype: what rows are in, None as `dtype_of_rows`."""
    dtype = dtype_of_rows(weight, dtype)
    raced = {race_key(n, weight, dtype): race(n, weight, dtype) for n in range(1, MAX_ROWS + 1)}
    return {key: ratio for key, ratio in raced.items() if ratio is not None}


def dtype_of_rows(weight: QuantizedWeight, dtype: mx.Dtype | None = None) -> mx.Dtype:
    """Of what is multiplied with a weight. dtype: of the model that it belongs to, where that has one."""
    return dtype or (weight.scales.dtype if weight.mode == AFFINE else mx.bfloat16)


def race(num_rows: int, weight: QuantizedWeight, dtype: mx.Dtype) -> float | None:
    """Race the kernel against MLX's own operation on this weight for so many rows of `dtype`; returns MLX's time over ours, None where the
    kernel does not run. Lost at once where it could be used but for its bits, which the self-check has seen at another shape only."""
    if not _supports(num_rows, weight, dtype) or not launch.in_use(weight.kernel):
        return None
    rng = np.random.default_rng(num_rows)
    x = mx.array(rng.standard_normal((num_rows, weight.shape[1]), np.float32)).astype(dtype)
    ours, theirs = partial(qmv_rows_metal, x, weight), partial(qmv_rows_ops, x, weight)
    key = race_key(num_rows, weight, dtype)
    if launch.may_mix(weight.kernel) and not _matches(ours(), x, weight):
        launch.set_speedup(weight.kernel, key, launch.LOST)
        return launch.LOST
    return launch.race(weight.kernel, key, ours, theirs, num_bytes=weight.nbytes)


def unraced(weight: QuantizedWeight, dtype: mx.Dtype) -> list[int]:
    """Numbers of rows of which no race is on record whose result could be used."""
    if not launch.may_mix(weight.kernel):
        return []
    known = launch.speedups().get(weight.kernel, {})
    rows = range(1, MAX_ROWS + 1)
    return [n for n in rows if _supports(n, weight, dtype) and race_key(n, weight, dtype) not in known]


def race_key(num_rows: int, weight: QuantizedWeight, dtype: mx.Dtype) -> str:
    """Under which a race is on record."""
    out_features, in_features = weight.shape
    name = str(dtype).removeprefix("mlx.core.")
    return f"{in_features} to {out_features}, {name}, {weight.format}, {num_rows} rows"


@launch.self_check(_NAME, raced=True)
def _self_check() -> launch.Check:
    """Affine formats."""
    return _check((64, bits, AFFINE) for bits in _AFFINE_BITS)


@launch.self_check(_FP_NAME, raced=True, text=_NAME)
def _self_check_fp() -> launch.Check:
    """Microscaling formats."""
    return _check((group, bits, mode) for mode, (group, bits) in MICROSCALING.items())


def _check(formats: Iterable[tuple[int, int, str]]) -> launch.Check:
    """Against numpy's product with the dequantized weight; notes whether rows are bit for bit MLX's own one-row result."""
    rng = np.random.default_rng(0)
    worst, same = 0.0, True
    for group, bits, mode in formats:
        for dtype, limit in ((mx.float32, 1e-5), (mx.bfloat16, 1e-2)):
            values = [
                mx.array(rng.standard_normal(size, np.float32)).astype(dtype)
                for size in ((70, 1024), (5, 1024))
            ]
            weight, x = QuantizedWeight.of(values[0], group, bits, mode), values[1]
            packed = weight.codes, weight.scales, weight.biases
            plain = mx.dequantize(*packed, group_size=group, bits=bits, mode=mode, dtype=dtype)
            got = qmv_rows_metal(x, weight)
            wanted = mx.array(numbers(x) @ numbers(plain).T)
            worst = max(worst, launch.largest_error([got], [wanted]) / limit)
            same = same and _matches(got, x, weight)
    note = f"rows are {'' if same else 'not '}bit for bit MLX's own one-row results"
    return launch.Check(error=worst, limit=1.0, note=note, matches_mlx=same)


def _matches(got: mx.array, x: mx.array, weight: QuantizedWeight) -> bool:
    """Whether each row of a result has the bits of MLX's own operation on that row of x alone."""
    alone = mx.concatenate([qmv_rows_ops(x[i : i + 1], weight) for i in range(x.shape[0])])
    return bool(mx.array_equal(got, alone).item())
