#!/usr/bin/env python3
"""How fast policy auto is beside plain decoding where drafting does not pay: a process that knows no costs yet, and one behind it.

    scripts/bench_auto FOLDER [--tokens 48,256] [--temperatures 1,0] [--pairs 5] [--log] [--json FILE]

FOLDER is a model whose MTP head is never right, as scripts/write_checkpoint makes them. For each temperature and length a cache folder of
its own is emptied, and two processes run one after the other: the first measures and learns, the second begins with what was kept. In
each the same answers are decoded in pairs, by `auto` and by `off` in alternating order; the first pair counts as the others do, unless
--warm leaves it out. A ratio is plain time over auto's time, so that 1 is equal and less is slower. Texts of a pair must be equal, or the
command fails. Needs an otherwise idle machine.

--limits FIRST,SECOND: exit 1 where a median is below that in the first process, or in the second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT = 24  # tokens


def main() -> int:
    options = _options()
    if options.worker:
        print(json.dumps(_work(options)))
        return 0
    limits = options.limits
    cells: list[dict[str, Any]] = []
    print(
        "| temperature | tokens | process | median | least | CPU time | drafts asked | load s | equal texts |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for temperature in options.temperatures.split(","):
        for tokens in options.tokens.split(","):
            with tempfile.TemporaryDirectory(prefix="mlxspec-bench-") as cache:
                for process in ("first", "second"):
                    found = _run(options, temperature, tokens, cache)
                    cells.append({"temperature": temperature, "tokens": tokens, "process": process, **found})
                    _print(cells[-1])
            if options.json:
                options.json.write_text(json.dumps(cells, indent=1))
    slow = [c for c in cells if _median(c) < limits[c["process"] == "second"]]
    unequal = [c for c in cells if not c["same"]]
    for cell in slow:
        print(
            f"below the limit: {cell['process']} process, temperature {cell['temperature']}, {cell['tokens']} tokens"
        )
    return 1 if slow or unequal else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder")
    parser.add_argument("--tokens", default="48,256")
    parser.add_argument("--temperatures", default="1,0")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--warm", action="store_true", help="leave the first pair of each process out")
    parser.add_argument("--log", action="store_true", help="the controller's decisions, on stderr")
    parser.add_argument("--limits", type=_limits, default=(0.0, 0.0), help="FIRST,SECOND")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _limits(text: str) -> tuple[float, float]:
    first, second = map(float, text.split(","))
    return first, second


def _run(options: argparse.Namespace, temperature: str, tokens: str, cache: str) -> dict[str, Any]:
    """One process. The compiled kernels and the BLAS that were found before stay: they are no costs."""
    command = [sys.executable, __file__, options.model, "--worker"]
    command += ["--temperatures", temperature, "--tokens", tokens, "--pairs", str(options.pairs)]
    command += ["--warm"] * options.warm + ["--log"] * options.log
    done = subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "MLXSPEC_BENCH_COSTS": cache},
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _work(options: argparse.Namespace) -> dict[str, Any]:
    from mlxspec import load
    from mlxspec.platform import device

    device.compile_kernels()
    from mlxspec.config import EngineConfig, SamplingParams, SpecConfig
    from mlxspec.policy import cost_file

    _keep_costs_in(cost_file, Path(os.environ["MLXSPEC_BENCH_COSTS"]))
    started = time.perf_counter()
    engine = load(options.model, config=EngineConfig(prefix_budget=0))
    loading = time.perf_counter() - started
    if options.log and engine.drafting.auto is not None:
        engine.drafting.auto.log = lambda line: print(line, file=sys.stderr)
    plain, tokens = SpecConfig(), int(options.tokens)

    def answer(spec: SpecConfig, turn: int) -> tuple[float, float, list[int], dict[str, int]]:
        params = SamplingParams(
            max_tokens=tokens, ignore_eos=True, temperature=float(options.temperatures), seed=turn
        )
        prompt = [(7 * i + turn) % 2000 for i in range(PROMPT)]
        begun = time.perf_counter(), time.process_time()
        request = engine.submit(prompt, params, spec=spec)
        while not request.history[PROMPT:]:
            engine.step()
        # rounds may be on their way already, so the clock does not begin here; what reading the prompt took is left out
        middle = time.process_time()
        while not engine.is_idle:
            engine.step()
        taken = (
            time.perf_counter() - begun[0] - request.stats.prefill_seconds,
            time.process_time() - middle,
        )
        calls = {n: s.num_calls for n, s in request.stats.drafters.items() if s.num_calls and n == "mtp"}
        return *taken, request.history, calls

    ratios, cpu, calls, same = [], [], [], True
    for turn in range(options.pairs + options.warm):
        order = (plain, engine.spec) if turn % 2 else (engine.spec, plain)
        found = {spec is plain: answer(spec, turn) for spec in order}
        off, auto = found[True], found[False]
        same = same and off[2] == auto[2]
        if turn or not options.warm:
            ratios.append(off[0] / auto[0])
            cpu.append(off[1] / auto[1])
            calls.append(sum(auto[3].values()))
    costs = engine.drafting.auto.control.costs if engine.drafting.auto is not None else None
    knots = {} if costs is None else {w: s for w, s in costs.curve(0).knots().items() if w <= 17}
    return {
        "ratios": ratios,
        "cpu": cpu,
        "calls": calls,
        "same": same,
        "loading": loading,
        "measured": [] if costs is None else sorted(costs.measured),
        "curve": knots,
        "drafts": {} if costs is None else {n: vars(d) for n, d in costs.drafts.items()},
    }


def _keep_costs_in(cost_file: Any, folder: Path) -> None:
    """Only the costs begin empty, so that no process of the bench compiles what the others have."""
    whole = cost_file._path
    cost_file._path = lambda *args: folder / whole(*args).name


def _median(cell: dict[str, Any]) -> float:
    return statistics.median(cell["ratios"])


def _print(cell: dict[str, Any]) -> None:
    print(
        f"| {cell['temperature']} | {cell['tokens']} | {cell['process']} | {_median(cell):.3f} | {min(cell['ratios']):.3f} "
        f"| {statistics.median(cell['cpu']):.3f} | {cell['calls']} | {cell['loading']:.1f} | {'yes' if cell['same'] else 'NO'} |",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
