"""Products with a quantized weight: chooses among MLX's own operation, our kernels for few rows and `wide` for many, by races on this
device.

`qmv_rows` gives every row the bits that it has alone. A race is won by some numbers of rows and lost by others, so a plain step may run
MLX's kernel and a verify `qmv_rows`. That is allowed only where the self-check found that both give a row the same bits: then `qmv_rows`
also takes several rows that it multiplies as fast as anything else, within the doubt of a race, unless MLX's operation keeps their bits
there too. Elsewhere a won race is ignored and the report says so; `exact` still uses the kernel, as it then does every product of 1 to 8
rows. `qmm_few` gives rows other bits, as MLX's own kernels for so many rows do; where those have the bits of single rows it does not
compete.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mlx.core as mx

from mlxspec.kernels import launch, qmm_few, qmv_rows, wide
from mlxspec.kernels.quantized_weight import (
    ProductKernel,
    QuantizedWeight,
    dtype_of_rows,
    has_bits_of_single_rows,
    product_ops,
    race_key,
    random_rows,
)

KERNELS = (qmv_rows.KERNEL, qmm_few.KERNEL)
RACED_ROWS = (*range(1, 9), 12, 16, 24, 32)  # other numbers of rows go by the next larger one


def product(x: mx.array, weight: QuantizedWeight, *, exact: bool = False) -> mx.array:
    """Multiply x (M, K) with the weight and return (M, N) in x's dtype. exact: every row has the bits of its product alone, wherever
    `qmv_rows` runs."""
    if x.ndim == 2 and not exact and wide.is_chosen(x.shape[0], weight, x.dtype):
        return wide.wide_product(x, weight)
    kernel = chosen(x.shape[0], weight, x.dtype, exact=exact) if x.ndim == 2 else None
    return product_ops(x, weight) if kernel is None else kernel.run(x, weight)


def chosen(
    num_rows: int, weight: QuantizedWeight, dtype: mx.Dtype, *, exact: bool = False
) -> ProductKernel | None:
    """Return the kernel that multiplies `num_rows` rows of `dtype`, None where MLX's own operation does."""
    if exact:
        kernel = next(k for k in KERNELS if k.keeps_bits)
        is_fit = kernel.supports(num_rows, weight, dtype) and launch.in_use(kernel.name_of(weight))
        return kernel if is_fit else None
    raced = next((num for num in RACED_ROWS if num >= num_rows), None)
    if raced is None:
        return None
    key = race_key(raced, weight, dtype)
    speed = {k: launch.speedup(k.name_of(weight), key) for k in KERNELS}
    near = [k for k in KERNELS if launch.RACE_MARGIN * speed[k] >= 1.0]  # others are not even checked
    fit = [k for k in near if k.supports(num_rows, weight, dtype) and k.may_run(weight)]
    best = max((k for k in fit if launch.wins(k.name_of(weight), key)), key=speed.__getitem__, default=None)
    fastest = 1.0 if best is None else speed[best]
    own = (k for k in fit if k.keeps_bits and num_rows > 1 and launch.RACE_MARGIN * speed[k] >= fastest)
    return next(own, best)


def keeps_bits(num_rows: int, weight: QuantizedWeight, dtype: mx.Dtype, *, exact: bool = False) -> bool:
    """Return whether `product` gives each of `num_rows` rows the bits of its product alone, by the kernel's design and by a test on
    random rows."""
    kernel = chosen(num_rows, weight, dtype, exact=exact)
    if kernel is not None and not kernel.keeps_bits:
        return False
    x = random_rows(num_rows, weight, dtype)
    alone = [product(x[i : i + 1], weight, exact=exact) for i in range(num_rows)]
    return bool(mx.array_equal(product(x, weight, exact=exact), mx.concatenate(alone)).item())


def tune(
    weight: QuantizedWeight, dtype: mx.Dtype | None = None, rows: Sequence[int] = RACED_ROWS
) -> dict[str, dict[str, float]]:
    """Run all races of this weight for these numbers of rows, and return MLX's time divided by ours, by kernel and `race_key`. dtype: of
    the rows, None for that of `dtype_of_rows`."""
    dtype = dtype_of_rows(weight, dtype)
    found: dict[str, dict[str, float]] = {}
    for num_rows in rows:
        for name, ratio in race(num_rows, weight, dtype).items():
            found.setdefault(name, {})[race_key(num_rows, weight, dtype)] = ratio
    return found


def race(num_rows: int, weight: QuantizedWeight, dtype: mx.Dtype) -> dict[str, float]:
    """Race the kernels that can run against MLX's own operation on this weight for `num_rows` rows of `dtype`. Returns MLX's time
    divided by theirs, by their names. A race whose winner could not be used because of its bits is lost at once, and so is one that
    this device cannot run."""
    if num_rows in wide.RACED_ROWS:
        return wide.race(num_rows, weight, dtype)
    found = {}
    for kernel in KERNELS:
        name, key = kernel.name_of(weight), race_key(num_rows, weight, dtype)
        if not kernel.supports(num_rows, weight, dtype) or not launch.in_use(name):
            continue
        x, ratio = random_rows(num_rows, weight, dtype), launch.LOST
        ours, theirs = partial(kernel.run, x, weight), partial(product_ops, x, weight)
        if launch.attempt(name, key, partial(_loses_by_bits, kernel, x, weight)) is False:
            ratio = launch.race(name, key, ours, theirs, num_bytes=weight.nbytes)
        is_own = ratio > launch.LOST and kernel.keeps_bits and kernel.may_run(weight)
        if is_own and ratio < launch.RACE_MARGIN and has_bits_of_single_rows(theirs(), x, weight):
            ratio = launch.LOST  # MLX's operation has the same bits there, so that a tie gains nothing
        launch.set_speedup(name, key, ratio)
        found[name] = ratio
    return found


def _loses_by_bits(kernel: ProductKernel, x: mx.array, weight: QuantizedWeight) -> bool:
    """Return whether the kernel loses the race on this weight without being timed. A kernel that keeps bits loses where it may run but
    its product of x differs from MLX's one-row results. Where the self-check has already found a difference, it may not run in rounds
    and is still raced, to show whether exact rounds are faster. A kernel that does not keep bits loses where MLX's own operation on
    all rows of x equals its one-row results."""
    if not kernel.keeps_bits:
        return has_bits_of_single_rows(product_ops(x, weight), x, weight)
    return kernel.may_run(weight) and not has_bits_of_single_rows(kernel.run(x, weight), x, weight)


def unraced(weight: QuantizedWeight, dtype: mx.Dtype) -> list[int]:
    """Return the numbers of rows for which no race is on record although its result could be used."""
    known = launch.speedups()

    def is_open(kernel: ProductKernel, num_rows: int) -> bool:
        is_known = race_key(num_rows, weight, dtype) in known.get(kernel.name_of(weight), {})
        return not is_known and kernel.supports(num_rows, weight, dtype) and kernel.may_run(weight)

    return [num for num in RACED_ROWS if any(is_open(kernel, num) for kernel in KERNELS)]
