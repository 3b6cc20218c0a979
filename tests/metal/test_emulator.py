"""The emulator itself: what must work, what must be refused, and that the text it runs is MLX's own."""

from __future__ import annotations

import emulator
import mlx.core as mx
import numpy as np
import pytest
from planting import catches

PLACE = "uint i = thread_position_in_grid.x;\n"
SHARED = "threadgroup float a[64];\n" + PLACE + "a[i] = x[i];\n"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"


@pytest.fixture(autouse=True)
def _compiler():
    if reason := emulator.missing_compiler():
        pytest.skip(reason)


def run(
    source, *inputs, header="", dtype=mx.float32, num=64, grid=(64, 1, 1), threadgroup=(64, 1, 1), **call
):
    inputs = inputs or (mx.arange(64).astype(mx.float32),)
    names = ["x", "z"][: len(inputs)]
    kernel = emulator.metal_kernel("trial", names, ["o"], source, header=header)
    (out,) = kernel(
        inputs=list(inputs),
        output_shapes=[(num,)],
        output_dtypes=[dtype],
        grid=grid,
        threadgroup=threadgroup,
        **call,
    )
    return np.array(out.astype(mx.float32))


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_simdgroup_functions(order):
    x = np.arange(64, dtype=np.float32)
    with emulator.settings(order=order):
        np.testing.assert_array_equal(
            run(PLACE + "o[i] = simd_sum(x[i]);"), np.repeat(x.reshape(2, 32).sum(1), 32)
        )
        np.testing.assert_array_equal(run(PLACE + "o[i] = simd_max(x[i]);"), np.repeat([31, 63], 32))
        np.testing.assert_array_equal(run(PLACE + "o[i] = simd_shuffle_xor(x[i], 5);"), np.arange(64) ^ 5)
        np.testing.assert_array_equal(run(PLACE + "o[i] = simd_shuffle(x[i], 3);"), np.repeat([3, 35], 32))
        np.testing.assert_array_equal(run(PLACE + "o[i] = simd_broadcast(x[i], 7);"), np.repeat([7, 39], 32))
        np.testing.assert_array_equal(
            run(PLACE + "o[i] = simd_shuffle_down(x[i], 1);")[:32], [*range(1, 32), 31]
        )
        np.testing.assert_array_equal(
            run(PLACE + "o[i] = simd_shuffle_up(x[i], 2);")[:32], [0, 1, *range(30)]
        )
        np.testing.assert_array_equal(
            run(PLACE + "o[i] = simd_prefix_inclusive_sum(x[i]);")[:32], np.cumsum(x[:32])
        )


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_barriers_order_threads(order):
    with emulator.settings(order=order):
        np.testing.assert_array_equal(run(SHARED + BARRIER + "o[i] = a[63 - i];"), np.arange(63, -1, -1))
        np.testing.assert_array_equal(
            run(SHARED + "simdgroup_barrier(mem_flags::mem_threadgroup);\no[i] = a[i ^ 1];"),
            np.arange(64) ^ 1,
        )


def test_reading_and_writing_what_others_read_before_a_barrier_is_fine():
    barrier = "simdgroup_barrier(mem_flags::mem_threadgroup);\n"
    source = SHARED + barrier + "float v = a[i ^ 1];\n" + barrier + "a[i] *= 2.0f;\no[i] = v + a[i];"
    np.testing.assert_array_equal(run(source), (np.arange(64) ^ 1) + 2 * np.arange(64))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (PLACE + "o[i] = x[i];\nif (i == 5) o[64] = 1.0f;", "write out of bounds: byte 256 of o .* body:3"),
        (PLACE + "o[i] = x[i + 1];", "read out of bounds"),
        (PLACE + "o[i] = x[int(i) - 1];", "read out of bounds"),
        (PLACE + "if (i != 3) o[i] = x[i];", "output not fully written: byte 12 of o"),
        (PLACE + "o[i] += x[i];", "nobody has written"),
        (PLACE + "((device float*)x)[i] = 0.0f; o[i] = 0.0f;", "write to an input"),
        (SHARED + "o[i] = a[i ^ 1];", "race|nobody has written"),
        (SHARED + "threadgroup_barrier(mem_flags::mem_none);\no[i] = a[63 - i];", "race"),
        (
            SHARED + "simdgroup_barrier(mem_flags::mem_threadgroup);\no[i] = a[63 - i];",
            "race|nobody has written",
        ),
        (SHARED + BARRIER + "float v = a[63 - i];\na[i] = v;\no[i] = v;", "race"),
        (PLACE + "o[i / 2 * 2] = 1.0f; o[i | 1] = 2.0f;", "race: two threads write"),
        ("threadgroup float a[9000];\n" + PLACE + "a[i] = x[i]; o[i] = a[i];", "threadgroup memory"),
        (PLACE + "if (i < 16) o[i] = simd_sum(x[i]);\nelse o[i] = simd_sum(-x[i]);", "divergence"),
        (PLACE + "if (i < 16) return;\no[i] = simd_sum(x[i]);", "divergence"),
        (PLACE + "if (i != 5) " + BARRIER + "o[i] = x[i];", "returned|divergence"),
        (PLACE + "o[i] = simd_shuffle_xor(x[i], ushort(i & 1));", "differs between lanes"),
        (PLACE + "o[i] = simd_shuffle(x[i], 32);", "does not exist"),
        (
            PLACE + "float b[4]; for (int j = 0; j < 4; ++j) b[j] = x[j]; o[i] = b[i & 7];",
            "outside a local array",
        ),
        (PLACE + "o[i] = (*(const device float4*)(x + i % 8)).x;", "misaligned"),
        (PLACE + "o[i] = x[(1 << (int(i) + 1)) & 63];", "shift"),
        (PLACE + "double d = x[i]; o[i] = d;", "not available in Metal"),
        (PLACE + "half h = x[i]; o[i] = h;", "the compiler does not take"),
        (PLACE + "o[i] = x[i]; x[i] = 1.0f;", "does not take"),
        (PLACE + "o[i] = std::exp(x[i]);", "not available in Metal"),
    ],
)
def test_what_must_be_refused(source, says):
    with pytest.raises(emulator.EmulationError, match=says):
        run(source)


