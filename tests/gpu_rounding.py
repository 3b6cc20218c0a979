"""`pytest --gpu-rounding`: products of several rows are off in their last bits, as a GPU's are.

A GPU has one kernel for one row and others for more, which add up in other orders: a row of a wide product is not bit for bit the product
of that row alone. A CPU often gives equal bits, so a test that compares them passes on Linux and fails on a Mac. With this option a number
is the next one below or above, or stays, depending on its column and on how many rows there are: the same every time, equal for equal rows.
Kernels of our own that run in the emulator, and MLX's norms and softmax, go row by row and stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mlxspec.platform import device  # before mlx  # isort: skip

import mlx.core as mx
import pytest

from tests.rounding import UNITS

IS_PLANTED = (
    False  # whether the option was given: for tests of what holds on a CPU only, or that count operations
)
_PRODUCTS = ("matmul", "addmm", "quantized_matmul", "gather_mm", "gather_qmm")


def off(out: mx.array) -> mx.array:
    """What such a product is taken to give. out (..., rows, D)."""
    rows = out.shape[-2] if out.ndim > 1 else 1
    if rows < 2 or out.dtype not in UNITS:
        return out
    steps = (mx.arange(out.shape[-1]) * 7 + rows * 5) % 3 - 1
    return (out.astype(mx.float32) * (1 + steps * (2 * UNITS[out.dtype]))).astype(out.dtype)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-rounding", action="store_true", help="products of several rows are off in their last bits"
    )


def pytest_configure(config: pytest.Config) -> None:
    global IS_PLANTED
    if config.getoption("--gpu-rounding"):
        IS_PLANTED = True
        plant()
        report = device.report  # tests that compare bits where MLX's own BLAS computes ask for its kind
        device.report = lambda: replace(report(), blas_kind="none")


def plant(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """In this process, from here on, or as long as what `put` puts into modules stays there."""
    for name in _PRODUCTS:
        put(mx, name, _rounded(getattr(mx, name)))
    put(mx.fast, "scaled_dot_product_attention", _rounded(mx.fast.scaled_dot_product_attention))
    put(mx.array, "__matmul__", lambda a, b: mx.matmul(a, b))


def _rounded(product: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def wrapped(*args: Any, **options: Any) -> mx.array:
        return off(product(*args, **options))

    return wrapped
