"""Products of many rows with a quantized weight, as prompts have them: the weight is unpacked once into scratch, then MLX's matmul runs.

MLX's own operation unpacks each number of a weight again for every 32 or 64 rows. Which of the two is faster is raced on each device, by
the weight's shape and the number of rows. Both multiply the same numbers and add in different orders. Only prompts have that many rows, so
drafted and plain answers multiply alike.

A product is handed over by itself, and only after the last but one has ended. At most SCRATCH unpacked weights are therefore alive, in any
graph. A compiled function cannot contain such a product: on a GPU, forwards that are compiled have fewer rows.
"""

from __future__ import annotations

import threading
from functools import partial

import mlx.core as mx

from mlxspec.kernels import launch
from mlxspec.kernels.quantized_weight import QuantizedWeight, product_ops, race_key, random_rows

NAME = "wide_product"
RACED_ROWS = (512, 2048)  # other numbers of rows go by the next smaller one
SCRATCH = 3  # unpacked weights: one multiplied with, one being unpacked, one whose release is on its way


class _Handed(threading.local):
    """The state of one thread. ends: the last element of the product that was handed to the device last."""

    ends: mx.array | None = None


_handed = _Handed()


def wide_product(x: mx.array, weight: QuantizedWeight) -> mx.array:
    """Multiply x (M, K) with the weight, unpacked once, and return (M, N) in x's dtype. Hands the product to the device, then waits
    until the previous product of this thread has ended."""
    y = x @ weight.values(x.dtype).T
    ends = y[-1, -1] + 0  # a number of its own, which does not keep y
    mx.async_eval(y, ends)
    if _handed.ends is not None:
        mx.eval(_handed.ends)
    _handed.ends = ends
    return y


def is_chosen(num_rows: int, weight: QuantizedWeight, dtype: mx.Dtype) -> bool:
    """Return whether the weight is unpacked once for `num_rows` rows of `dtype`: whether that has won its race on this device."""
    raced = next((num for num in reversed(RACED_ROWS) if num <= num_rows), None)
    return raced is not None and launch.wins(NAME, race_key(raced, weight, dtype)) and launch.in_use(NAME)


def scratch_bytes(weight: QuantizedWeight, dtype: mx.Dtype) -> int:
    """Return the bytes of unpacked weights that exist at once where products with this weight unpack it; 0 where none does."""
    if not launch.wins_anything(NAME) or not any(is_chosen(num, weight, dtype) for num in RACED_ROWS):
        return 0
    out_features, in_features = weight.shape
    return SCRATCH * out_features * in_features * dtype.size


def race(num_rows: int, weight: QuantizedWeight, dtype: mx.Dtype) -> dict[str, float]:
    """Race unpacking once against MLX's own operation. Returns MLX's time divided by ours, by name; empty where the product is not in
    use."""
    if not launch.in_use(NAME):
        return {}
    x = random_rows(num_rows, weight, dtype)
    ours, theirs = partial(wide_product, x, weight), partial(product_ops, x, weight)
    key = race_key(num_rows, weight, dtype)
    return {NAME: launch.race(NAME, key, ours, theirs, num_bytes=num_rows * weight.nbytes)}


def unraced(weight: QuantizedWeight, dtype: mx.Dtype) -> list[int]:
    """Return the numbers of rows for which no race is on record."""
    known = launch.speedups().get(NAME, {}) if launch.in_use(NAME) else None
    return [] if known is None else [num for num in RACED_ROWS if race_key(num, weight, dtype) not in known]


@launch.self_check(NAME, raced=True, text="")
def _self_check() -> launch.Check:
    """Compare the product of an unpacked weight with MLX's own operation and return the check."""
    weight = QuantizedWeight.of(mx.random.normal((72, 512), key=mx.random.key(0)))
    x = random_rows(RACED_ROWS[0], weight, mx.float32)
    error = launch.largest_error([wide_product(x, weight)], [product_ops(x, weight)])
    return launch.Check(error=error, limit=launch.ROUNDED)
