"""qmv_rows.metal against float64, against itself row by row, and bit for bit against MLX's own one-row kernel, in every format."""

from __future__ import annotations

import emulator
import mlx.core as mx
import mlx_kernels
import numpy as np
import pytest
from checks_gdn import numpy_of, same_bits
from checks_qmv import PLACES, ROUNDING, check_codes, check_rows, check_scales, draw, unpacked

from mlxspec.kernels import launch, products, qmm_few, quantized_weight
from mlxspec.kernels import qmv_rows as kernel
from mlxspec.kernels.qmv_rows import KERNEL
from mlxspec.kernels.quantized_weight import MICROSCALING, product_ops, race_key

FLOATS = [mx.float32, mx.float16, mx.bfloat16]
MODES = tuple(MICROSCALING)
# arguments of `draw`
FORMATS = {"4bit": {"bits": 4}, "8bit": {"bits": 8}, **{mode: {"mode": mode} for mode in MODES}}
both_kernels = pytest.mark.parametrize("of", [KERNEL, qmm_few.KERNEL], ids=lambda kernel: kernel.name)
every_format = pytest.mark.parametrize("how", FORMATS.values(), ids=FORMATS)


@every_format
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dtypes(metal, dtype, how):
    with metal(order="random"):
        check_rows(*draw(3, 24, 1024, dtype=dtype, **how))


