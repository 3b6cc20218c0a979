"""scripts/gpu_check without a GPU: its launches are those of the launchers, its references and checks are right (in the emulator), nvcc
takes the text, and where nothing can run it says so in a sentence."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checks_gdn import ints, layout
from gpu import mlx_cuda

from mlxspec.kernels import gdn_round, launch, qmm_few, qmv_rows
from mlxspec.kernels.conv_ops import GdnInputs
from mlxspec.kernels.quantized_weight import QuantizedWeight

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.py"
DTYPES = {"float": mx.float32, "half": mx.float16, "bfloat": mx.bfloat16}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before
    del sys.modules["gpu_check"]


def to_mx(x: Any) -> mx.array:
    """uint16 stands for bfloat16."""
    return mx.array(x).view(mx.bfloat16) if x.dtype == np.uint16 else mx.array(x)


def to_numpy(x: mx.array) -> Any:
    return np.array(x.view(mx.uint16)) if x.dtype == mx.bfloat16 else np.array(x)


def in_metal(made: Any) -> dict[str, Any]:
    """Run a launch of the script's through the factory that `launch` uses now, from the real text."""
    kernel = launch.MetalKernel(made.kernel, inputs=list(made.inputs), outputs=list(made.outputs))
    found = kernel(
        [to_mx(x) for x in made.inputs.values()],
        outputs=[
            (shape, mx.bfloat16 if dtype is np.uint16 else getattr(mx, np.dtype(dtype).name))
            for shape, dtype in made.outputs.values()
        ],
        template={n: DTYPES[v] if isinstance(v, str) else v for n, v in made.template.items()},
        grid=made.grid,
        threadgroup=made.threadgroup,
    )
    return {name: to_numpy(x) for name, x in zip(made.outputs, found, strict=True)}


# ---- the same launches


