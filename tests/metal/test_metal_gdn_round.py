"""gdn_round.metal against float64, bit for bit against itself where replay and forward must agree, and in bytes."""

from __future__ import annotations

import emulator
import mlx.core as mx
import numpy as np
import pytest
from checks_gdn import (
    Shape,
    assert_close,
    check_replay_bits,
    check_two_rounds,
    ints,
    numpy_of,
    reference_rows,
    same_bits,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxspec.kernels import gdn_round as kernel
from mlxspec.kernels import launch
from mlxspec.kernels.gdn_round import Replay
from mlxspec.platform import device

SMALL = Shape()
DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def drawn(max_examples):
    return settings(
        max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )


@pytest.mark.parametrize("contract", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_ragged_rounds(metal, dtype, contract):
    with metal(order="random", contract=contract):
        shape = Shape(dtype=dtype, key_dim=64)
        check_two_rounds(shape, first=(4, 1, 6), kept=(2, 1, 0), second=(1, 3, 2))
        check_replay_bits(shape, width=4)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 32), (96, 64), (128, 128), (160, 32), (256, 32)])
def test_head_dims(metal, key_dim, value_dim):
    with metal(order="reverse"):
        check_two_rounds(Shape(key_dim=key_dim, value_dim=value_dim), first=(3,), kept=(2,), second=(2,))


@pytest.mark.slow
@pytest.mark.parametrize("value_dim", range(32, 257, 32))
@pytest.mark.parametrize("key_dim", range(32, 257, 32))
def test_all_head_dims(metal, key_dim, value_dim):
    with metal(order="random"):
        shape = Shape(key_dim=key_dim, value_dim=value_dim, dtype=mx.bfloat16)
        check_two_rounds(shape, first=(2, 3), kept=(2, 1), second=(1, 2))


@pytest.mark.parametrize(("key_heads", "value_heads"), [(1, 1), (3, 3), (2, 6)])
def test_grouped_heads(metal, key_heads, value_heads):
    with metal(order="random", seed=3):
        check_two_rounds(
            Shape(key_heads=key_heads, value_heads=value_heads), first=(2, 3), kept=(0, 3), second=(2, 1)
        )


rounds = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=4)


@drawn(25)
@given(
    rows=rounds.filter(lambda rows: any(r[0] for r in rows) and any(r[2] for r in rows)),
    seed=st.integers(0, 2**16),
    order=st.sampled_from(["forward", "reverse", "random"]),
)
def test_any_rows(metal, rows, seed, order):
    """All rejected, all accepted, any part; rows that sit a forward out."""
    first, kept, second = zip(*((w, min(n, w), m) for w, n, m in rows), strict=True)
    with metal(order=order, seed=seed + 1):
        check_two_rounds(SMALL, first=first, kept=kept, second=second, seed=seed)


def test_a_wide_draft(metal):
    with metal():
        check_two_rounds(SMALL, first=(65, 2), kept=(64, 0), second=(1, 40))


def test_every_schedule_and_tile_gives_the_same_bits(metal, monkeypatch):
    """Neither the order threads run in nor the size of threadgroups may show."""
    shape, results = Shape(key_dim=64, value_dim=64), []
    for order in ("forward", "reverse", "random"):
        for simdgroups in (1, 2, 4):
            monkeypatch.setattr(kernel, "tile", lambda *_, n=simdgroups: (4, n))
            with metal(order=order):
                two = check_two_rounds(shape, first=(3, 2), kept=(1, 2), second=(4, 1))
                results.append([two.y, two.state, two.tape.delta])
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(other, results[0], strict=True))


def test_rows_do_not_touch_each_other(metal):
    """A row of a batch is bit for bit that row alone."""
    rng = np.random.default_rng(5)
    t, state = SMALL.tokens(rng, (3, 1, 4)), SMALL.state(rng, 3)
    with metal():
        together = kernel.gdn_round_metal(t.inputs, state, t.rows)
        for row, (a, b) in enumerate([(0, 3), (3, 4), (4, 8)]):
            part = t.part(a, b)
            alone = kernel.gdn_round_metal(part.inputs, state[row : row + 1], part.rows)
            assert same_bits(alone.y, together.y[a:b])
            assert same_bits(alone.tape.delta, together.tape.delta[a:b])


