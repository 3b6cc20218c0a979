#!/usr/bin/env python3
"""What an Apple GPU makes of mlxspec, in less than five minutes, ending with a short report to paste into an issue.

    scripts/mac_check [--quick] [--long] [--out FILE] [--backend metal] [--only SECTION ...] [--model NAME]

It checks the kernels against plain operations, and what is known to go wrong on Macs. With a random model of the 0.8B's shape, so that
nothing is downloaded, it measures plain decoding and prompts beside mlx-lm in the same run, what verifying costs, what drafting would be
worth, rounds that run ahead behind long texts, and MLX's command-buffer limits. Times are medians of turns in this process; of child
processes the best counts. Anything else that uses the GPU meanwhile spoils them. Every section stands alone: one that fails says so and
the next goes on. Without Metal, what needs it says that it was skipped. Races are kept in mlxspec's cache folder, where every later run
of mlxspec on this device finds them.

Exit status: 0 no section failed, 1 one did, or the backend is not the one that --backend names, 2 a mistake in the options.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mlxspec.platform import device  # before mlx: it loads the BLAS  # isort: skip

from gpu_parts import kernels
from gpu_parts.base import FULL, QUICK, WITHOUT_METAL, Here, Sections, run
from gpu_parts.model import Model
from gpu_parts.points import points

# by section: shapes whose prompts are timed by a period of their layers, so that 16 GB of memory are enough
LARGE = {"27b": ("qwen3.6-27b", 4), "35b": ("qwen3.6-35b-a3b", 4), "31b": ("gemma-4-31b", 6)}
SECONDS = 270  # after which no further section begins, except with --long: a section takes at most about 30


def main(arguments: list[str] | None = None) -> int:
    began = time.perf_counter()
    formatter = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="scripts/mac_check", description=__doc__, formatter_class=formatter)
    parser.add_argument("--quick", action="store_true", help="smaller shapes and fewer rounds")
    parser.add_argument(
        "--long", action="store_true", help="kernel tests and bits by width too; no limit of time"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write everything there as well")
    parser.add_argument("--backend", choices=("metal", "cuda", "cpu"), help="fail where MLX has another one")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="run these sections")
    parser.add_argument("--model", metavar="NAME", help="also race the shapes of this model (name or folder)")
    options = parser.parse_args(arguments)
    if options.backend is not None and device.backend() != options.backend:
        print(
            f"scripts/mac_check: --backend {options.backend} was asked for, and MLX computes with {device.backend()} here.",
            file=sys.stderr,
        )
        return 1
    has_metal = device.backend() == "metal"
    with tempfile.TemporaryDirectory(prefix="mlxspec-mac-") as folder:
        here = Here(
            sizes=(QUICK if options.quick else FULL) if has_metal else WITHOUT_METAL,
            has_metal=has_metal,
            folder=Path(folder),
            ends=float("inf") if options.long else began + SECONDS,
        )
        chosen = sections(here, long=options.long, model=options.model)
        unknown = [name for name in options.only or () if name not in chosen]
        if unknown:
            parser.error(f"there is no section {unknown[0]}; sections are {', '.join(chosen)}")
        if options.only:
            chosen = {name: chosen[name] for name in options.only}
        text, failed = run(here, chosen)
    took = time.perf_counter() - began
    report = "\n".join([*here.summary, f"failed: {', '.join(failed) or 'nothing'}; {took:.0f} s"])
    block = f"### Report to paste\n\n```text\n{report}\n```\n"
    print(block, flush=True)
    print(
        'To send it: paste this block into an issue of the form "Report from a Mac" (docs/getting-started.md).',
        flush=True,
    )
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(f"{block}\n{text}", encoding="utf-8")
    return 1 if failed else 0


def sections(here: Here, *, long: bool = False, model: str | None = None) -> Sections:
    """Title and function by name, in the order in which they are worth having."""
    shape = Model(here)
    found: dict[str, tuple[str, Callable[[], None]]] = {
        "machine": ("Machine", partial(kernels.machine, here)),
        "self-checks": ("Self-checks of the kernels", partial(kernels.self_checks, here)),
        "qmv": ("qmv_rows against MLX", partial(kernels.qmv_race, here)),
        "kv": ("Quantized keys and values", partial(kernels.kv_race, here)),
        "decode": ("Plain decoding against mlx-lm", shape.decode),
        "prompts": ("Prompts against mlx-lm", shape.prefill),
        "verify": ("What verifying costs", shape.verify),
        "drafting": ("What drafting would be worth", shape.drafting),
        "sampled": ("What sampling costs", shape.sampled),
        "pitfalls": ("Known pitfalls", partial(points, shape, here)),
        "ahead": ("Rounds that run ahead", shape.running_ahead),
        "buffers": ("Limits of command buffers", shape.buffers),
        "recurrence": ("Prompts through the recurrence", partial(kernels.prefill, here)),
    }
    for name, (size, period) in LARGE.items():
        found[name] = (f"Prompts of {size}, by {period} of its layers", Model(here, size, period).layers)
    if model is not None:
        found["races"] = (f"Races at the shapes of {model}", partial(kernels.model_races, model, here))
    if long:
        found |= {
            "tests": ("Kernel tests", partial(kernels.kernel_tests, here)),
            "exactness": ("Bits of a quantized matmul by width", partial(kernels.exactness, here)),
        }
    return found


if __name__ == "__main__":
    sys.exit(main())
