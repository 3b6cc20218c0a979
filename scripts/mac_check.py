#!/usr/bin/env python3
"""What an Apple GPU makes of mlxspec, in one report to paste: kernels against their twins, bits, and times as ratios.

    scripts/mac_check [--quick] [--out FILE] [--model NAME]

Every section stands alone: one that fails says so and the next goes on. Times are medians of alternating runs in this process; anything
else that uses the GPU meanwhile spoils them. Without Metal the sections about kernels say that they were skipped. What the races gave is
kept in mlxspec's cache folder, where every later run of mlxspec on this device finds it; --model races the shapes of that model.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import io
import json
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mlxspec.platform import device  # before mlx: it loads the BLAS  # isort: skip

import mlx.core as mx
import numpy as np

from mlxspec.bench.timing import alternate, median, ratio
from mlxspec.kernels import attention, conv_qkv, gdn_prefill, gdn_round, launch, qmv_rows, races
from mlxspec.kernels.conv_ops import GdnInputs, GdnShape
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_round import Kept, RowLayout

ROOT = Path(__file__).resolve().parent.parent
HAS_METAL = mx.metal.is_available()


@dataclass
class Sizes:
    """What is measured, and how often."""

    rounds: int = 15
    repeat: int = 8  # calls evaluated together, so that waiting for the GPU does not hide them
    layers: dict[str, int] = field(
        default_factory=lambda: {"0.8B": 16, "9B": 32, "27B": 48}
    )  # value heads of a layer
    key_heads: int = 16
    widths: tuple[int, ...] = (1, 2, 4, 8, 16, 64)
    matmuls: tuple[tuple[int, int], ...] = ((17408, 5120), (5120, 17408), (1024, 4096))  # out, in
    tokens: tuple[int, ...] = (64, 512, 2048)  # of a prefill
    context: int = 8192  # keys that are attended to


WITHOUT_METAL = Sizes(
    rounds=5, repeat=1, layers={"0.8B": 16}, widths=(1, 4), matmuls=((512, 1024),), tokens=(64,), context=256
)
sizes = Sizes() if HAS_METAL else WITHOUT_METAL


class Skipped(Exception):
    """A section that cannot run here; its text says why."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="leave the kernel tests out and time fewer rounds"
    )
    parser.add_argument("--out", type=Path, help="write the report there as well")
    parser.add_argument("--model", metavar="NAME", help="also race the shapes of this model (name or folder)")
    options = parser.parse_args()
    if options.quick:
        sizes.rounds = 5
    sections: dict[str, Callable[[], None]] = {
        "Machine": machine,
        "Self-checks": self_checks,
        "Kernel tests": kernel_tests,
        "Exactness of a quantized matmul by width": exactness,
        "Verify curve of quantized matmuls": verify_curve,
        "qmv_rows against MLX": qmv_race,
        "MLX's attention": attention_by_width,
        "A Gated DeltaNet layer's round": rollback,
        "What stands before its recurrence": convolution,
        "Prefill of a Gated DeltaNet layer": prefill,
        "Ways of rollback": ways_of_rollback,
        "Rounds that overlap": rounds_that_overlap,
        "A small model, whole": partial(bench, "bench_core.py", "--rounds", str(min(sizes.rounds, 9))),
    }
    if options.model is not None:
        sections[f"Races at the shapes of {options.model}"] = partial(model_races, options.model)
    if options.quick:
        del sections["Kernel tests"]
    report, failed = io.StringIO(), 0
    for title, section in sections.items():
        text, problem = run_section(section)
        failed += problem
        block = f"### {title}\n\n{text.rstrip()}\n"
        print(block, flush=True)
        report.write(block + "\n")
    if options.out:
        options.out.write_text(report.getvalue(), encoding="utf-8")
    return 1 if failed else 0


def run_section(section: Callable[[], None]) -> tuple[str, bool]:
    """What it printed, and whether it failed."""
    caught = io.StringIO()
    try:
        with contextlib.redirect_stdout(caught), device.private_kernels():
            section()
    except Skipped as why:
        return f"{caught.getvalue()}skipped: {why}", False
    except Exception:
        return f"{caught.getvalue()}FAILED\n\n```\n{traceback.format_exc(limit=-3)}```", True
    return caught.getvalue(), False


