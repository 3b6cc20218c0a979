#!/usr/bin/env python3
"""gdn_round, qmv_rows and qmm_few, compiled for an NVIDIA GPU: right against float64, and what fraction of the copy bandwidth.

    scripts/gpu_check [--quick] [--json FILE] [--arch sm_90] [--compile-only]

Layer shapes of the 27B model. Times are medians of runs of one CUDA graph in which the launches stand behind one another, each with memory
of its own, several times the L2 cache; nothing else may use the GPU meanwhile. It is a second compiler and true concurrency for the same
text; it says nothing of Apple's compiler or speed. Exit status: 0 right, 1 wrong or failed, 2 nothing to run on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Union

try:
    import numpy  # noqa: F401
except ImportError:
    print("scripts/gpu_check cannot run: there is no numpy (python3 -m pip install numpy).", file=sys.stderr)
    sys.exit(2)

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu import build, cases, device
from gpu.cases import Launch, Product, Round

WIDTHS = tuple(range(1, 9))
FEW = (5, 8, 16, 24, 32)  # rows of qmm_few
ROWS = (1, 16)  # of a batch, in timed rounds: one layer of one row is too little work to fill a large GPU
LIMITS = {"float": 2e-6, "half": 1e-3, "bfloat": 8e-3}  # outputs in T are rounded; gdn_round's are float32
MICROSCALING = (4, 16, "nvfp4"), (8, 32, "mxfp8"), (4, 32, "mxfp4")  # bits, group, mode
FORMATS = (4, 32, "affine"), (4, 128, "affine"), (8, 64, "affine"), *MICROSCALING
REPLAYED = Round((5,), (0,), key_heads=2, value_heads=6, value_dim=64)
CHECKED_PRODUCT = Product(num_rows=1, out_features=64, in_features=1024)
_LARGE_COPY = 1 << 30
_SETS_BYTES = 1 << 30  # what the launches of one graph touch together

Case = Union[Round, Product]  # noqa: UP007 (evaluated, and older Pythons serve here)
Run = Callable[[Launch], dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds of each time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there as well")
    parser.add_argument("--arch", help="what nvcc compiles for; this machine's GPU if left out")
    parser.add_argument("--compile-only", action="store_true", help="stop behind the compiler; needs no GPU")
    options = parser.parse_args()
    missing = build.missing_compiler() or (None if options.compile_only else device.missing_gpu())
    if missing:
        print(f"scripts/gpu_check cannot run: {missing}.", file=sys.stderr)
        return 2
    try:
        return check(options)
    except (build.BuildError, device.GpuError) as error:
        print(str(error), file=sys.stderr)
        return 1


def check(options: argparse.Namespace) -> int:
    source, places = build.unit(make(case) for case in checked_cases())  # what is timed needs no others
    with tempfile.TemporaryDirectory() as folder:
        output = "kernels.cubin" if options.compile_only else "kernels.so"
        arch = options.arch or ("sm_90" if options.compile_only else "native")
        library, said = build.compile_unit(source, Path(folder), arch=arch, output=output)
        used = build.resources(said)
        print(f"compiled {len(places)} kernels for {arch}; {spills(used)}")
        if options.compile_only:
            return 0
        gpu = device.Gpu(library)
        report: dict[str, Any] = {"machine": machine(gpu), "kernels": kernel_table(places, used)}
        right, report["errors"] = correctness(
            lambda launch: gpu.run(places[build.key_of(launch)], launch), checked_cases()
        )
        report["speed"] = speed(gpu, places, rounds=5 if options.quick else 25)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if right else 1


def machine(gpu: device.Gpu) -> dict[str, Any]:
    found = {
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",  # noqa: UP017 (Python 3.10 serves here)
        "device": gpu.name,
        "compute": gpu.compute,
        "multiprocessors": gpu.num_cores,
        "l2_bytes": gpu.l2_bytes,
        "driver": gpu.driver,
        "nvcc": build.compiler_release(),
    }
    print(", ".join(f"{name} {value}" for name, value in found.items()))
    return found


def spills(used: dict[int, tuple[int, int]]) -> str:
    spilled = [place for place, (_, count) in used.items() if count]
    most = max((registers for registers, _ in used.values()), default=0)
    return f"at most {most} registers a thread, {f'{len(spilled)} spill' if spilled else 'none spills'}"


def kernel_table(
    places: dict[tuple[Any, ...], int], used: dict[int, tuple[int, int]]
) -> list[dict[str, Any]]:
    rows = []
    for key, place in places.items():
        registers, spilled = used.get(place, (0, 0))
        rows.append(
            {"kernel": key[0], "template": dict(key[1]), "registers": registers, "spilled_bytes": spilled}
        )
    return rows


# ---- right or wrong


def make(case: Case) -> Launch:
    return cases.gdn_round(case) if isinstance(case, Round) else cases.product(case)


def checked_cases() -> list[Case]:
    """Every width alone with everything kept, ragged rows with parts kept, every mode and dtype; products of 1 to 32 rows."""
    rounds = [Round((w,), (w,)) for w in WIDTHS]
    ragged = Round((3, 1, 0, 6), (2, 0, 0, 6), key_heads=2, value_heads=6, value_dim=64)
    rounds += [replace(ragged, mode=mode, dtype=dtype) for mode in ("tape", "certain") for dtype in LIMITS]
    rounds += [REPLAYED, replace(REPLAYED, mode="certain"), replace(REPLAYED, kept=(5,))]
    products = [replace(CHECKED_PRODUCT, num_rows=m) for m in WIDTHS]
    products += [
        replace(CHECKED_PRODUCT, num_rows=3, out_features=62, bits=bits, group=group, dtype=dtype, mode=mode)
        for bits, group, mode in FORMATS
        for dtype in LIMITS
    ]
    products += [
        replace(CHECKED_PRODUCT, num_rows=m, bits=bits, group=group, mode=mode)
        for bits, group, mode in MICROSCALING
        for m in (1, 8)
    ]
    few = [replace(CHECKED_PRODUCT, kernel="qmm_few", num_rows=m, in_features=640) for m in FEW]
    few += [
        replace(few[0], num_rows=11, out_features=62, bits=bits, group=group, dtype=dtype, mode=mode)
        for bits, group, mode in FORMATS
        for dtype in LIMITS
    ]
    return [*rounds, *products, *few]


def correctness(run: Run, checked: Sequence[Case]) -> tuple[bool, dict[str, float]]:
    """Largest errors by kernel and dtype against float64; replay against forward and rows against rows alone, bit for bit."""
    worst: dict[str, float] = {}
    right = True
    for case in checked:
        launch, is_round = make(case), isinstance(case, Round)
        wanted = cases.gdn_round_wanted(launch, case) if is_round else cases.product_wanted(launch, case)
        got = run(launch)
        error = max(cases.error(got[name], wanted[name]) for name in wanted)
        name = f"{launch.kernel}, {case.dtype}"
        worst[name] = max(worst.get(name, 0.0), error)
        if not error <= (LIMITS["float"] if is_round else LIMITS[case.dtype]):
            right = False
            print(f"WRONG: {case}: error {error:.1e}")
    print("\n| kernel | largest error against float64, of the largest value |\n| --- | --- |")
    for name, error in worst.items():
        print(f"| {name} | {error:.1e} |")
    for text, holds in (
        ("a replayed state is bit for bit the state that the forward went through", replay_is_forward(run)),
        ("a row of a product is bit for bit that row alone", rows_are_alone(run)),
    ):
        print(f"\n{text}: {'yes' if holds else 'NO'}")
        right = right and holds
    return right, worst


def replay_is_forward(run: Run) -> bool:
    """The tape of a round, replayed by the next, against the state that the same tokens gave."""
    forward = make(replace(REPLAYED, mode="certain"))
    made = run(make(REPLAYED))
    given = make(replace(REPLAYED, kept=(5,)))
    tape = {"tape_k": given.inputs["k"], "tape_delta": made["delta"], "tape_log_g": given.inputs["log_g"]}
    again = replace(given, inputs={**given.inputs, **tape})
    return run(forward)["state_out"].tobytes() == run(again)["state_out"].tobytes()


def rows_are_alone(run: Run) -> bool:
    whole = cases.product(replace(CHECKED_PRODUCT, num_rows=8))
    alone = cases.product(CHECKED_PRODUCT)
    together = run(whole)["y"]
    for m in range(8):
        one = replace(alone, inputs={**alone.inputs, "x": whole.inputs["x"][m : m + 1]})
        if run(one)["y"].tobytes() != together[m : m + 1].tobytes():
            return False
    return True


# ---- speed


def timed_cases() -> Iterator[tuple[dict[str, Any], Launch]]:
    """What is timed, and the launch."""
    for rows in ROWS:
        for w in WIDTHS:
            yield (
                {"kernel": "gdn_round", "rows": rows, "width": w},
                make(Round((w,) * rows, (w,) * rows)),
            )
    for m in WIDTHS:
        yield {"kernel": "qmv_rows", "rows": m, "width": 1}, make(Product(m))
    for m in FEW:
        yield {"kernel": "qmm_few", "rows": m, "width": 1}, make(Product(m, kernel="qmm_few"))


def speed(gpu: device.Gpu, places: dict[tuple[Any, ...], int], *, rounds: int) -> dict[str, Any]:
    """Prints and returns bandwidths: bytes that must move, over the time, over the bandwidth of a large copy."""
    copies = [gpu.time_copy(_LARGE_COPY, num_sets=2, rounds=rounds, by_driver=by) for by in (False, True)]
    peak = 2 * _LARGE_COPY / min(copies)
    size = f"{_LARGE_COPY >> 20} MiB"
    print(f"\ncopy of {size}: {peak / 1e12:.2f} TB/s read and written (kernel and driver: the faster)\n")
    print("| kernel | rows | width | us | a copy of as many bytes, us | bytes over time, of copy bandwidth |")
    print("| --- | --- | --- | --- | --- | --- |")
    rows: list[dict[str, Any]] = []
    for what, launch in timed_cases():
        num_bytes = launch.least_bytes
        num_sets = max(4, min(128, -(-_SETS_BYTES // num_bytes)))
        seconds = gpu.time(places[build.key_of(launch)], launch, num_sets=num_sets, rounds=rounds)
        same = gpu.time_copy(num_bytes // 32 * 16, num_sets=num_sets, rounds=rounds)
        fraction = num_bytes / seconds / peak
        rows.append(
            {**what, "bytes": num_bytes, "seconds": seconds, "copy_seconds": same, "fraction": fraction}
        )
        shown = what["kernel"], what["rows"], what["width"]
        print(
            "| {} | {} | {} | {:.1f} | {:.1f} | {:.2f} |".format(*shown, 1e6 * seconds, 1e6 * same, fraction)
        )
    shapes = {"gdn_round": asdict(Round((1,), (1,))), "products": asdict(Product(1))}
    return {"copy_bytes_per_second": peak, "times": rows, "shapes": shapes}


if __name__ == "__main__":
    sys.exit(main())
