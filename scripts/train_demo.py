#!/usr/bin/env python3
"""Trains the demo family: one command from nothing to the folders, or one phase at a time.

    scripts/train_demo all --work build/demo --out build/demo/family [--smoke]

Phases, in order: data, main, mtp, draft, gemma, eagle3, dflash, vision, evaluate. Each writes its checkpoint into --work and its folder
into --out, resumes where it ended, and can be run again. `evaluate` measures what lies in --out and writes figures.json and cards. --smoke
makes two small steps of each on a part of the data: a try of the code. Runs on the CPU; needs PyTorch (`pip install torch`).
The shipped weights were made by such runs that were stopped and resumed, so this gives models of the same kind, not the same bits.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
# Page faults of freed and re-mapped arrays cost more than the arithmetic; idle OpenMP threads must not spin.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "68719476736",
    "MALLOC_TOP_PAD_": "268435456",
}
PHASES = ("data", "main", "mtp", "draft", "gemma", "eagle3", "dflash", "vision", "evaluate")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/train_demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("phase", choices=["all", *PHASES])
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="data and checkpoints")
    parser.add_argument("--out", type=Path, default=Path("build/demo/family"), help="the family's folders")
    parser.add_argument("--tokenizer", type=Path, help="data: keep this tokenizer.json")
    parser.add_argument("--steps", type=int, help="of the phase, instead of its own number")
    parser.add_argument("--samples", type=int, default=2048, help="draft: rows sampled from the target")
    parser.add_argument("--smoke", action="store_true", help="two small steps on a part of the data")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("torch") is None:
        print("scripts/train_demo: PyTorch is not there; pip install torch.", file=sys.stderr)
        return 1
    if options.phase == "all" and options.steps is not None:
        parser.error("--steps is of one phase")
    for name in PHASES if options.phase == "all" else (options.phase,):
        run(name, options)
    return 0


def run(name: str, options: argparse.Namespace) -> None:
    """One phase."""
    import torch
    from demo_family import dataset, drafters, evaluate, export, train, vision

    torch.set_num_threads(1)
    work, out = options.work.resolve(), options.out.resolve()
    tokenizer = work / "tokenizer.json"

    def plan(whole: train.Plan) -> train.Plan:
        whole = whole if options.steps is None else replace(whole, steps=options.steps)
        return whole.smoke() if options.smoke else whole

    def trunk(file: str, member: str, whole: train.Plan) -> None:
        torch.manual_seed(whole.seed)
        train.train_trunk(work / file, export.untrained(member), plan(whole))
        export.write_trained(work, out)

    def data() -> None:
        share = 0.01 if options.smoke else 1.0
        dataset.build(work, tokenizer_file=options.tokenizer, share=share)

    def drafter(name: str) -> None:
        drafters.tune(name, work, out, plan(drafters.PLANS[name]))
        export.write_trained(work, out)

    def draft() -> None:
        rows = 16 if options.smoke else options.samples
        sampled = evaluate.sample_rows(out / "target", dataset.Data(work), rows, train.DISTIL.length + 32)
        train.distil_draft(work, plan(train.DISTIL), sampled)
        export.write_trained(work, out)

    def reader() -> None:
        made = vision.train_vision(work / "vision.pt", tokenizer, plan(vision.PLAN))
        export.write_vision(made, out / "vision", tokenizer)

    phases: dict[str, Callable[[], None]] = {
        "data": data,
        "main": lambda: trunk("main.pt", "target", train.MAIN),
        "mtp": lambda: drafter("mtp"),
        "draft": draft,
        "gemma": lambda: trunk("gemma.pt", "gemma", train.GEMMA_MAIN),
        "eagle3": lambda: drafter("eagle3"),
        "dflash": lambda: drafter("dflash"),
        "vision": reader,
        "evaluate": lambda: evaluate.evaluate(work, out, rows=2 if options.smoke else 32),
    }
    print(f"phase {name}", flush=True)
    phases[name]()


if __name__ == "__main__":
    if any(os.environ.get(k) != v for k, v in SETTINGS.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **SETTINGS})
    sys.exit(main())