def needs_metal() -> None:
    if not HAS_METAL:
        raise Skipped("there is no Metal here")


def table(head: list[str], rows: list[list[str]]) -> None:
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(row) + " |")


# ---- sections


def machine() -> None:
    info = mx.device_info()
    memory = f", {info['memory_size'] / 2**30:.0f} GiB" if "memory_size" in info else ""
    print(f"date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d}")
    print(f"device: {info.get('device_name') or platform.processor() or platform.machine()}{memory}")
    print(f"system: {platform.platform()}, Python {platform.python_version()}")
    print("versions: " + ", ".join(f"{n} {version(n)}" for n in ("mlxspec", "mlx", "mlx-lm", "numpy")))
    report = device.report()
    print(
        f"backend: {report.backend}, BLAS {report.blas}, compile {'on' if report.compile_enabled else 'off'}"
    )
    tf32 = {False: "off", True: "ON (MLX_ENABLE_TF32)", None: "unknown, MLX was imported first"}[report.tf32]
    print(f"float32 products rounded to TF32: {tf32}")
    for notice in report.notices:
        print(f"notice: {notice}")


def self_checks() -> None:
    for report in launch.reports():
        note = f"; {report.note}" if report.note else ""
        print(f"- {report.name}: {'in use' if report.in_use else 'NOT in use'}, {report.reason}{note}")


