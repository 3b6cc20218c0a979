"""conv_qkv.metal against float64: which inputs the window picks, every output, every dtype."""

from __future__ import annotations

import emulator
import mlx.core as mx
import numpy as np
import pytest
from checks_conv import (
    SHAPE,
    check_extreme_gates,
    check_fresh,
    check_two_forwards,
    draw,
    draw_weights,
    num_columns,
)
from checks_gdn import layout, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxspec.kernels import conv_qkv as kernel
from mlxspec.kernels import launch
from mlxspec.kernels.conv_ops import GdnShape

FLOATS = [mx.float32, mx.float16, mx.bfloat16]


@pytest.mark.parametrize("contract", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_two_ragged_forwards(metal, dtype, contract):
    with metal(order="random", contract=contract):
        check_two_forwards(first=(4, 1, 2), kept=(3, 0, 2), second=(1, 5, 2), dtype=dtype, extra=5)


@pytest.mark.parametrize(
    "shape",
    [GdnShape(1, 1, 32, 32), GdnShape(3, 3, 32, 96), GdnShape(2, 6, 128, 128), GdnShape(1, 2, 256, 64)],
    ids=str,
)
def test_shapes(metal, shape):
    with metal(order="reverse"):
        check_two_forwards(first=(2,), kept=(1,), second=(2,), shape=shape)


rows = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 20)), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows.filter(lambda r: any(x[0] for x in r) and any(x[2] for x in r)), st.booleans(), st.integers(0, 2**16)
)
def test_any_rows(metal, rows, whole, seed):
    first, kept, second = zip(*((w, min(n, w), m) for w, n, m in rows), strict=True)
    with metal(order="random", seed=seed + 1):
        check_two_forwards(first, kept, second, whole=whole, seed=seed)


def test_without_a_last_forward(metal):
    with metal():
        check_fresh((3, 1, 17))


def test_a_prefill_of_many_segments_is_bitwise_its_tokens_alone(metal):
    rng = np.random.default_rng(2)
    weights, window = draw_weights(rng, SHAPE, mx.float32), draw(rng, 1, 3, SHAPE.conv_size)
    projected = draw(rng, 40, num_columns(SHAPE))
    with metal():
        whole, after, _ = kernel.conv_qkv_metal(projected, window, weights, SHAPE, layout(40), certain=True)
        for at in range(0, 40, 13):
            end = min(at + 13, 40)
            part, window, _ = kernel.conv_qkv_metal(
                projected[at:end], window, weights, SHAPE, layout(end - at), certain=True
            )
            assert all(same_bits(a, b[at:end]) for a, b in zip(part, whole, strict=True))
    assert same_bits(window, after)


def test_the_twin_computes_the_same(metal):
    with metal():
        check = kernel._self_check()
    assert check.error <= check.limit


def test_extreme_gates(metal):
    with metal():
        check_extreme_gates()


@pytest.mark.parametrize("width", [1, 4, 16])
def test_bytes_at_27b(emulated, width):
    """What only this layer reads (q | k | v, gates, taps, windows) and writes, within a quarter."""
    shape = GdnShape(16, 48, 128, 128)
    rng = np.random.default_rng(0)
    weights = draw_weights(rng, shape, mx.bfloat16)
    projected = draw(rng, width, num_columns(shape), dtype=mx.bfloat16)
    window = draw(rng, 1, 3, shape.conv_size, dtype=mx.bfloat16)
    last = kernel.LastInputs(projected, layout(width), mx.array([1], mx.int32))
    emulator.runs.clear()
    with emulated():
        inputs, *held = kernel.conv_qkv_metal(projected, window, weights, shape, layout(width), last)
    (run,) = emulator.runs
    read = 2 * width * (shape.conv_size + 96) + weights.weight.nbytes + window.nbytes
    least = read + sum(x.nbytes for x in (*inputs, *held))
    assert run.num_bytes <= 1.25 * least


def test_the_launcher_takes_the_twin_without_metal():
    if mx.metal.is_available():
        pytest.skip("there is Metal here")
    launch.forget()
    rng = np.random.default_rng(4)
    weights, window = draw_weights(rng, SHAPE, mx.float32), draw(rng, 1, 3, SHAPE.conv_size)
    arguments = draw(rng, 2, num_columns(SHAPE)), window, weights, SHAPE, layout(2)
    ours, twin = kernel.conv_qkv(*arguments), kernel.conv_qkv_twin(*arguments)
    assert all(same_bits(a, b) for a, b in zip(ours[0], twin[0], strict=True))