@pytest.mark.parametrize("contract", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_formats(metal, group, bits, contract):
    with metal(order="reverse", contract=contract):
        check_rows(*draw(2, 12, 512, group=group, bits=bits, dtype=mx.bfloat16))


@pytest.mark.parametrize("contract", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_microscaling_formats(metal, mode, contract):
    with metal(order="reverse", contract=contract):
        check_rows(*draw(2, 12, 512, mode=mode, dtype=mx.bfloat16))


@pytest.mark.parametrize(
    ("num_rows", "mode"),
    [
        pytest.param(n, mode, marks=[] if mode == "affine" and n in (1, 4, 8) else pytest.mark.slow)
        for mode in ("affine", *MODES)
        for n in range(1, 9)
    ],
)
def test_every_number_of_rows(metal, num_rows, mode):
    with metal():
        check_rows(*draw(num_rows, 20, 512, mode=mode, dtype=mx.bfloat16))


# ---- what codes and scales of microscaling formats mean


@both_kernels
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", MODES)
def test_every_code_is_what_mlx_unpacks_it_to(emulated, mode, place, of):
    """On a GPU that takes denormal halves for zero in conversions as well."""
    for flush in (False, True):
        with emulated(flush=flush):
            check_codes(mode, place, of)


@both_kernels
@pytest.mark.parametrize("mode", MODES)
def test_every_scale_is_what_mlx_unpacks_it_to(emulated, mode, of):
    for flush in (False, True):
        with emulated(flush=flush):
            check_scales(mode, of)


@pytest.mark.parametrize("num_rows", [1, 3, 7])
@every_format
def test_the_twin_means_the_same(how, num_rows):
    """MLX's own product, which is what runs without Metal, against the tables in float64."""
    x, weight = draw(num_rows, 33, 512, **how)
    wanted = numpy_of(x).astype(np.float64) @ unpacked(weight).T
    got = numpy_of(product_ops(x, weight))
    assert np.abs(got - wanted).max() <= ROUNDING[mx.float32] * np.abs(wanted).max()


# ---- shapes and orders


@pytest.mark.parametrize("mode", ["affine", "nvfp4"])
@pytest.mark.parametrize("out", [1, 2, 3, 5, 8, 31])
@pytest.mark.parametrize("num_rows", [2, 8])  # 4 and 3 outputs for each simdgroup
def test_any_number_of_outputs(metal, num_rows, out, mode):
    with metal(order="random"):
        check_rows(*draw(num_rows, out, 512, mode=mode))


@every_format
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_each_row_is_bitwise_mlx_one_row_kernel(emulated, dtype, how):
    """The order of additions, by running the kernel text of the installed MLX beside ours (without contraction: with it, which of the
    equal orders a compiler fuses is its own choice, so on a Mac the self-check looks)."""
    x, weight = draw(3, 20, 1536, dtype=dtype, **how)
    if reason := mlx_kernels.missing_header(weight.mode):
        pytest.skip(reason)
    with emulated():
        ours = kernel.qmv_rows_metal(x, weight)
        for i in range(3):
            assert same_bits(ours[i : i + 1], mlx_kernels.one_row(x[i : i + 1], weight))


@pytest.mark.mac
@every_format
def test_each_row_is_bitwise_mlx_one_row_result_on_this_gpu(how):
    x, weight = draw(4, 64, 2048, dtype=mx.bfloat16, **how)
    alone = mx.concatenate([product_ops(x[i : i + 1], weight) for i in range(4)])
    assert same_bits(kernel.qmv_rows_metal(x, weight), alone)


@every_format
@pytest.mark.parametrize(
    ("of", "num_rows"),
    [(KERNEL, n) for n in (1, 4, 8)] + [(qmm_few.KERNEL, n) for n in (5, 8, 32)],
    ids=lambda x: getattr(x, "name", x),
)
def test_weights_are_read_once(emulated, of, num_rows, how):
    """Codes, scales and, where there are any, biases: each byte once for all rows of x."""
    x, weight = draw(num_rows, 64, 1024, dtype=mx.bfloat16, **how)
    emulator.runs.clear()
    with emulated():
        of.run(x, weight)
    (run,) = emulator.runs
    biases = 0 if weight.biases is None else weight.biases.nbytes
    read = {name: run.bytes_read[name] for name in ("w", "scales", "biases")}
    assert read == {"w": weight.codes.nbytes, "scales": weight.scales.nbytes, "biases": biases}


@both_kernels
@pytest.mark.parametrize("kind", ["affine", "microscaling"])
def test_self_check(metal, kind, of):
    with metal():
        found = getattr(of, f"check_{kind}")()
    assert found.error <= found.limit
    assert ("bit for bit" in found.note) == of.keeps_bits


@pytest.mark.parametrize(
    ("fault", "failed"),
    [
        (("0x00070007u) << 9)", "0x00070007u) << 10)"), {"qmv_rows_fp"}),
        (("+ sum[m] * bias", "- sum[m] * bias"), {"qmv_rows"}),
        (("simd_sum(result[r][m])", "result[r][m]"), {"qmv_rows", "qmv_rows_fp"}),
    ],
    ids=["of e2m1", "of biases", "of both"],
)
def test_a_fault_of_one_kind_of_format_leaves_the_other_in_use(emulated, monkeypatch, fault, failed):
    """One text, but affine and microscaling formats are checked, switched off and reported separately."""
    text = launch.metal_source("qmv_rows")
    assert text.count(fault[0]) == 1
    monkeypatch.setattr(launch, "metal_source", lambda _: text.replace(*fault))
    monkeypatch.setattr(kernel._metal, "_built", {})
    launch.forget()
    with emulated():
        used = {name: launch.in_use(name) for name in ("qmv_rows", "qmv_rows_fp")}
        reports = {r.name: r for r in launch._all_reports()}
    launch.forget()
    assert {name for name, is_used in used.items() if not is_used} == failed
    for name in used:
        assert reports[name].failed == (name in failed)
        assert reports[name].reason.startswith("differs" if name in failed else "agrees")


TERMS = [f"{value} * code[r][{n}]" for n, value in enumerate("abcd")]
BACKWARDS = (" + ".join(TERMS), " + ".join(reversed(TERMS)))


@pytest.mark.parametrize("matches", [True, False], ids=["as MLX adds", "backwards"])
def test_a_won_race_counts_only_where_rows_have_the_bits_of_mlx(emulated, monkeypatch, matches):
    """A plain step by MLX's kernel and a verify by ours must round alike. The self-check compares with MLX's own text. Planted: a kernel
    that adds up backwards, which is as close to the right result and passes the self-check otherwise."""
    if reason := mlx_kernels.missing_header("mxfp4"):
        pytest.skip(reason)
    text = launch.metal_source("qmv_rows")
    assert text.count(BACKWARDS[0]) == 1
    monkeypatch.setattr(launch, "metal_source", lambda _: text if matches else text.replace(*BACKWARDS))
    monkeypatch.setattr(kernel._metal, "_built", {})
    monkeypatch.setattr(quantized_weight, "MICROSCALING", {"mxfp4": (32, 4)})
    plain = product_ops
    monkeypatch.setattr(
        quantized_weight,
        "product_ops",
        lambda x, w: mlx_kernels.one_row(x, w) if len(x) == 1 else plain(x, w),
    )
    x, weight = draw(3, 8, 512, mode="mxfp4")
    launch.forget()
    launch.set_speedup(KERNEL.name_of(weight), race_key(x.shape[0], weight, x.dtype), 1.5)
    with emulated():
        assert launch.in_use(KERNEL.name_of(weight))
        (report,) = (r for r in launch._all_reports() if r.name == KERNEL.name_of(weight))
        assert report.matches_mlx == matches
        assert (report.notice is None) == matches
        for exact, launches in ((False, int(matches)), (True, 1)):
            emulator.runs.clear()
            products.product(x, weight, exact=exact)
            assert sum(run.kernel == "mlxspec_qmv_rows" for run in emulator.runs) == launches
    launch.forget()
