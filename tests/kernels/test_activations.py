"""The vectorizing sigmoid of wide prefills against float64, and that a verify never meets it."""

from __future__ import annotations

import numpy as np
import pytest

from mlxspec import device
from mlxspec.config import MAX_DRAFT
from mlxspec.kernels import activations

import mlx.core as mx  # isort: skip


def exact(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-np.clip(x, -700, 700).astype(np.float64)))


def test_rational_sigmoid_is_close_everywhere():
    x = np.concatenate([np.linspace(-40, 40, 40001), [-1e30, -88.8, 0.0, 88.8, 1e30]]).astype(np.float32)
    found = np.asarray(activations.rational_sigmoid(mx.array(x)))
    assert np.abs(found - exact(x)).max() < 2e-7
    assert ((found >= 0) & (found <= 1 + 1e-7)).all()


@pytest.mark.parametrize("tokens", [1, MAX_DRAFT])
def test_up_to_a_whole_draft_mlx_own_function_is_used(tokens):
    x = mx.random.normal((tokens, 96), key=mx.random.key(0))
    assert mx.array_equal(activations.sigmoid(x), mx.sigmoid(x))
    assert mx.array_equal(activations.swiglu(x, x)[:1], activations.swiglu(x[:1], x[:1]))


@pytest.mark.skipif(device.backend() != "cpu", reason="a CPU's path")
def test_wide_inputs_agree_with_the_narrow_path():
    x, up = (mx.random.normal((600, 64), key=mx.random.key(i)) * 4 for i in (1, 2))
    parts = [slice(r, r + 100) for r in range(0, 600, 100)]
    for wide, narrow, scale in (
        (activations.sigmoid(x), [activations.sigmoid(x[p]) for p in parts], mx.ones_like(x)),
        (activations.silu(x), [activations.silu(x[p]) for p in parts], mx.abs(x)),
        (activations.swiglu(x, up), [activations.swiglu(x[p], up[p]) for p in parts], mx.abs(x * up)),
    ):
        difference = mx.abs(wide - mx.concatenate(narrow))
        assert (difference <= 4e-7 * scale + 1e-30).all().item()


def test_half_precision_is_left_alone():
    x = mx.random.normal((600, 64), key=mx.random.key(3)).astype(mx.bfloat16)
    assert activations.silu(x).dtype == mx.bfloat16
    assert mx.array_equal(activations.sigmoid(x), mx.sigmoid(x))


@pytest.mark.skipif(device.backend() != "cpu", reason="a CPU's path")
def test_a_gated_norm_counts_tokens_not_heads():
    rng = np.random.default_rng(0)
    y, z, weight = (
        mx.array(rng.standard_normal(size, np.float32))
        for size in ((2 * MAX_DRAFT, 4, 16), (2 * MAX_DRAFT, 64), 16)
    )
    alone = mx.concatenate(
        [activations.gated_norm(y[i : i + 1], z[i : i + 1], weight, 1e-6) for i in range(MAX_DRAFT)]
    )
    draft = activations.gated_norm(y[:MAX_DRAFT], z[:MAX_DRAFT], weight, 1e-6)
    assert mx.array_equal(draft, alone)
    wide = activations.gated_norm(y, z, weight, 1e-6)
    assert mx.abs(wide[:MAX_DRAFT] - draft).max().item() < 1e-5