def kernel_tests() -> None:
    tests = "tests/metal", "tests/kernels/test_attention.py"
    command = [sys.executable, "-m", "pytest", "-m", "not slow", "--no-header", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    print(f"{'GPU' if HAS_METAL else 'emulator'}: {lines[-1] if lines else 'no output'}")
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(f"- {line}")
    if done.returncode:
        raise RuntimeError("kernel tests failed")


def exactness() -> None:
    """Whether row 0 of a w-row product is bit for bit the one-row product, which decides whether greedy text can be."""
    rows = []
    for out, size in sizes.matmuls:
        for bits in (4, 8):
            weight, x = quantized(out, size, bits), normal(16, size)
            alone = qmv_rows.qmv_rows_ops(x[:1], weight)
            same = [w for w in range(2, 17) if same_bits(qmv_rows.qmv_rows_ops(x[:w], weight)[:1], alone)]
            ours = "-"
            if launch.in_use("qmv_rows"):
                ours = str(
                    [w for w in range(1, 9) if same_bits(qmv_rows.qmv_rows_metal(x[:w], weight)[:1], alone)]
                )
            rows.append([f"{size} -> {out}", str(bits), str(same), ours])
    table(["shape", "bits", "widths of MLX bitwise as width 1", "widths of qmv_rows likewise"], rows)


def verify_curve() -> None:
    """MLX's own quantized matmul: time of w rows over one row."""
    widths, rows = (1, 2, 3, 4, 5, 6, 8, 16), []
    for out, size in sizes.matmuls:
        weight = quantized(out, size, 4)
        taken = compare({str(w): partial(qmv_rows.qmv_rows_ops, normal(w, size), weight) for w in widths})
        others = (f"{ratio(taken, str(w), '1'):.2f}" for w in widths[1:])
        rows.append([f"{size} -> {out}", f"{1e3 * median(taken, '1') / sizes.repeat:.3f}", *others])
    table(["4-bit shape", "1 row, ms", *(f"{w} rows" for w in widths[1:])], rows)


def qmv_race() -> None:
    needs_metal()
    if not launch.in_use("qmv_rows"):
        raise Skipped("qmv_rows is not in use")
    rows = []
    for out, size in sizes.matmuls:
        for bits in (4, 8):
            found = qmv_rows.tune(quantized(out, size, bits))
            rows.append([f"{size} -> {out}", str(bits), *(f"{ratio:.2f}" for ratio in found.values())])
    races.save()
    print("MLX's time over ours, bfloat16; from 1.02 on ours is used\n")
    table(["shape", "bits", *(f"{n} rows" for n in range(1, qmv_rows.MAX_ROWS + 1))], rows)


def attention_by_width() -> None:
    """What more queries take: from 9 on Metal may write scores out, which eights would avoid."""
    widths, rows = (1, 2, 4, 8, 9, 16), []

    def eights(q: mx.array, k: mx.array, v: mx.array) -> list[mx.array]:
        parts = (q[:, :, :8], k[:, :, :-8], v[:, :, :-8]), (q[:, :, 8:], k, v)
        return [attention.attend(*part, 0.06) for part in parts]

    for heads in attention.COMMON if HAS_METAL else attention.COMMON[:1]:
        k, v = (normal(1, heads.num_kv, sizes.context, heads.dim) for _ in range(2))
        q = normal(1, heads.num, 16, heads.dim)
        runs = {str(w): partial(attention.attend, q[:, :, :w], k, v, 0.06) for w in widths}
        taken = compare({**runs, "eights": partial(eights, q, k, v)})
        one, used = f"{1e6 * median(taken, '1') / sizes.repeat:.0f}", str(attention.has_kernel(heads))
        others = (relative(taken, str(name), "1") for name in (*widths[1:], "eights"))
        rows.append([f"{heads.num} of {heads.dim}, {heads.num_kv} of keys", used, one, *others])
    print(f"{sizes.context} keys, bfloat16; times over one query's\n")
    table(["heads", "by MLX's kernel", "1 query, us", *map(str, widths[1:]), "16 as twice 8"], rows)


def rollback() -> None:
    """One verify round with everything kept: kernel, twin, and the least the memory allows."""
    rows = []
    for name, heads in sizes.layers.items():
        for width in sizes.widths:
            inputs, state, layout, last = round_data(heads, width)
            runs: dict[str, Callable[[], object]] = {
                "copy": partial(mx.add, state, 1.0),  # one read and one write of the state
                "plain": partial(gdn_round.gdn_round_ops, inputs, state, layout, last),
            }
            if HAS_METAL:
                first = mx.zeros(1, mx.int32)
                runs["tape"] = partial(gdn_round.gdn_round_metal, inputs, state, layout, last)
                runs["states"] = partial(
                    gdn_round.gdn_snapshots_metal, inputs, state[:, None], first, layout, 2
                )
            taken = compare(runs)
            times = (relative(taken, n, "copy") for n in ("tape", "states", "plain"))
            rows.append([name, str(width), *times, f"{1e6 * median(taken, 'copy') / sizes.repeat:.0f}"])
    print("times over a copy of the state, the least a round can take\n")
    table(["layer", "width", "kernel, tape", "kernel, 2 states", "plain mx", "copy, us"], rows)


def convolution() -> None:
    """conv_qkv against plain mx, and what it takes in a round."""
    rows = []
    for name, heads in sizes.layers.items():
        for width in sizes.widths[:3]:
            shape = GdnShape(sizes.key_heads, heads, 128, 128)
            weights = conv_qkv.ConvWeights(normal(4, shape.conv_size), -mx.ones(heads), mx.zeros(heads))
            layout, window = RowLayout.of(FlatRows((width,))), normal(1, 3, shape.conv_size)
            arguments = normal(width, shape.conv_size + heads * 130), window, weights, shape, layout
            runs: dict[str, Callable[[], object]] = {"plain": partial(conv_qkv.conv_qkv_twin, *arguments)}
            if HAS_METAL:
                runs["kernel"] = partial(conv_qkv.conv_qkv_metal, *arguments)
            taken = compare(runs)
            plain = f"{1e6 * median(taken, 'plain') / sizes.repeat:.0f}"
            rows.append([name, str(width), plain, relative(taken, "kernel", "plain")])
    table(["layer", "width", "plain mx, us", "conv_qkv over plain mx"], rows)


def prefill() -> None:
    """gdn_prefill, its twin, MLX's own chunked operation and steps."""
    name, heads = list(sizes.layers.items())[-1]
    rows = []
    for tokens in sizes.tokens:
        inputs, state, layout, _ = round_data(heads, tokens)
        flat = FlatRows((tokens,))
        runs: dict[str, Callable[[], object]] = {
            "plain": partial(gdn_prefill.gdn_prefill_ops, inputs, state, flat)
        }
        if HAS_METAL:
            gdn_prefill.tune(inputs, state, flat)
            runs["kernel"] = partial(gdn_prefill.gdn_prefill_metal, inputs, state, flat)
            runs["steps"] = partial(gdn_round.gdn_facts_metal, inputs, state, layout)
            if hasattr(mx.fast, "gated_delta_update"):
                q, k, v, log_g, beta = (x[None] for x in inputs)
                gates = mx.exp(log_g).astype(v.dtype), beta.astype(v.dtype)
                runs["mlx"] = partial(mx.fast.gated_delta_update, q, k, v, *gates, state)
        taken = compare(runs)
        others = (relative(taken, n, "plain") for n in ("kernel", "steps", "mlx"))
        rows.append([str(tokens), f"{1e3 * median(taken, 'plain') / sizes.repeat:.2f}", *others])
    if HAS_METAL:
        races.save()
    print(f"{name} layer; times over the chunked form in plain mx\n")
    table(["tokens", "plain mx, ms", "gdn_prefill", "gdn_round (steps)", "mx.fast.gated_delta_update"], rows)


def ways_of_rollback() -> None:
    """Bytes, launches and, where nothing is slow, times of every way back, at the layers of 27B."""
    options = ["--models", "27B"] if HAS_METAL else ["--models", "0.8B", "--widths", "1", "4"]
    bench("bench_rollback.py", *options, "--rounds", str(min(sizes.rounds, 5)))


def rounds_that_overlap() -> None:
    """MTP rounds queued behind unread ones against rounds that wait, behind short and long prompts: are buffers copied?"""
    needs_metal()
    for context in ("0", "1600"):
        bench("bench_overlap.py", "--rounds", str(min(sizes.rounds, 7)), "--context", context)


def bench(name: str, *options: str) -> None:
    """What another script prints."""
    script = ROOT / "scripts" / name
    if not script.is_file():
        raise Skipped(f"scripts/{name} is not there")
    command = [sys.executable, str(script), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(f"```\n{done.stdout.strip()}\n```")
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-500:])


