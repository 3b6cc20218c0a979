"""Quantized weights as MLX packs them, and kernels that multiply few rows with them: formats, names of races, numbers to check them on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product

import mlx.core as mx
import numpy as np

from mlxspec.kernels import exactness, launch
from mlxspec.platform.host import numbers

AFFINE = "affine"
MICROSCALING = {"mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}  # mode: group size, bits
AFFINE_BITS = (4, 8)
_AFFINE_GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight as `mx.quantize` packs it: codes (N, K * bits / 32) uint32, and one scale for each group.

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
        """Return the weight's shape (N, K): out_features, in_features."""
        return self.scales.shape[0], self.scales.shape[1] * self.group_size

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.biases is None else self.biases.nbytes)

    @property
    def format(self) -> str:
        """Return the format as text, such as "4 bit, group 64" or "mxfp4"."""
        return f"{self.bits} bit, group {self.group_size}" if self.mode == AFFINE else self.mode

    @classmethod
    def of(cls, weight: mx.array, group_size: int = 64, bits: int = 4, mode: str = AFFINE) -> QuantizedWeight:
        """Quantize a float weight (N, K). Raises ValueError where MLX has no such format."""
        codes, scales, *biases = mx.quantize(weight, group_size=group_size, bits=bits, mode=mode)
        return cls(codes, scales, biases[0] if biases else None, group_size, bits, mode)

    def values(self, dtype: mx.Dtype) -> mx.array:
        """Return the weight (N, K) in `dtype`, unpacked by MLX."""
        return mx.dequantize(
            self.codes,
            self.scales,
            self.biases,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            dtype=dtype,
        )

    def is_known_to_kernels(self, dtype: mx.Dtype) -> bool:
        """Return whether our kernels read this format with rows of `dtype`."""
        if dtype not in launch.FLOATS:
            return False
        if self.mode != AFFINE:
            known = MICROSCALING.get(self.mode) == (self.group_size, self.bits)
            return known and self.scales.dtype == mx.uint8
        same = self.biases is not None and dtype == self.scales.dtype == self.biases.dtype
        return same and self.bits in AFFINE_BITS and self.group_size in _AFFINE_GROUPS

    def inputs(self, x: mx.array) -> list[mx.array]:
        """Return a kernel's inputs w, scales, biases and x. Where the format has no biases, the scales take their place and are not
        read."""
        return [self.codes, self.scales, self.scales if self.biases is None else self.biases, x]

    def template(self, dtype: mx.Dtype) -> dict[str, object]:
        """Return a kernel's template arguments that describe the format."""
        return {"T": dtype, "GROUP": self.group_size, "BITS": self.bits, "AFFINE": int(self.mode == AFFINE)}


def dtype_of_rows(weight: QuantizedWeight, dtype: mx.Dtype | None = None) -> mx.Dtype:
    """Return the dtype of rows that are multiplied with a weight. dtype: of the weight's model, None where it has none."""
    return dtype or (weight.scales.dtype if weight.mode == AFFINE else mx.bfloat16)


def product_ops(x: mx.array, weight: QuantizedWeight) -> mx.array:
    """Multiply x (M, K) with the weight by MLX's own operation, and return (M, N)."""
    w = weight
    return mx.quantized_matmul(
        x, w.codes, w.scales, w.biases, transpose=True, group_size=w.group_size, bits=w.bits, mode=w.mode
    )


def random_rows(num_rows: int, weight: QuantizedWeight, dtype: mx.Dtype) -> mx.array:
    """Return random rows (num_rows, K) for a race."""
    rng = np.random.default_rng(num_rows)
    return mx.array(rng.standard_normal((num_rows, weight.shape[1]), np.float32)).astype(dtype)


def race_key(num_rows: int, weight: QuantizedWeight, dtype: mx.Dtype) -> str:
    """Return the name under which a race is on record."""
    out_features, in_features = weight.shape
    name = str(dtype).removeprefix("mlx.core.")
    return f"{in_features} to {out_features}, {name}, {weight.format}, {num_rows} rows"


