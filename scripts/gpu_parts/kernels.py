"""This machine, and the Metal kernels one by one: self-checks, bits, and times beside plain operations and MLX's own."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import mlx.core as mx
import numpy as np
from alternating import median

from mlxspec.engine import measured
from mlxspec.kernels import attention, gdn_prefill, gdn_round, kv_attend, launch, products, qmv_rows, races
from mlxspec.kernels.conv_ops import GdnInputs, GdnShape
from mlxspec.kernels.flat import FlatRows
from mlxspec.kernels.gdn_round import Replay, RowLayout
from mlxspec.kernels.quantized_kv import KV_BITS
from mlxspec.kernels.quantized_weight import MICROSCALING, QuantizedWeight, product_ops, race_key
from mlxspec.platform import device

from .base import ROOT, Here, Skipped, normal, quantized, relative, same_bits, table

# ---- sections of every report


def machine(here: Here) -> None:
    """What this is, and which versions run."""
    info = mx.device_info()
    memory = f", {info['memory_size'] / 2**30:.0f} GiB" if "memory_size" in info else ""
    architecture = f" ({info['architecture']})" if "architecture" in info else ""
    report = device.report()
    name = info.get("device_name") or platform.processor() or platform.machine()
    here.tell(f"{name}{architecture}{memory}, backend {report.backend}")
    here.tell(
        f"{platform.platform()}, Python {platform.python_version()}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    )
    here.tell(
        ", ".join(f"{package} {_version(package)}" for package in ("mlxspec", "mlx", "mlx-lm", "numpy"))
    )
    tf32 = {False: "off", True: "ON (MLX_ENABLE_TF32)", None: "unknown, MLX was imported first"}[report.tf32]
    here.tell(f"float32 products rounded to TF32: {tf32}")
    for tried in measured.all_measured():
        here.tell(f"mlxspec try: {tried}")
    print(f"BLAS {report.blas}, compile {'on' if report.compile_enabled else 'off'}")
    for notice in report.notices:
        print(f"notice: {notice}")


def self_checks(here: Here) -> None:
    """Which kernels are in use, and why not the others."""
    reports = launch.reports()
    for report in reports:
        note = f"; {report.note}" if report.note else ""
        print(f"- {report.name}: {'in use' if report.in_use else 'NOT in use'}, {report.reason}{note}")
    said = (f"{r.name} {'ok' if r.in_use else 'FAILED' if r.failed else 'not run'}" for r in reports)
    here.tell("kernels: " + ", ".join(said))


def qmv_race(here: Here) -> None:
    """Our quantized products beside MLX's own, at all raced numbers of rows."""
    here.needs_metal()
    if not any(launch.in_use(name) for k in products.KERNELS for name in (k.name, k.fp_name)):
        raise Skipped("no kernel for quantized products is in use")
    weights = [(f"{bits} bits", quantized(*shape, bits)) for shape in here.sizes.matmuls for bits in (4, 8)]
    for mode, form in MICROSCALING.items():
        weights.append((mode, QuantizedWeight.of(normal(*here.sizes.matmuls[0]), *form, mode)))
    rows, won = [], []
    for name, weight in weights:
        out, size = weight.shape
        found = products.tune(weight)
        for kernel in products.KERNELS:
            raced = found.get(kernel.name_of(weight), {})
            keys = {n: race_key(n, weight, mx.bfloat16) for n in products.RACED_ROWS}
            cells = (f"{raced[key]:.2f}" if key in raced else "" for key in keys.values())
            rows.append([f"{size} -> {out}", name, kernel.name, *cells])
            wins = [str(n) for n, key in keys.items() if raced.get(key, 0.0) >= 1.02]
            won.append(f"{kernel.name} {size} -> {out} at {name}: {' '.join(wins) or 'none'}")
    races.save()
    print("MLX's time over ours, bfloat16; from 1.02 on ours is used\n")
    table(["shape", "format", "kernel", *(f"{n} rows" for n in products.RACED_ROWS)], rows)
    here.tell("rows at which races were won: " + "; ".join(won))
    tell_refusals(here)


def kv_race(here: Here) -> None:
    """Attention to keys and values in few bits: our kernel beside MLX's products with quantized matrices."""
    here.needs_metal()
    if not launch.in_use(kv_attend.NAME):
        raise Skipped("kv_attend is not in use")
    rows, won = [], []
    for heads in attention.COMMON:
        for bits in KV_BITS:
            for key, ratio_ in kv_attend.tune(*heads, bits).items():
                rows.append([key, f"{ratio_:.2f}"])
                won += [key] if ratio_ >= 1.02 else []
    races.save()
    print("MLX's time over ours, behind 16,384 tokens; from 1.02 on ours is used\n")
    table(["heads, bits and queries", "ratio"], rows)
    here.tell("quantized keys and values at which kv_attend won: " + ("; ".join(won) or "none"))
    tell_refusals(here)


