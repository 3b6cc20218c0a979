"""Products of a few rows with float matrices that a CPU's BLAS reads in place are the whole product, and do not depend on other rows."""

from __future__ import annotations

from mlxspec.platform import device  # (before mlx)

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxspec.kernels import panels
from mlxspec.kernels.flat import PANEL
from mlxspec.models.layers import project
from mlxspec.platform.host import numbers

NUM_IN = 192


def made(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32))


def error_of(got: mx.array, x: mx.array, weight: mx.array) -> float:
    """The largest difference from float64, in roundings of the sum of absolute products."""
    a, b = (numbers(v).astype(np.float64) for v in (x, weight))
    bound = np.finfo(np.float32).eps * (np.abs(a) @ np.abs(b).T)
    return float((np.abs(numbers(got) - a @ b.T) / bound).max())


@pytest.mark.parametrize(
    "num_out", [1, panels.BLOCK - 1, panels.BLOCK, 5 * panels.BLOCK, 5 * panels.BLOCK + 7]
)
@pytest.mark.parametrize("num_rows", [1, 2, 5, panels.ROWS_IN_PLACE, panels.ROWS_IN_PLACE + 1])
def test_a_product_in_place_is_the_product(num_out: int, num_rows: int) -> None:
    x, weight = made(num_rows, NUM_IN, seed=1), made(num_out, NUM_IN)
    got = panels.product_in_place(x, weight)
    assert got.shape == (num_rows, num_out)
    assert error_of(got, x, weight) < NUM_IN


def test_an_embedding_in_float32_is_multiplied_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight in another dtype, and any on a GPU, goes to MLX's own product."""
    calls: list[tuple[int, ...]] = []

    def noted(x: mx.array, weight: mx.array) -> mx.array:
        calls.append(weight.shape)
        return x @ weight.T

    monkeypatch.setattr("mlxspec.models.layers.product_in_place", noted)
    head, x = nn.Embedding(96, NUM_IN), made(3, NUM_IN)
    wanted = head.as_linear(x)
    assert mx.array_equal(project(head, x), wanted)
    assert calls == ([] if device.has_gpu() else [(96, NUM_IN)])
    calls.clear()
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    assert mx.array_equal(project(head, x), wanted)
    monkeypatch.undo()
    monkeypatch.setattr("mlxspec.models.layers.product_in_place", noted)
    head.weight = head.weight.astype(mx.bfloat16)
    project(head, x.astype(mx.bfloat16))
    assert calls == []


@pytest.mark.parametrize("num_out", [PANEL, PANEL - 1, 3 * PANEL, 3 * PANEL + 1])
def test_panels_are_the_matrix_cut_and_filled_up_with_zeros(num_out: int) -> None:
    weight = made(num_out, NUM_IN)
    cut = panels.in_panels(weight)
    assert cut.shape == (-(-num_out // PANEL), NUM_IN, PANEL)
    whole = numbers(cut.swapaxes(1, 2)).reshape(-1, NUM_IN)
    assert np.array_equal(whole[:num_out], numbers(weight))
    assert not whole[num_out:].any()
