"""qmm_few.metal against float64 and against itself row by row, in every format, and what it costs by nvcc's count. What codes and scales
mean, and that each is read once, stands with qmv_rows."""

from __future__ import annotations

import mlx.core as mx
import nvcc
import pytest
from checks_qmv import check_rows, draw
from cuda_stand_in import as_cuda

from mlxspec.kernels.qmm_few import KERNEL
from mlxspec.kernels.quantized_weight import MICROSCALING

FLOATS = [mx.float32, mx.float16, mx.bfloat16]
MODES = tuple(MICROSCALING)
# arguments of `draw`
FORMATS = {"4bit": {"bits": 4}, "8bit": {"bits": 8}, **{mode: {"mode": mode} for mode in MODES}}
every_format = pytest.mark.parametrize("how", FORMATS.values(), ids=FORMATS)
SIZE = 704  # in_features: a multiple of 64 that no power of two divides far


@every_format
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dtypes(metal, dtype, how):
    with metal(order="random"):
        check_rows(*draw(5, 40, SIZE, dtype=dtype, **how), KERNEL)


@pytest.mark.parametrize("contract", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_formats(metal, group, bits, contract):
    with metal(order="reverse", contract=contract):
        check_rows(*draw(6, 12, 640, group=group, bits=bits, dtype=mx.bfloat16), KERNEL)


@pytest.mark.parametrize(
    ("num_rows", "mode"),
    [
        pytest.param(n, mode, marks=[] if mode == "affine" and n in (8, 19, 32) else pytest.mark.slow)
        for mode in ("affine", *MODES)
        for n in (5, 7, 8, 9, 16, 17, 19, 24, 25, 31, 32)
    ],
)
def test_numbers_of_rows(metal, num_rows, mode):
    """Each row has the bits that it has alone, whatever the number of rows."""
    with metal():
        check_rows(*draw(num_rows, 20, SIZE, mode=mode, dtype=mx.bfloat16), KERNEL)


@pytest.mark.parametrize("size", [64, 128, 512, 576])
@pytest.mark.parametrize("out", [1, 7, 8, 33, 70])
def test_any_number_of_outputs_and_steps(metal, out, size):
    """Also where some simdgroups have nothing to add."""
    with metal(order="random"):
        check_rows(*draw(6, out, size), KERNEL)


@pytest.mark.slow
def test_a_head_of_32k_rows(metal):
    """As drafters propose from; the last outputs are of the last threadgroup."""
    with metal():
        check_rows(*draw(5, 32_768, 64, dtype=mx.bfloat16), KERNEL)


def test_heads_of_many_outputs(emulated, monkeypatch):
    """Every output has a threadgroup, and places of the largest head, 248,320 outputs of 5,120 in 8 bits, fit the kernel's numbers."""
    with as_cuda(monkeypatch, computes=False) as stand_in:
        for out, size in ((32_768, 1024), (248_320, 64)):
            KERNEL.run(*draw(8, out, size, dtype=mx.bfloat16))
    for told, out in zip(stand_in.told, (32_768, 248_320), strict=True):
        assert told.grid[1] // told.threadgroup[1] * 8 * told.template["BLOCKS"] >= out
    assert 248_320 * 5_120 * 8 // 32 < 2**31


# instructions a weight of the loop, 8 rows, and registers of a thread: an Apple thread has 128
COUNTED = [
    ({}, 8, 6.0),
    ({"bits": 8}, 8, 6.0),
    ({"mode": "mxfp4"}, 8, 6.0),
    ({"mode": "nvfp4"}, 8, 7.0),
    ({"mode": "mxfp8"}, 8, 7.0),
    ({}, 16, 7.0),
    ({}, 32, 12.0),
]


def test_instructions_and_registers(emulated, monkeypatch, tmp_path):
    if reason := nvcc.missing(counts=True):
        pytest.skip(reason)
    with as_cuda(monkeypatch, computes=False) as stand_in:
        for how, rows, _ in COUNTED:
            KERNEL.run(*draw(rows, 64, 1024, dtype=mx.bfloat16, **how))
    found = nvcc.compiled(stand_in.told, tmp_path, counts=True)
    for (how, rows, most), told, made in zip(COUNTED, stand_in.told, found, strict=True):
        weights = 16 * told.template["BLOCKS"]  # of a lane in one turn of the loop
        assert 1.0 < made.loop / weights <= most, (how, rows, made.loop / weights)
        assert made.registers <= 128, (how, rows, made.registers)