def tell_refusals(here: Here) -> None:
    """Report the variants that this GPU could not run, with the reason."""
    for name, by_width in launch.refusals().items():
        for width, why in by_width.items():
            here.tell(f"{name} cannot run here: {width}: {why}")


def prefill(here: Here) -> None:
    """gdn_prefill, its twin, MLX's own chunked operation, and steps, over the tokens of a prompt."""
    name, heads = list(here.sizes.layers.items())[-1]
    rows = []
    for tokens in here.sizes.tokens:
        inputs, state, layout, _ = round_data(here, heads, tokens)
        flat = FlatRows((tokens,))
        runs: dict[str, Callable[[], object]] = {
            "plain": partial(gdn_prefill.gdn_prefill_ops, inputs, state, flat)
        }
        if here.has_metal:
            gdn_prefill.race(GdnShape(here.sizes.key_heads, heads, 128, 128), inputs.q.dtype, tokens)
            runs["kernel"] = partial(gdn_prefill.gdn_prefill_metal, inputs, state, flat)
            runs["steps"] = partial(gdn_round.gdn_advance_metal, inputs, state, layout)
            if hasattr(mx.fast, "gated_delta_update"):
                q, k, v, log_g, beta = (x[None] for x in inputs)
                gates = mx.exp(log_g).astype(v.dtype), beta.astype(v.dtype)
                runs["mlx"] = partial(mx.fast.gated_delta_update, q, k, v, *gates, state)
        taken = here.compare(runs)
        plain = f"{1e3 * median(taken, 'plain') / here.sizes.repeat:.2f}"
        others = {n: relative(taken, n, "plain") for n in ("kernel", "steps", "mlx")}
        rows.append([str(tokens), plain, *others.values()])
        if here.has_metal:
            said = ", ".join(f"{n} {value}" for n, value in others.items())
            here.tell(
                f"recurrence of a {name} layer over {tokens} tokens, time over plain operations: {said}"
            )
    if here.has_metal:
        races.save()
    print(f"{name} layer; times over the chunked form in plain mx\n")
    table(["tokens", "plain mx, ms", "gdn_prefill", "gdn_round (steps)", "mx.fast.gated_delta_update"], rows)


# ---- sections of --long


def kernel_tests(here: Here) -> None:
    """The kernels' own tests."""
    tests = "tests/metal", "tests/kernels/test_attention.py"
    command = [sys.executable, "-m", "pytest", "-m", "not slow", "--no-header", *tests]
    try:
        limit = None if here.ends == float("inf") else here.seconds_left
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        raise Skipped("the time was over before they were; run them with pytest tests/metal") from None
    lines = done.stdout.strip().splitlines()
    where = "GPU" if device.has_gpu() else "emulator"
    here.tell(f"kernel tests on the {where}: {lines[-1] if lines else 'no output'}")
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(f"- {line}")
    if done.returncode:
        raise RuntimeError("kernel tests failed")


def exactness(here: Here) -> None:
    """Whether row 0 of a w-row product is bit for bit the one-row product, which decides whether greedy text can be."""
    rows = []
    for out, size in here.sizes.matmuls:
        for bits in (4, 8):
            weight, x = quantized(out, size, bits), normal(16, size)
            alone = product_ops(x[:1], weight)
            same = [w for w in range(2, 17) if same_bits(product_ops(x[:w], weight)[:1], alone)]
            ours = "-"
            if launch.in_use("qmv_rows"):
                ours = str(
                    [w for w in range(1, 9) if same_bits(qmv_rows.qmv_rows_metal(x[:w], weight)[:1], alone)]
                )
            rows.append([f"{size} -> {out}", str(bits), str(same), ours])
    table(["shape", "bits", "widths of MLX bitwise as width 1", "widths of qmv_rows likewise"], rows)


def model_races(name: str, here: Here) -> None:
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


def round_data(here: Here, heads: int, width: int) -> tuple[GdnInputs, mx.array, RowLayout, Replay]:
    """A layer's inputs for one row, and a tape of the same width, all kept."""
    rng = np.random.default_rng(0)
    layout = RowLayout.of(FlatRows((width,)))
    log_g = mx.array(-np.abs(rng.standard_normal((width, heads))).astype(np.float32))
    beta = mx.array(rng.uniform(0.05, 0.95, (width, heads)).astype(np.float32))
    key = normal(width, here.sizes.key_heads, 128) * 128**-0.5
    inputs = GdnInputs(key, key, normal(width, heads, 128), log_g, beta)
    tape = gdn_round.Tape(key, normal(width, heads, 128, dtype=mx.float32), log_g)
    state = normal(1, heads, 128, 128, dtype=mx.float32)
    mx.eval(inputs, tape, state)
    return inputs, state, layout, Replay(tape, layout, mx.array([width], mx.int32))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
