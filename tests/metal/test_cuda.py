"""Kernels as CUDA: what MLX's `cuda_kernel` is told is right, and nvcc takes it. A stand-in has its place; `test_whole_rounds` has the
engine on it."""

from __future__ import annotations

import re

import mlx.core as mx
import nvcc
import pytest
from cuda_stand_in import StandIn, as_cuda, check_threads

from mlxspec.kernels import conv_qkv, cuda, gdn_prefill, kv_attend, launch, products, wide  # noqa: F401 (their self-checks)
from mlxspec.platform import device, resources

NAMES = {path.stem for path in resources.metal_folder().glob("*.metal")}
WITH_THREADGROUP_MEMORY = {"gdn_prefill", "kv_attend", "qmm_few"}


@pytest.fixture
def told(emulated, monkeypatch):
    """Every launch of every self-check, of which none computes anything."""
    with as_cuda(monkeypatch, computes=False) as stand_in:
        for report in launch.reports():
            has_text = report.name != wide.NAME  # which is made of MLX's own operations
            assert report.failed == (report.is_ours and has_text)
            assert "differs" in report.reason or not (report.is_ours and has_text)
    return stand_in.told


def test_self_checks_pass_on_the_text_that_was_translated(emulated, monkeypatch):
    with as_cuda(monkeypatch, computes=True) as stand_in:
        found = {report.name: report for report in launch.reports() if report.is_ours}
    assert all(report.in_use for report in found.values()), found
    assert {told.name for told in stand_in.told} == NAMES


def test_mlx_is_told_what_cuda_can_run(told):
    """The stand-in checks names, threads and outputs; here stands what is said of the text."""
    assert {launched.name for launched in told} == NAMES
    for launched in told:
        assert launched.header.count("namespace metal {") == 1
        assert ("__shared__ float" in launched.source) == (launched.name in WITH_THREADGROUP_MEMORY)
        # of a sum of two products nvcc fuses this one or that, from one kernel to the next
        assert (launched.name == "qmv_rows") == ("fma(scale, product, sum[m] * bias)" in launched.source)
        assert re.search(r"\bthread_position_in_grid\{", launched.source)


def test_a_grid_that_does_not_divide_gets_smaller_threadgroups(monkeypatch):
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **_: lambda **given: given)
    kernel = cuda.metal_kernel(name="a", input_names=["x"], output_names=["y"], source="")
    given = kernel(inputs=[], grid=(32, 10, 2), threadgroup=(32, 4, 1))
    assert (given["grid"], given["threadgroup"]) == ((32, 10, 2), (32, 2, 1))


@pytest.mark.parametrize(
    ("grid", "threadgroup"), [((32, 10, 1), (32, 4, 1)), ((40, 1, 1), (20, 1, 1)), ((64, 32, 1), (64, 32, 1))]
)
def test_the_stand_in_refuses_threads_that_cuda_does_not_take(grid, threadgroup):
    with pytest.raises(AssertionError):
        check_threads(grid, threadgroup)


def test_the_stand_in_refuses_metal_words():
    with pytest.raises(AssertionError):
        StandIn(computes=False)(
            name="mlxspec_a", input_names=[], output_names=[], source="const device T* x;", header=""
        )


def test_which_backend_builds_kernels(monkeypatch):
    for backend, factory in (
        ("cuda", cuda.metal_kernel),
        ("metal", mx.fast.metal_kernel),
        ("cpu", mx.fast.metal_kernel),
    ):
        monkeypatch.setattr(device, "backend", lambda found=backend: found)
        assert launch.factory() is factory
        with launch.using(len):
            assert launch.factory() is len


@pytest.mark.slow
def test_nvcc_takes_every_kernel_and_no_array_spills(told, tmp_path):
    if reason := nvcc.missing():
        pytest.skip(reason)
    for launched, made in zip(told, nvcc.compiled(told, tmp_path), strict=True):
        # of up to 32 numbers of the state that a lane uses at every token, ptxas may put a few away to keep one more block at work
        assert made.spilled < 32 * 4, (launched.name, launched.template, made)
        assert made.registers <= 255


def test_nvcc_refuses_what_is_no_cuda(told, tmp_path):
    if reason := nvcc.missing():
        pytest.skip(reason)
    (first,) = [launched for launched in told if launched.name == "kv_join"][:1]
    with pytest.raises(AssertionError, match="kv_join"):
        nvcc.compiled(
            [type(first)(**{**vars(first), "source": first.source.replace("float", "flout", 1)})], tmp_path
        )
