"""gdn_prefill.metal against float64, where keys are alike, decays strong and rows ragged."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from checks_gdn import Shape, assert_close, check_prefill, numpy_of, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxspec.kernels import gdn_prefill as kernel
from mlxspec.kernels import gdn_round, launch
from mlxspec.kernels.conv_ops import GdnShape
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_round import drawn
from mlxspec.platform import device

SMALL = Shape()


@pytest.mark.parametrize("contract", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_dtypes(metal, dtype, contract):
    with metal(order="random", contract=contract):
        check_prefill(Shape(dtype=dtype, key_dim=64), (35, 3))


@pytest.mark.parametrize(
    ("key_dim", "value_dim"),
    [
        (32, 32),
        (128, 64),
        (256, 32),
        *(pytest.param(d, 32, marks=pytest.mark.slow) for d in (96, 160, 192, 224)),
    ],
)
def test_head_dims(metal, key_dim, value_dim):
    with metal(order="reverse"):
        check_prefill(Shape(key_dim=key_dim, value_dim=value_dim), (18,))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(any), st.integers(0, 2**16))
def test_any_rows(metal, widths, seed):
    with metal(order="random", seed=seed + 1):
        check_prefill(SMALL, widths, seed)


@pytest.mark.parametrize(("likeness", "decay"), [(30.0, 0.0), (30.0, 0.01), (0.0, 20.0), (3.0, 100.0)])
def test_keys_alike_and_strong_decays(metal, likeness, decay):
    with metal():
        check_prefill(Shape(key_dim=64, likeness=likeness, decay=decay), (64,), tolerance=2e-5)


def test_it_agrees_with_steps(metal):
    rng = np.random.default_rng(1)
    t, state = SMALL.tokens(rng, (20, 7)), SMALL.state(rng, 2)
    with metal():
        y, after = kernel.gdn_prefill_metal(t.inputs, state, FlatRows((20, 7)))
        y_steps, after_steps = gdn_round.gdn_advance_metal(t.inputs, state, t.rows)
    assert_close(y, numpy_of(y_steps), "y", 1e-5)
    assert_close(after, numpy_of(after_steps), "the state", 1e-5)


def test_self_check(metal):
    with metal():
        check = kernel._self_check()
    assert check.error <= check.limit


def test_threadgroup_memory_fits():
    for key_dim in range(32, 257, 32):
        assert kernel.chunk_size(key_dim) == (16 if key_dim <= 192 else 8)


def test_unmeasured_means_the_twin():
    if device.backend() != "cpu":
        pytest.skip("a GPU runs the kernel")
    launch.forget()
    rng = np.random.default_rng(2)
    t, state = SMALL.tokens(rng, (20,)), SMALL.state(rng, 1)
    ours, twin = (f(t.inputs, state, FlatRows((20,))) for f in (kernel.gdn_prefill, kernel.gdn_prefill_ops))
    assert all(same_bits(a, b) for a, b in zip(ours, twin, strict=True))
    assert kernel.race(*kernel._form(t.inputs), 20) == {}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_mlx_own_operation_is_the_twin_to_a_rounding(dtype):
    shape = GdnShape(2, 4, 128, 64)
    inputs, state, rows = drawn(shape, dtype, (20, 0, 7))
    got, wanted = (f(inputs, state, rows) for f in (kernel.gdn_prefill_mlx, kernel.gdn_prefill_ops))
    assert kernel.mlx_agrees(shape, dtype)
    assert got[0].dtype == got[1].dtype == mx.float32
    assert got[0].shape == wanted[0].shape
    assert launch.largest_error(got, wanted) <= (1e-5 if dtype == mx.float32 else 2**-6)


def slower(right):
    return lambda q, k, v, gamma, beta, **rest: right(q, k, v, gamma * 0.5, beta, **rest)


def missing(*_, **__):
    raise AttributeError("gated_delta_update")


@pytest.mark.parametrize("operation", ["right", "wrong", "missing"])
def test_the_better_one_is_used_on_metal(operation, monkeypatch):
    """Ours unless it has lost its race; then MLX's own, if it is there and gives what the twin does."""
    inputs, state, rows = drawn(GdnShape(2, 4, 128, 64), mx.float32, (20,))
    right, used = mx.fast.gated_delta_update, []
    mlx, plain = kernel.gdn_prefill_mlx, kernel.gdn_prefill_ops
    monkeypatch.setattr(
        mx.fast, "gated_delta_update", {"right": right, "wrong": slower(right)}.get(operation, missing)
    )
    monkeypatch.setattr(kernel.device, "backend", lambda: "metal")
    monkeypatch.setattr(launch, "in_use", lambda name: True)
    monkeypatch.setattr(kernel, "gdn_prefill_metal", lambda *_: used.append("ours"))
    kernel.mlx_agrees.cache_clear()
    launch.forget()
    kernel.gdn_prefill(inputs, state, rows)
    launch.set_speedup("gdn_prefill", kernel._race_key(*kernel._form(inputs), 20), 0.9)
    agrees = kernel.mlx_agrees(*kernel._form(inputs))
    monkeypatch.setattr(kernel, "gdn_prefill_mlx", lambda *a: used.append("MLX's") or mlx(*a))
    monkeypatch.setattr(kernel, "gdn_prefill_ops", lambda *a: used.append("plain") or plain(*a))
    kernel.gdn_prefill(inputs, state, rows)
    kernel.mlx_agrees.cache_clear()
    launch.forget()
    assert agrees == (operation == "right")
    assert used == ["ours", "MLX's" if agrees else "plain"]