def has_bits_of_single_rows(got: mx.array, x: mx.array, weight: QuantizedWeight) -> bool:
    """Return whether each row of the product `got` has the bits of MLX's own operation on that row of x alone."""
    alone = mx.concatenate([product_ops(x[i : i + 1], weight) for i in range(x.shape[0])])
    return bool(mx.array_equal(got, alone).item())


@dataclass(frozen=True, kw_only=True)
class ProductKernel:
    """A Metal kernel that multiplies few rows with a quantized weight.

    run: x (M, K) and a weight -> (M, N) in x's dtype. Affine and microscaling formats are checked and raced under two names: on a GPU
    that decodes one kind wrongly, the other stays in use. rows: the numbers of rows that it takes. most_float32: the largest of them in
    float32, of which a thread holds fewer in its registers. aligned: K is a multiple of this number. keeps_bits: a row has the bits of
    MLX's own operation on that row alone.
    """

    name: str
    fp_name: str
    run: Callable[[mx.array, QuantizedWeight], mx.array]
    rows: range
    most_float32: int
    aligned: int
    keeps_bits: bool

    def name_of(self, weight: QuantizedWeight) -> str:
        """Return the name under which `launch` checks and races the kernel for this weight's format."""
        return self.name if weight.mode == AFFINE else self.fp_name

    def supports(self, num_rows: int, weight: QuantizedWeight, dtype: mx.Dtype) -> bool:
        """Return whether the kernel takes num_rows rows of `dtype`."""
        is_few = num_rows <= self.most_float32 or dtype.size < mx.float32.size
        fits = num_rows in self.rows and is_few and weight.shape[1] % self.aligned == 0
        return fits and weight.is_known_to_kernels(dtype)

    def may_run(self, weight: QuantizedWeight) -> bool:
        """Return whether rounds may mix this kernel with MLX's own operation. A kernel that keeps bits may only where the self-check has
        found that it does."""
        name = self.name_of(weight)
        return launch.may_mix(name) if self.keeps_bits else launch.in_use(name)

    def check_affine(self) -> launch.Check:
        """Compare the kernel with numpy in affine formats and return the check."""
        return self._check((64, bits, AFFINE) for bits in AFFINE_BITS)

    def check_microscaling(self) -> launch.Check:
        """Compare the kernel with numpy in microscaling formats and return the check."""
        return self._check((group, bits, mode) for mode, (group, bits) in MICROSCALING.items())

    def _check(self, formats: Iterable[tuple[int, int, str]]) -> launch.Check:
        """Compare the kernel with numpy's product with the unpacked weight, in float32 and bfloat16 for these formats, and return the
        check. It includes whether rows have the bits of single rows."""
        rng = np.random.default_rng(0)
        worst, same = 0.0, True
        # Exact rounds launch every number of rows without a race, which would look at it; others launch what has won one.
        tried = self.rows if self.keeps_bits and exactness.is_demanded else (self.rows[len(self.rows) // 2],)
        for (group, bits, mode), num_rows in product(formats, tried):
            for dtype, limit in ((mx.float32, 1e-5), (mx.bfloat16, 1e-2)):
                values = [
                    mx.array(rng.standard_normal(size, np.float32)).astype(dtype)
                    for size in ((70, 1024), (num_rows, 1024))
                ]
                weight, x = QuantizedWeight.of(values[0], group, bits, mode), values[1]
                got = self.run(x, weight)
                wanted = mx.array(numbers(x) @ numbers(weight.values(dtype)).T)
                worst = max(worst, launch.largest_error([got], [wanted]) / limit)
                same = same and (not self.keeps_bits or has_bits_of_single_rows(got, x, weight))
        note = (
            f"rows are {'' if same else 'not '}bit for bit MLX's own one-row results"
            if self.keeps_bits
            else ""
        )
        return launch.Check(error=worst, limit=1.0, note=note, matches_mlx=same)