def model_races(name: str) -> None:
    """Loads the model's weights; says what was raced and what won."""
    from mlxspec.loading import hub
    from mlxspec.loading.weights import read_folder
    from mlxspec.models.assemble import assemble
    from mlxspec.models.tune import tune

    folder = hub.resolve(name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = tune(assemble(config, lambda: read_folder(folder)).model)
    if not found:
        raise Skipped("no kernel that could be raced is in use")
    table(
        ["kernel", "what", "MLX's time over ours"],
        [
            [kernel, what, f"{ratio:.2f}"]
            for kernel, ratios in found.items()
            for what, ratio in ratios.items()
        ],
    )


# ---- data


def normal(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(0)).astype(dtype)


def quantized(out: int, size: int, bits: int) -> qmv_rows.QuantizedWeight:
    return qmv_rows.QuantizedWeight.of(normal(out, size), 64, bits)


def round_data(heads: int, width: int) -> tuple[GdnInputs, mx.array, RowLayout, Kept]:
    """A layer's inputs for one row, and a tape of the same width, all kept."""
    rng = np.random.default_rng(0)
    layout = RowLayout.of(FlatRows((width,)))
    log_g = mx.array(-np.abs(rng.standard_normal((width, heads))).astype(np.float32))
    beta = mx.array(rng.uniform(0.05, 0.95, (width, heads)).astype(np.float32))
    key = normal(width, sizes.key_heads, 128) * 128**-0.5
    inputs = GdnInputs(key, key, normal(width, heads, 128), log_g, beta)
    tape = gdn_round.Tape(key, normal(width, heads, 128, dtype=mx.float32), log_g)
    state = normal(1, heads, 128, 128, dtype=mx.float32)
    mx.eval(inputs, tape, state)
    return inputs, state, layout, Kept(tape, layout, mx.array([width], mx.int32))


def same_bits(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a, b).item())


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def compare(runs: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of `sizes.repeat` calls evaluated together, by name and round."""

    def timed(function: Callable[[], object]) -> Callable[[], object]:
        return lambda: mx.eval([function() for _ in range(sizes.repeat)])

    return alternate({name: timed(run) for name, run in runs.items()}, rounds=sizes.rounds, warmup=2)


def relative(taken: Mapping[str, list[float]], name: str, base: str) -> str:
    return f"{ratio(taken, name, base):.2f}" if name in taken else "-"


if __name__ == "__main__":
    sys.exit(main())