@pytest.fixture
def seen():
    """What our launchers hand to Metal: one dictionary a launch."""
    found: list[dict[str, Any]] = []

    def factory(*, input_names: Any, output_names: Any, **_: Any) -> Any:
        def call(**arguments: Any) -> list[mx.array]:
            found.append({"input_names": input_names, "output_names": output_names, **arguments})
            sizes = zip(arguments["output_shapes"], arguments["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in sizes]

        return call

    with launch.using(factory):
        yield found


def same_launch(made: Any, told: dict[str, Any]) -> None:
    assert list(made.inputs) == told["input_names"]
    assert list(made.outputs) == told["output_names"]
    for (name, mine), theirs in zip(made.inputs.items(), told["inputs"], strict=True):
        if name not in made.unread:  # what stands in for those may differ
            assert mine.shape == theirs.shape, name
            assert to_mx(mine).dtype == theirs.dtype, name
    assert [shape for shape, _ in made.outputs.values()] == [tuple(s) for s in told["output_shapes"]]
    template = {n: DTYPES[v] if isinstance(v, str) else v for n, v in made.template.items()}
    assert template == dict(told["template"])
    assert (made.grid, made.threadgroup) == (told["grid"], told["threadgroup"])


@pytest.mark.parametrize("mode", ["tape", "certain"])
@pytest.mark.parametrize("widths", [(1,), (5,), (8,), (3, 1, 0, 6), (40,)])
def test_rounds_are_launched_as_the_launcher_does(script, seen, widths, mode):
    r = script.Round(widths, tuple(w // 2 for w in widths), mode=mode, key_heads=2, value_heads=6)
    made = script.make(r)
    given = {name: to_mx(x) for name, x in made.inputs.items()}
    inputs = GdnInputs(*(given[name] for name in GdnInputs._fields))
    rows, state = layout(*widths), given["state"]
    last = gdn_round.Replay(
        gdn_round.Tape(given["tape_k"], given["tape_delta"], given["tape_log_g"]), rows, ints(r.kept)
    )
    if mode == "tape":
        gdn_round.gdn_round_metal(inputs, state, rows, last)
    else:
        gdn_round.gdn_advance_metal(inputs, state, rows, last)
    (told,) = seen
    same_launch(made, told)


@pytest.mark.parametrize(
    ("kernel", "num_rows"),
    [(qmv_rows.KERNEL, n) for n in (1, 2, 8)] + [(qmm_few.KERNEL, n) for n in (5, 16, 17)],
)
@pytest.mark.parametrize(
    ("bits", "group", "mode"),
    [(4, 64, "affine"), (8, 32, "affine"), (4, 16, "nvfp4"), (4, 32, "mxfp4"), (8, 32, "mxfp8")],
)
def test_products_are_launched_as_the_launcher_does(script, seen, kernel, num_rows, bits, group, mode):
    how = {"kernel": kernel.name, "num_rows": num_rows, "bits": bits, "group": group, "mode": mode}
    made = script.make(replace(script.CHECKED_PRODUCT, **how))
    codes, scales, biases, x = (to_mx(a) for a in made.inputs.values())
    weight = QuantizedWeight(codes, scales, biases if mode == "affine" else None, group, bits, mode)
    kernel.run(x, weight)
    (told,) = seen
    same_launch(made, told)


# ---- right and wrong


def few(script) -> list[Any]:
    """Every kind of case but the large heads."""
    rounds = [c for c in script.checked_cases() if isinstance(c, script.Round) and len(c.widths) > 1]
    products = [c for c in script.checked_cases() if isinstance(c, script.Product)]
    formats = {p.mode: p for p in products}
    return [*rounds, products[0], products[7], *formats.values()]


def test_the_kernels_are_right_by_its_own_measure(metal, script, capsys):
    with metal():
        right, worst = script.correctness(in_metal, few(script))
    assert right, capsys.readouterr().out
    assert set(worst) >= {"gdn_round, bfloat", "gdn_round, half", "gdn_round, float", "qmv_rows, bfloat"}
    said = capsys.readouterr().out
    assert said.count(": yes") == 2
    assert "WRONG" not in said


@pytest.mark.parametrize(
    ("kernel", "output"),
    [("gdn_round", "y"), ("gdn_round", "state_out"), ("gdn_round", "delta"), ("qmv_rows", "y")],
)
@pytest.mark.parametrize("fault", ["a little off", "unwritten"])
def test_a_wrong_output_is_found(metal, script, capsys, kernel, output, fault):
    def spoiled(made: Any) -> dict[str, Any]:
        found = in_metal(made)
        if made.kernel == kernel and found[output].size > 1:
            value = found[output].reshape(-1)
            value[-1] = (
                0x7FFF if value.dtype == np.uint16 else np.nan if fault == "unwritten" else value[-1] + 1
            )
            if fault == "a little off" and value.dtype == np.uint16:
                value[-1] = 0
        return found

    of_kernel = [c for c in few(script) if isinstance(c, script.Round) == (kernel == "gdn_round")]
    with metal():
        right, _ = script.correctness(spoiled, of_kernel[:1])
    assert not right
    assert "WRONG" in capsys.readouterr().out


def test_bfloat_is_rounded_as_mlx_does(script):
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    wanted = to_numpy(mx.array(x).astype(mx.bfloat16))
    assert np.array_equal(script.cases.rounded(x, "bfloat"), wanted)
    assert np.array_equal(script.cases.exact(wanted), np.array(to_mx(wanted).astype(mx.float32)))


def test_a_grid_that_does_not_divide_is_refused(script):
    made = script.make(replace(script.CHECKED_PRODUCT, num_rows=3, out_features=60))
    with pytest.raises(script.build.BuildError, match="no multiple"):
        script.build.unit([made])


def test_every_launch_has_a_kernel_that_takes_its_threads(script, monkeypatch):
    """CUDA refuses a launch with more threads than the kernel was compiled for ("invalid argument")."""
    monkeypatch.setattr(script, "ROWS", (1, 2))
    monkeypatch.setattr(script, "WIDTHS", (1, 8))
    source, places = script.build.unit(script.make(case) for case in script.checked_cases())
    bounds = re.findall(r"__launch_bounds__\((\d+)\) kernel_(\d+)\(", source)
    threads = {int(place): int(bound) for bound, place in bounds}

    def run(made: Any) -> dict[str, Any]:
        assert int(np.prod(made.threadgroup)) <= threads[places[script.build.key_of(made)]]
        return {name: np.zeros(shape, dtype) for name, (shape, dtype) in made.outputs.items()}

    timed = list(script.timed_cases())
    script.correctness(run, script.checked_cases())
    for _, made in timed:
        run(made)
    state = 48 * 128 * 128 * 4
    assert all(made.least_bytes > 2 * state for what, made in timed if what["kernel"] == "gdn_round")


# ---- without a GPU

IN_HOST_MEMORY = r"""
#include <cstdlib>
#include <cstring>
extern "C" {
struct Shape { unsigned grid[3], block[3]; };
static long held = 0;
const char* gpu_error(int code) { return code == 7 ? "told to fail" : "unknown"; }
int gpu_device(char* name, int* numbers) {
  strcpy(name, "none");
  const int given[] = {9, 0, 132, 1 << 20, 13010};
  memcpy(numbers, given, sizeof given);
  return 0;
}
int gpu_allocate(void** place, size_t bytes) { ++held; return (*place = malloc(bytes)) ? 0 : 2; }
int gpu_free(void* place) { --held; free(place); return 0; }
int gpu_fill(void* place, int value, size_t bytes) { memset(place, value, bytes); return 0; }
int gpu_write(void* place, const void* from, size_t bytes) { memcpy(place, from, bytes); return 0; }
int gpu_read(void* to, const void* place, size_t bytes) { memcpy(to, place, bytes); return 0; }
// The parameters of a product: w, scales, biases, x, sizes of scales and of x, y.
int gpu_run(int kernel, const Shape* shape, void** arguments) {
  if (kernel == 7) return 7;
  unsigned short* y = *(unsigned short**)arguments[6];
  const unsigned short found[] = {
      (unsigned short)shape->grid[1], (unsigned short)shape->block[1], (unsigned short)((int*)arguments[4])[0],
      (unsigned short)((int*)arguments[5])[1], (*(unsigned short**)arguments[3])[5],
      (unsigned short)(*(unsigned**)arguments[0])[9], (*(unsigned short**)arguments[1])[2], y[6]};
  memcpy(y, found, 6 * sizeof found[0]);
  y[7] = found[6];
  return 0;
}
int gpu_time(int kernel, const Shape* shape, void*** sets, int num_sets, size_t bytes, int rounds, float* milliseconds) {
  for (int i = 0; i < num_sets; ++i) {
    if (kernel >= 0 && gpu_run(kernel, shape, sets[i])) return 7;
    if (kernel < 0) memcpy(sets[i][1], sets[i][0], bytes);
  }
  for (int i = 0; i < rounds; ++i) milliseconds[i] = (i + 1) * num_sets;
  return 0;
}
int num_held() { return held; }
}
"""


@pytest.fixture
def gpu(script, tmp_path):
    """The script's `Gpu` over a library that stands in for CUDA: memory is the host's, a launch tells what it was given."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    (tmp_path / "host.cpp").write_text(IN_HOST_MEMORY)
    library = tmp_path / "host.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "host.cpp")], check=True)
    found = script.device.Gpu(library)
    yield found
    assert found._lib.num_held() == 0


def test_a_launch_reaches_the_library_as_it_is(script, gpu):
    assert (gpu.name, gpu.compute, gpu.num_cores, gpu.driver) == ("none", "9.0", 132, "13.1")
    made = script.make(replace(script.CHECKED_PRODUCT, num_rows=3))
    y = gpu.run(0, made)["y"]
    assert (y.shape, y.dtype) == ((3, 64), np.uint16)
    given = made.inputs
    assert y[0, :6].tolist() == [
        *(4, 4, 64, 1024),  # blocks and threads along y; sizes of scales and of x
        given["x"][0, 5],
        given["w"][0, 9] & 0xFFFF,
    ]
    assert y[0, 6] == 0xFFFF  # poisoned before
    assert y[0, 7] == given["scales"][0, 2]


def test_times_are_medians_of_one_launch(script, gpu):
    made = script.make(script.CHECKED_PRODUCT)
    assert gpu.time(0, made, num_sets=3, rounds=5) == pytest.approx(3e-3)
    assert gpu.time_copy(64, num_sets=2, rounds=3, by_driver=True) == pytest.approx(2e-3)


def test_what_cuda_says_is_an_error_that_frees_its_memory(script, gpu):
    made = script.make(script.CHECKED_PRODUCT)
    for call in (lambda: gpu.run(7, made), lambda: gpu.time(7, made, num_sets=2, rounds=1)):
        with pytest.raises(script.device.GpuError, match="failed on the GPU: told to fail"):
            call()


def test_the_whole_report_is_written(script, gpu, monkeypatch, tmp_path, capsys):
    """Everything behind the compiler, with a library that computes nothing: wrong numbers, said so, and a full report."""
    checked = [script.CHECKED_PRODUCT, replace(script.CHECKED_PRODUCT, num_rows=8)]
    timed = [({"kernel": "qmv_rows", "rows": 8, "width": 1}, script.make(checked[1]))]
    monkeypatch.setattr(script, "checked_cases", lambda: checked)
    monkeypatch.setattr(script, "timed_cases", lambda: iter(timed))
    monkeypatch.setattr(script, "replay_is_forward", lambda run: True)
    monkeypatch.setattr(script, "_LARGE_COPY", 1 << 16)
    monkeypatch.setattr(script, "_SETS_BYTES", 1 << 16)
    monkeypatch.setattr(script.build, "missing_compiler", lambda: None)
    monkeypatch.setattr(script.build, "compiler_release", lambda: "release 13.0")
    monkeypatch.setattr(script.device, "missing_gpu", lambda: None)
    said = "ptxas info : Compiling entry function '_Z8kernel_0v'\n 0 bytes spill stores, 4 bytes spill loads\nUsed 40 registers"
    monkeypatch.setattr(script.build, "compile_unit", lambda *a, **b: (tmp_path, said))
    monkeypatch.setattr(script.device, "Gpu", lambda library: gpu)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--quick", "--json", str(tmp_path / "report.json")])
    assert script.main() == 1
    printed = capsys.readouterr().out
    assert "WRONG" in printed
    assert "| qmv_rows | 8 | 1 |" in printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["machine"]["device"] == "none"
    assert [k["registers"] for k in report["kernels"]] == [40, 0]
    (row,) = report["speed"]["times"]
    assert row["bytes"] == timed[0][1].least_bytes
    assert row["fraction"] == pytest.approx(
        row["bytes"] / row["seconds"] / report["speed"]["copy_bytes_per_second"]
    )


def run_script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=variables or None, timeout=600
    )


def test_without_a_gpu_it_says_so_in_one_sentence(script):
    if script.build.missing_compiler() is None and script.device.missing_gpu() is None:
        pytest.skip("there is a GPU")
    done = run_script()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("scripts/gpu_check cannot run: there is no")
    assert done.stderr.count("\n") == 1


def test_without_nvcc_it_says_so_in_one_sentence():
    done = run_script("--compile-only", PATH="/nowhere")
    assert done.returncode == 2
    assert done.stderr == "scripts/gpu_check cannot run: there is no nvcc.\n"


@pytest.mark.slow
def test_nvcc_takes_the_text_and_no_array_spills(script, tmp_path):
    if reason := script.build.missing_compiler():
        pytest.skip(reason)
    source, places = script.build.unit(script.make(case) for case in script.checked_cases())
    made, said = script.build.compile_unit(source, tmp_path, arch="sm_90", output="kernels.cubin")
    assert made.stat().st_size > 0
    used = script.build.resources(said)
    assert set(used) == set(places.values())
    # a lane holds up to 32 numbers of the state, which are used at every token; ptxas puts a few words away to keep one more block at work
    assert all(spilled < 32 * 4 for _, spilled in used.values()), used


@pytest.mark.slow
def test_the_text_is_warps_and_wide_reads(script, tmp_path):
    """The shim's collectives become shuffles of a whole warp, and four numbers are read at once."""
    if reason := script.build.missing_compiler():
        pytest.skip(reason)
    launches = [script.make(script.Round((2,), (1,))), script.make(script.CHECKED_PRODUCT)]
    source, _ = script.build.unit(launches)
    made, _ = script.build.compile_unit(source, tmp_path, arch="sm_90", output="kernels.ptx")
    round_text, product_text = (
        text for text in made.read_text().split(".entry ")[1:] if "copy_words" not in text.split("(")[0]
    )
    if "qmv_rows" in round_text.split("(")[0]:
        round_text, product_text = product_text, round_text
    assert round_text.count("shfl.sync.bfly") == 12  # 2 rows a lane, 2 sums a token, 3 steps each
    assert product_text.count("shfl.sync.bfly") == 20  # 4 outputs, 5 steps each
    assert "ld.global.nc.v4.f32" in round_text
    assert "ld.global.nc.v4.u16" in product_text


@pytest.mark.slow
def test_the_library_loads_and_reports_that_there_is_no_gpu(script, tmp_path):
    if reason := script.build.missing_compiler():
        pytest.skip(reason)
    if script.device.missing_gpu() is None:
        pytest.skip("there is a GPU")
    source, _ = script.build.unit([script.make(script.CHECKED_PRODUCT)])
    library, _ = script.build.compile_unit(source, tmp_path, arch="sm_90")
    with pytest.raises(script.device.GpuError, match="device failed on the GPU"):
        script.device.Gpu(library)


# ---- MLX's CUDA backend


@pytest.mark.parametrize("name", sorted(path.stem for path in (SCRIPT.parents[1] / "metal").glob("*.metal")))
def test_mlx_is_handed_text_that_cuda_reads_and_threadgroups_that_divide(monkeypatch, name):
    seen: list[dict[str, Any]] = []

    def cuda_kernel(**told: Any) -> Any:
        seen.append(told)
        return lambda **given: seen.append(given)

    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_kernel)
    with launch.using(mlx_cuda.metal_kernel):
        kernel = launch.MetalKernel(name, inputs=["x"], outputs=["y"])
        kernel([mx.zeros(1)], outputs=[], template={}, grid=(32, 10, 2), threadgroup=(32, 4, 1))
    told, given = seen
    assert not re.search(r"\b(device|threadgroup|constant) |simdgroup_matrix>|clang loop", told["source"])
    assert ("__shared__ float" in told["source"]) == (name in {"gdn_prefill", "kv_attend", "qmm_few"})
    assert (given["grid"], given["threadgroup"]) == ((32, 10, 2), (32, 2, 1))
    # of a sum of two products nvcc fuses this one or that, from one kernel to the next
    assert (name == "qmv_rows") == ("fma(scale, product, sum[m] * bias)" in told["source"])
