"""The vectorizing sigmoid against float64, and that the number of tokens does not change the function."""

from __future__ import annotations

import numpy as np
import pytest

from mlxspec.config import MAX_DRAFT
from mlxspec.kernels import activations
from mlxspec.kernels.cpu import sigmoid
from mlxspec.platform import device

import mlx.core as mx  # isort: skip

pytestmark = pytest.mark.smoke


def exact(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-np.clip(x, -700, 700).astype(np.float64)))


def test_rational_sigmoid_is_close_everywhere():
    x = np.concatenate([np.linspace(-40, 40, 40001), [-1e30, -88.8, 0.0, 88.8, 1e30]]).astype(np.float32)
    found = np.asarray(sigmoid.times_sigmoid(mx.ones(len(x)), mx.array(x)))
    assert np.abs(found - exact(x)).max() < 2e-7
    assert ((found >= 0) & (found <= 1 + 1e-7)).all()


@pytest.mark.parametrize("tokens", [2, MAX_DRAFT, 600])
def test_the_number_of_tokens_does_not_change_a_bit(tokens):
    x, up = (mx.random.normal((tokens, 96), key=mx.random.key(i)) * 4 for i in (1, 2))
    for wide, narrow in (
        (activations.gated(up, x), [activations.gated(up[i : i + 1], x[i : i + 1]) for i in range(tokens)]),
        (activations.silu(x), [activations.silu(x[i : i + 1]) for i in range(tokens)]),
        (activations.swiglu(x, up), [activations.swiglu(x[i : i + 1], up[i : i + 1]) for i in range(tokens)]),
    ):
        assert mx.array_equal(wide, mx.concatenate(narrow))


def test_what_is_used_agrees_with_mlx():
    x, up = (mx.random.normal((600, 64), key=mx.random.key(i)) * 4 for i in (1, 2))
    for found, wanted, scale in (
        (activations.gated(up, x), up * mx.sigmoid(x), mx.abs(up)),
        (activations.silu(x), x * mx.sigmoid(x), mx.abs(x)),
        (activations.swiglu(x, up), x * mx.sigmoid(x) * up, mx.abs(x * up)),
    ):
        assert (mx.abs(found - wanted) <= 4e-7 * scale + 1e-30).all().item()


def test_half_precision_is_left_alone():
    x = mx.random.normal((600, 64), key=mx.random.key(3)).astype(mx.bfloat16)
    assert activations.silu(x).dtype == mx.bfloat16
    assert mx.array_equal(activations.gated(x, x), x * mx.sigmoid(x))


@pytest.mark.skipif(device.backend() != "cpu", reason="a CPU's path")
def test_a_gated_norm_counts_tokens_not_heads():
    rng = np.random.default_rng(0)
    y, z, weight = (
        mx.array(rng.standard_normal(size, np.float32))
        for size in ((2 * MAX_DRAFT, 4, 16), (2 * MAX_DRAFT, 64), 64)
    )
    alone = mx.concatenate(
        [activations.gated_norm(y[i : i + 1], z[i : i + 1], weight, 1e-6) for i in range(MAX_DRAFT)]
    )
    draft = activations.gated_norm(y[:MAX_DRAFT], z[:MAX_DRAFT], weight, 1e-6)
    assert mx.array_equal(draft, alone)
    assert mx.array_equal(activations.gated_norm(y, z, weight, 1e-6)[:MAX_DRAFT], draft)
