"""Trains the demo family: one command from nothing to the shipped folder, or one phase at a time.

    python scripts/train_demo.py all --work build/demo --out mlxspec/demo

Phases: data, main, mtp, draft, gemma, eagle3, dflash, long, vision, export; `all` also measures the result and writes the cards
(scripts/demo_eval.py). `all` leaves out `eagle3` and `dflash`, which draft for the target that lies in --out and write `--out/eagle3` and
`--out/dflash`, `vision`, which trains a target to read pictures and writes `--out/vision`, and `long`, which trains the target on to a
context of 8,192 tokens and writes `--work/long`. Each phase writes into --work and can be
run again; all but `data` and `export` resume from their checkpoints. Needs torch, numpy, tokenizers and safetensors; `vision` also Pillow
and matplotlib. Runs on the CPU, the phases `main`, `dflash` and `long` with one process or two
(--processes).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

# Page faults of freed and re-mapped arrays cost more than the arithmetic; idle OpenMP threads must not spin.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "68719476736",
    "MALLOC_TOP_PAD_": "268435456",
}
PHASES = ["all", "data", "main", "mtp", "draft", "gemma", "eagle3", "dflash", "long", "vision", "export"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("phase", choices=PHASES)
    parser.add_argument("--work", type=Path, default=Path("build/demo"))
    parser.add_argument("--out", type=Path, default=Path("mlxspec/demo"))
    parser.add_argument(
        "--tokenizer", type=Path, help="data phase: keep this tokenizer.json, for another member of a family"
    )
    parser.add_argument("--steps", type=int, default=4500, help="main phase, in steps of 4,096 tokens")
    parser.add_argument("--mtp-steps", type=int, default=1400, help="MTP phase, in steps of 2,048 tokens")
    parser.add_argument("--draft-steps", type=int, default=4500, help="draft phase, in steps of 2,048 tokens")
    parser.add_argument("--gemma-steps", type=int, default=5000, help="Gemma phase, in steps of 2,048 tokens")
    parser.add_argument(
        "--eagle3-steps", type=int, default=3000, help="EAGLE-3 phase, in steps of 2,048 tokens"
    )
    parser.add_argument("--vision-steps", type=int, default=6000, help="vision phase, in batches of pictures")
    parser.add_argument(
        "--dflash-steps",
        type=int,
        default=3000,
        help="DFlash2 phase, in steps of 2,048 tokens for each process",
    )
    parser.add_argument("--long-steps", type=int, default=400, help="long phase, in steps of two rows")
    parser.add_argument(
        "--samples", type=int, default=2048, help="rows sampled from the target for the draft phase"
    )
    parser.add_argument("--processes", type=int, choices=[1, 2], default=1)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def _helpers(args: argparse.Namespace, phase: str) -> list[subprocess.Popen[bytes]]:
    """The other processes of a phase that is shared among several, started."""
    if args.processes == 1 or args.rank:
        return []
    (args.work.resolve() / "rendezvous").unlink(missing_ok=True)
    words = [phase, "--work", args.work, "--out", args.out, "--processes", 2, "--rank", 1]
    words += ["--steps", args.steps, "--dflash-steps", args.dflash_steps, "--long-steps", args.long_steps]
    return [subprocess.Popen([sys.executable, __file__, *map(str, words)], start_new_session=True)]


def _main_phase(args: argparse.Namespace) -> None:
    from demo_training.main_phase import Schedule, train
    from demo_training.network import TARGET, LanguageModel

    work = args.work.resolve()
    children = _helpers(args, "main")
    schedule = Schedule(total=args.steps)
    train(work / "main.pt", lambda: LanguageModel(TARGET), schedule, world=args.processes, rank=args.rank)
    for child in children:
        child.wait()


def _gemma_phase(args: argparse.Namespace) -> None:
    from demo_training.gemma_network import GEMMA, GemmaModel
    from demo_training.main_phase import Schedule, train

    # small steps for a small model; its embedding is its head too, and is scaled
    schedule = Schedule(total=args.gemma_steps, micro_per_step=1, curriculum=400, embed_scale=1.0)
    train(args.work.resolve() / "gemma.pt", lambda: GemmaModel(GEMMA), schedule, report_seconds=1200)


def main() -> None:
    args = _arguments()
    if any(os.environ.get(k) != v for k, v in SETTINGS.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **SETTINGS})
    if args.phase in ("data", "all"):
        from demo_data.build import build

        build(args.work.resolve(), tokenizer_file=args.tokenizer)
    if args.phase in ("main", "all"):
        _main_phase(args)
    if args.phase in ("gemma", "all"):
        _gemma_phase(args)
    work, out = args.work.resolve(), args.out.resolve()
    if args.phase in ("mtp", "all"):
        from demo_training.tuning import Plan, tune_mtp

        tune_mtp(work, Plan(steps=args.mtp_steps, rate=1.5e-3))
    if args.phase in ("draft", "all"):
        from demo_training.tuning import Plan, distil_draft

        distil_draft(work, Plan(steps=args.draft_steps, rate=3e-3, curriculum=200, samples=args.samples))
    if args.phase == "eagle3":
        from demo_training.eagle3 import config, tune_eagle3
        from demo_training.streams import write_folder
        from demo_training.tuning import Plan

        tune_eagle3(work, out / "target", Plan(steps=args.eagle3_steps, rate=1e-3))
        write_folder(work / "eagle3.pt", out / "eagle3", config())
    if args.phase == "dflash":
        from demo_training.dflash import config, tune_dflash
        from demo_training.streams import write_folder
        from demo_training.tuning import Plan

        children = _helpers(args, "dflash")
        plan = Plan(steps=args.dflash_steps, rate=2e-3)
        tune_dflash(work, out / "target", plan, world=args.processes, rank=args.rank)
        for child in children:
            child.wait()
        if args.rank:
            return
        write_folder(work / "dflash.pt", out / "dflash", config())
    if args.phase == "long":
        from demo_training.export import write_member
        from demo_training.long_phase import CONTEXT, LongPlan, tune_long

        children = _helpers(args, "long")
        plan = LongPlan(steps=args.long_steps)
        model = tune_long(work, out / "target", plan, world=args.processes, rank=args.rank)
        for child in children:
            child.wait()
        if args.rank:
            return
        write_member(work / "long", model, work / "tokenizer.json", context=CONTEXT)
    if args.phase == "vision":
        from demo_training.vision_export import export_vision
        from demo_training.vision_phase import VisionSchedule, train_vision

        reader = train_vision(work / "vision.pt", out / "target", VisionSchedule(steps=args.vision_steps))
        export_vision(reader, out / "target", out / "vision", steps=args.vision_steps)
    if args.phase in ("export", "all"):
        from demo_training.export import export
        from demo_training.workloads import write_workloads

        export(work, out)
        if (work / "main.pt").exists():
            write_workloads(work, out)
    if args.phase == "all":
        import demo_eval
        import demo_eval_gemma

        demo_eval.record(work, out)
        demo_eval_gemma.record(work, out)


if __name__ == "__main__":
    main()
