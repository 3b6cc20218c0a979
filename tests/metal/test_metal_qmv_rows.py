"""qmv_rows.metal against float64, against itself row by row, and bit for bit against MLX's own one-row kernel."""

from __future__ import annotations

import emulator
import mlx.core as mx
import mlx_kernels
import pytest
from checks_gdn import same_bits
from checks_qmv import check_rows, draw

from mlxspec.kernels import launch
from mlxspec.kernels import qmv_rows as kernel

FLOATS = [mx.float32, mx.float16, mx.bfloat16]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dtypes(metal, dtype, bits):
    with metal(order="random"):
        check_rows(*draw(3, 24, 1024, dtype=dtype, bits=bits))


@pytest.mark.parametrize("contract", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_formats(metal, group, bits, contract):
    with metal(order="reverse", contract=contract):
        check_rows(*draw(2, 12, 512, group=group, bits=bits, dtype=mx.bfloat16))


@pytest.mark.parametrize(
    "num_rows", [1, 4, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 5, 6, 7))]
)
def test_every_number_of_rows(metal, num_rows):
    with metal():
        check_rows(*draw(num_rows, 20, 512, dtype=mx.bfloat16))


@pytest.mark.parametrize("out", [1, 2, 3, 5, 8, 31])
def test_any_number_of_outputs(metal, out):
    with metal(order="random"):
        check_rows(*draw(2, out, 512))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_each_row_is_bitwise_mlx_one_row_kernel(emulated, dtype, bits):
    """The order of additions, by running the kernel text of the installed MLX beside ours (without contraction: with it, which of the
    equal orders a compiler fuses is its own choice, so on a Mac the self-check looks)."""
    if reason := mlx_kernels.missing_header():
        pytest.skip(reason)
    x, weight = draw(3, 20, 1536, dtype=dtype, bits=bits)
    with emulated():
        ours = kernel.qmv_rows_metal(x, weight)
        for i in range(3):
            assert same_bits(ours[i : i + 1], mlx_kernels.one_row(x[i : i + 1], weight))


@pytest.mark.mac
def test_each_row_is_bitwise_mlx_one_row_result_on_this_gpu():
    x, weight = draw(4, 64, 2048, dtype=mx.bfloat16)
    alone = mx.concatenate([kernel.qmv_rows_ops(x[i : i + 1], weight) for i in range(4)])
    assert same_bits(kernel.qmv_rows_metal(x, weight), alone)


@pytest.mark.parametrize("num_rows", [1, 4, 8])
def test_weights_are_read_once(emulated, num_rows):
    x, weight = draw(num_rows, 64, 1024, dtype=mx.bfloat16)
    emulator.runs.clear()
    with emulated():
        kernel.qmv_rows_metal(x, weight)
    (run,) = emulator.runs
    for name, array in (("w", weight.codes), ("scales", weight.scales), ("biases", weight.biases)):
        assert run.bytes_read[name] == array.nbytes


def test_self_check(metal):
    with metal():
        check = kernel._self_check()
    assert check.error <= check.limit
    assert "bit for bit" in check.note


def test_what_the_kernel_does_not_take_goes_to_mlx(metal):
    """Nine rows, a width MLX adds in another order, another dtype, other bits: the launcher answers, with MLX's own operation."""
    cases = [draw(9, 8, 512), draw(2, 8, 576), draw(2, 8, 512, bits=2)]
    x, weight = draw(2, 8, 512)
    cases.append((x.astype(mx.float16), weight))
    for x, weight in cases:
        assert not kernel.supports(x, weight)
        assert kernel.qmv_rows(x, weight, exact=True).shape == (x.shape[0], 8)


def test_unmeasured_means_mlx(monkeypatch):
    """Without `exact` the kernel runs only where it has won its race."""
    x, weight = draw(2, 8, 512)
    used = []
    monkeypatch.setattr(launch, "in_use", lambda name: True)
    monkeypatch.setattr(kernel, "qmv_rows_metal", lambda *a: used.append(a) or mx.zeros(1))
    launch.forget()
    kernel.qmv_rows(x, weight)
    assert not used
    kernel.qmv_rows(x, weight, exact=True)
    assert len(used) == 1
    launch.set_speedup("qmv_rows", kernel._race_key(x, weight), 1.3)
    kernel.qmv_rows(x, weight)
    assert len(used) == 2
    launch.set_speedup("qmv_rows", kernel._race_key(x, weight), 0.9)
    kernel.qmv_rows(x, weight)
    assert len(used) == 2
    launch.forget()


def test_tune_races_every_width(monkeypatch):
    _, weight = draw(1, 8, 512)
    monkeypatch.setattr(launch, "in_use", lambda name: True)
    monkeypatch.setattr(kernel, "qmv_rows_metal", kernel.qmv_rows_ops)
    found = kernel.tune(weight)
    assert list(found) == [f"512 to 8, float32, 4 bit, group 64, {n} rows" for n in range(1, 9)]
    launch.forget()