def test_the_twins_compute_the_same(metal):
    rng = np.random.default_rng(6)
    t1, t2, state = SMALL.tokens(rng, (3, 5)), SMALL.tokens(rng, (2, 1)), SMALL.state(rng, 2)
    last = Replay(kernel.gdn_round_ops(t1.inputs, state, t1.rows).tape, t1.rows, ints([3, 2]))
    begun = np.stack([s[n] for (_, _, s), n in zip(reference_rows(t1, numpy_of(state)), (3, 2), strict=True)])
    twin = kernel.gdn_round_ops(t2.inputs, state, t2.rows, last)
    assert_close(twin.state, begun, "the twin's replayed state")
    certain = t2.inputs, state, t2.rows, last
    with metal():
        ours = kernel.gdn_round_metal(t2.inputs, state, t2.rows, last)
        got = *kernel.gdn_advance_metal(*certain), kernel.gdn_flush_metal(state, last)
    wanted = *kernel.gdn_advance_ops(*certain), kernel.gdn_flush_ops(state, last)
    for a, b in zip(
        (ours.y, ours.state, ours.tape.delta, *got),
        (twin.y, twin.state, twin.tape.delta, *wanted),
        strict=True,
    ):
        assert_close(a, numpy_of(b), "kernel against twin")


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, pytest.param(64, marks=pytest.mark.slow)])
def test_bytes_of_a_round_of_27b(emulated, width):
    """At most 1.15 times what must be moved: the state once each way, every input and output once."""
    shape = Shape(key_heads=16, value_heads=48, key_dim=128, value_dim=128, dtype=mx.bfloat16)
    rng = np.random.default_rng(0)
    t, state = shape.tokens(rng, (width,)), shape.state(rng, 1)
    delta = mx.array(rng.standard_normal(t.inputs.v.shape).astype(np.float32))
    last = Replay(kernel.Tape(t.inputs.k, delta, t.inputs.log_g), t.rows, ints([width]))
    emulator.runs.clear()
    with emulated():
        result = kernel.gdn_round_metal(t.inputs, state, t.rows, last)
    (run,) = emulator.runs
    least = sum(x.nbytes for x in (*t.inputs, state, *last.tape, result.y, result.state, result.tape.delta))
    assert run.num_bytes <= 1.15 * least


def test_self_check(metal):
    with metal():
        check = kernel._self_check()
    assert check.error <= check.limit


def test_the_self_check_launches_the_largest_threadgroups(emulated, monkeypatch):
    """A device that has no registers for them is found out before anybody's answer, and the kernel switched off with a reason."""
    largest = max(
        32 * kernel.tile(width, key_dim, value_dim)[1]
        for width in range(1, 70)
        for key_dim in range(32, 257, 32)
        for value_dim in range(32, 257, 32)
    )
    seen = []

    def factory(**settings):
        launches = emulator.metal_kernel(**settings)

        def call(*, threadgroup, **given):
            size = int(np.prod(threadgroup))
            seen.append(size)
            if size > allowed:
                raise ValueError(
                    f"Thread group size ({size}) is greater than the maximum allowed ({allowed})."
                )
            return launches(threadgroup=threadgroup, **given)

        return call

    monkeypatch.setattr(launch, "_reports", {})
    with emulated(), launch.using(factory):
        allowed = largest
        assert launch.in_use("gdn_round")
        assert max(seen) == largest
        launch.forget()
        allowed = largest - 32
        assert not launch.in_use("gdn_round")
        (report,) = [r for r in launch.reports() if r.name == "gdn_round"]
    assert report.failed
    assert "did not run on this device: Thread group size" in report.reason


def test_the_launcher_takes_the_twin_without_a_gpu():
    if device.backend() != "cpu":
        pytest.skip("there is a GPU here")
    launch.forget()
    rng = np.random.default_rng(7)
    t, state = SMALL.tokens(rng, (2,)), SMALL.state(rng, 1)
    assert same_bits(
        kernel.gdn_round(t.inputs, state, t.rows).y, kernel.gdn_round_ops(t.inputs, state, t.rows).y
    )
    (report,) = [r for r in launch.reports() if r.name == "gdn_round"]
    assert not report.in_use
    assert "no GPU" in report.reason