def test_threadgroups_that_write_the_same_place_race():
    with pytest.raises(emulator.EmulationError, match="race between threadgroups"):
        run(PLACE + "o[i % 32] = x[i % 32];", num=32, threadgroup=(32, 1, 1))


def test_a_device_pointer_to_constant_memory_is_refused():
    """MLX passes inputs of fewer than 8 elements in constant memory; Apple's compiler then refuses device pointers."""
    source = PLACE + "const device float* p = z;\no[i] = x[i] + p[0];"
    assert run(source, mx.zeros(64), mx.ones(8)).sum() == 64
    with pytest.raises(emulator.EmulationError, match="constant memory"):
        run(source, mx.zeros(64), mx.ones(7))


def test_too_many_threads():
    with pytest.raises(emulator.EmulationError, match="2048 threads"):
        run(PLACE + "o[i] = 0.0f;", num=2048, grid=(2048, 1, 1), threadgroup=(2048, 1, 1))


def test_the_grid_is_trimmed_to_whole_threads():
    source = PLACE + "o[i] = threads_per_threadgroup.x + 100 * simdgroups_per_threadgroup;"
    np.testing.assert_array_equal(run(source, num=80, grid=(80, 1, 1)), [264] * 64 + [116] * 16)


@pytest.mark.parametrize(("dtype", "name"), [(mx.float16, "half"), (mx.bfloat16, "bfloat")])
def test_small_floats_round_like_mlx(dtype, name):
    """Both ways, over subnormals, ties, the largest values, infinities and not-a-number."""
    bits = np.concatenate(
        [
            np.arange(0, 2**32, 999983, dtype=np.uint32),
            np.float32([0, -0.0, 65519.9, 65520, 6e-8, 3e-8, 2.98e-8, np.inf]).view(np.uint32),
        ]
    )
    x = mx.array(bits.view(np.float32))
    wanted = np.array(x.astype(dtype).astype(mx.float32))
    got = run(PLACE + f"o[i] = {name}(x[i]);", x, dtype=dtype, num=bits.size, grid=(bits.size, 1, 1))
    np.testing.assert_array_equal(got, wanted)
    back = run(PLACE + "o[i] = x[i];", x.astype(dtype), num=bits.size, grid=(bits.size, 1, 1))
    np.testing.assert_array_equal(back, wanted)


@catches(
    "contraction that never contracts",
    "emulator:build",
    lambda right: lambda unit, *, contract, flush=False: right(unit, contract=False, flush=flush),
)
def test_contraction_is_the_compilers_choice():
    x = mx.array(np.float32([1 + 2**-12] * 8))
    source = PLACE + "o[i] = x[i] * x[i] - 1.0f;"
    with emulator.settings(contract=False):
        apart = run(source, x, num=8, grid=(8, 1, 1))[0]
    with emulator.settings(contract=True):
        fused = run(source, x, num=8, grid=(8, 1, 1))[0]
    exact = (1 + 2**-12) ** 2 - 1
    assert abs(fused - exact) < abs(apart - exact)
    np.testing.assert_array_equal(
        run(PLACE + "o[i] = fma(x[i], x[i], -1.0f);", x, num=8, grid=(8, 1, 1))[0], np.float32(exact)
    )


def test_conversions_of_denormal_halves_may_give_zero():
    """Arithmetic in half keeps them, so a number that is multiplied in half before it is widened is the same either way."""
    x = mx.array(np.arange(8, dtype=np.uint16))  # bits of halves without an exponent
    widened = PLACE + "o[i] = static_cast<float>(as_type<half>(x[i]));"
    multiplied = PLACE + "o[i] = static_cast<float>(as_type<half>(x[i]) * half(16384.0f));"
    exact = np.arange(8, dtype=np.uint16).view(np.float16).astype(np.float32)
    for flush in (False, True):
        with emulator.settings(flush=flush):
            np.testing.assert_array_equal(run(widened, x, num=8, grid=(8, 1, 1)), exact * (not flush))
            np.testing.assert_array_equal(run(multiplied, x, num=8, grid=(8, 1, 1)), exact * 16384)


def test_bytes_are_counted_once_a_threadgroup():
    emulator.runs.clear()
    run(PLACE + "o[i] = x[i] + x[(i + 1) % 64] + x[0];", threadgroup=(32, 1, 1))
    (done,) = emulator.runs
    assert done.bytes_read["x"] == (33 + 33) * 4
    assert done.bytes_written == {"o": 256}


def test_template_arguments_shapes_and_scalars():
    source = PLACE + "o[i] = T(x[i] * N + x_shape[0] + x_ndim);"
    np.testing.assert_array_equal(
        run(source, template=[("T", mx.float32), ("N", 3)]), 3.0 * np.arange(64) + 65
    )


def test_the_source_is_mlx_own():
    kernel = emulator.metal_kernel("trial", ["x", "n"], ["o"], PLACE + "o[i] = x[i] + n;")
    call = {
        "output_shapes": [(9,)],
        "output_dtypes": [mx.float32],
        "grid": (9, 1, 1),
        "threadgroup": (9, 1, 1),
    }
    text = kernel.metal_source([mx.zeros(9), mx.array(3)], **call)
    assert "const device float* x [[buffer(0)]]" in text
    assert "const constant int32_t& n [[buffer(1)]]" in text
