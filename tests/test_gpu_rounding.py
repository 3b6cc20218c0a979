"""`--gpu-rounding` finds a comparison of bits that a GPU would not pass."""

from __future__ import annotations

from mlxspec.platform import device  # before mlx  # isort: skip

import gpu_rounding
import mlx.core as mx
import pytest

from tests.rounding import UNITS


@pytest.mark.skipif(
    device.has_gpu() or gpu_rounding.IS_PLANTED, reason="a GPU, or the option, rounds by itself"
)
@pytest.mark.parametrize("dtype", UNITS, ids=lambda d: str(d).rpartition(".")[2])
def test_a_row_alone_has_other_bits_than_among_others(
    dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of small whole numbers, so that every order of additions gives the same; equal rows stay equal."""
    x = mx.array([[1.0, 2.0, 3.0], [2.0, 1.0, 1.0], [1.0, 2.0, 3.0]]).astype(dtype)
    w = (mx.arange(24).reshape(3, 8) % 5 + 1).astype(dtype)

    def alone() -> mx.array:
        return mx.concatenate([x[i : i + 1] @ w for i in range(3)])

    exact = alone()
    assert mx.array_equal(x @ w, exact)
    gpu_rounding.plant(monkeypatch.setattr)
    assert mx.array_equal(alone(), exact)
    off = x @ w
    assert not mx.array_equal(off, exact)
    assert not mx.array_equal(off[:2], x[:2] @ w)  # other widths, other bits
    assert mx.array_equal(off[0], off[2])
    assert mx.array_equal(off, x @ w)
    error = mx.abs(off.astype(mx.float32) - exact.astype(mx.float32)) / exact.astype(mx.float32)
    assert error.max() <= 4 * UNITS[dtype]
