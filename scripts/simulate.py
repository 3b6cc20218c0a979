#!/usr/bin/env python3
"""How long answers would take under policy auto on machines that are not here: the tables of docs/never-slower.md.

    scripts/simulate [--lengths 16,32,96,256] [--count 15] [--curves NAMES] [--starts cold,warm,restart] [--jobs N] [--json FILE]
    scripts/simulate --contexts 1024,8192,32768,131072 --lengths 400       the same after long contexts, all in turns
    scripts/simulate --rows 4 [--count 60]       groups of recorded answers that decode together, of one kind of text and of all mixed
    scripts/simulate --engine [--tokens 96] [--temperatures 0,0.8] [--prompts 30] [--cold 0]       the real engine under a simulated clock

The first three replay traces of --model: the controller alone, all kinds of text in turns. The last answers the prompts of
scripts/bench_policy.json with the demo model; rounds and drafts take what a curve says, and the first round of a width --cold plain rounds
more. Ratios are of decoding times, above 1 is faster. `best` is the fastest of plain decoding and all fixed settings for that answer, in
hindsight; `kind` the fixed setting that is fastest for all answers of its kind. A start is cold (a new controller for each answer), warm,
or a restart, which knows what a warm one kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from simulation.machines import MACHINES
from simulation.report import DRAFTERS, STARTS, Cell, GroupCell, run_cells, run_group_cells
from simulation.traces import read_traces

ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT / "tests" / "policy" / "held_traces.npz"
CURVES = ("CPU", "M1 Ultra", "M3 Max", "M3 Ultra", "M4 Pro")
KINDS = ("edit", "explain", "continue", "ask", "sampled")


def main() -> None:
    options = _options()
    jobs: list[tuple[Any, ...]] = []
    print(f"The drafts are those of {options.model}.\n")
    if options.engine:
        found = [row for curve in options.curves for row in run_engine(curve, options)]
        _print_table(
            ["curve", "T", "setting", "over plain", "worst", "over best", "tokens a round", "equal"], found
        )
        cells: list[Any] = [
            dict(zip(("curve", "temperature", "setting"), row, strict=False)) for row in found
        ]
    elif options.rows > 1:
        groups = [[k] for k in KINDS] + [list(KINDS)]
        jobs = [
            (options.traces, options.model, g, options.rows, options.curves, options.count) for g in groups
        ]
        cells = _run(_group_job, jobs, options.jobs)
        _print_groups(cells)
    else:
        jobs = [
            (
                options.traces,
                options.model,
                n,
                options.contexts,
                options.curves,
                options.count,
                options.starts,
            )
            for n in options.lengths
        ]
        cells = _run(_job, jobs, options.jobs)
        _print_cells(cells)
    if options.json:
        data = [c if isinstance(c, dict) else asdict(c) for c in cells]
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--model", default="demo", help="whose drafts the traces hold")
    parser.add_argument("--count", type=int, default=15)
    parser.add_argument("--curves", default=",".join(CURVES))
    parser.add_argument("--lengths", default="16,32,96,256")
    parser.add_argument("--contexts", default="0", help="tokens before the answers")
    parser.add_argument("--starts", default=",".join(STARTS))
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--cold", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name, known in (("curves", [m.name for m in MACHINES]), ("starts", STARTS)):
        given = getattr(options, name).split(",")
        wrong = [g for g in given if g not in known]
        if wrong:
            parser.error(f"--{name} knows no {wrong[0]!r}; there are {', '.join(known)}")
        setattr(options, name, given)
    for name, kind in (("lengths", int), ("contexts", int), ("temperatures", float)):
        try:
            setattr(options, name, [kind(n) for n in getattr(options, name).split(",")])
        except ValueError:
            parser.error(f"--{name} takes numbers with commas between them")
    if not options.traces.is_file():
        parser.error(f"--traces: there is no file {options.traces}")
    for name in ("count", "rows", "tokens", "prompts", "jobs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if min(options.lengths) < 1 or min(options.contexts) < 0:
        parser.error("--lengths are at least 1, and --contexts at least 0")
    return options


def _run(work: Any, jobs: list[tuple[Any, ...]], num: int) -> list[Any]:
    if num == 1:
        return [cell for job in jobs for cell in work(job)]
    with ProcessPoolExecutor(num) as pool:
        return [cell for cells in pool.map(work, jobs) for cell in cells]


def _job(job: tuple[Any, ...]) -> list[Cell]:
    path, model, length, contexts, curves, count, starts = job
    traces = read_traces(path, of=model)
    workloads = {k: traces[k] for k in KINDS if k in traces}
    machines = [m for m in MACHINES if m.name in curves]
    return run_cells(workloads, length, machines, count=count, starts=starts, contexts=contexts)


def _group_job(job: tuple[Any, ...]) -> list[GroupCell]:
    path, model, names, num_rows, curves, count = job
    traces = read_traces(path, of=model)
    machines = [m for m in MACHINES if m.name in curves]
    return run_group_cells([traces[n] for n in names if n in traces], num_rows, machines, count=count)


def run_engine(curve: str, options: argparse.Namespace) -> list[list[Any]]:
    """Rows of the table of the real engine on one curve: the best fixed setting, policy auto by start, and the best in hindsight."""
    from simulation.engine_clock import SETTINGS, SimulatedEngine, fixed_spec

    from mlxspec import load
    from mlxspec.config import EngineConfig, SpecConfig

    prompts = json.loads((ROOT / "scripts" / "bench_policy.json").read_text(encoding="utf-8"))["demo"]
    texts = [p["text"] for p in prompts[: options.prompts]]
    machine = next(m for m in MACHINES if m.name == curve)
    engine = load("demo", draft=DRAFTERS, config=EngineConfig(prefix_budget=0, past_texts=0))
    simulated, auto, rows = SimulatedEngine(engine, machine), replace(engine.spec, policy="auto"), []
    for temperature in options.temperatures:

        def answers(
            spec: SpecConfig, seed: int = 0, *, is_cold: bool = False, heat: float = temperature
        ) -> list[Any]:
            found = []
            for i, text in enumerate(texts):
                if is_cold:
                    simulated.restart()
                found.append(
                    simulated.answer(text, spec, tokens=options.tokens, temperature=heat, seed=seed + i)
                )
            return found

        simulated.cold = 0.0
        fixed = {
            n: answers(SpecConfig() if s is None else fixed_spec(engine, *s)) for n, s in SETTINGS.items()
        }
        off = fixed["off"]
        best = [min(fixed[n][i].seconds for n in fixed) for i in range(len(texts))]
        over = {
            n: statistics.mean(o.seconds / a.seconds for o, a in zip(off, fixed[n], strict=True))
            for n in fixed
        }
        one = max(over, key=lambda n: over[n])
        simulated.cold = options.cold
        simulated.restart()
        answers(auto, seed=1000)
        warm = answers(auto)
        cold = answers(auto, is_cold=True)
        for name, some in ((f"best fixed: {one}", fixed[one]), ("auto, warm", warm), ("auto, cold", cold)):
            ratios = [o.seconds / a.seconds for o, a in zip(off, some, strict=True)]
            rows.append(
                [
                    curve,
                    f"{temperature:g}",
                    name,
                    f"{statistics.mean(ratios):.3f}",
                    f"{min(ratios):.3f}",
                    f"{statistics.mean(b / a.seconds for b, a in zip(best, some, strict=True)):.3f}",
                    f"{statistics.mean(len(a.tokens) / len(a.widths) for a in some):.2f}",
                    f"{sum(a.tokens == o.tokens for a, o in zip(some, off, strict=True))} of {len(off)}",
                ]
            )
    return rows


def _print_cells(cells: list[Cell]) -> None:
    rows = [
        [
            c.machine,
            str(c.length),
            str(c.context),
            c.start,
            *(f"{x:.3f}" for x in (c.over_plain, c.worst, c.over_best, c.over_kind, c.hindsight)),
            f"{c.per_round:.2f}",
        ]
        for c in cells
    ]
    _print_table(
        [
            "curve",
            "tokens",
            "context",
            "start",
            "over plain",
            "worst",
            "over best",
            "over kind",
            "best over plain",
            "tokens a round",
        ],
        rows,
    )
    print()
    means = []
    for length in dict.fromkeys(c.length for c in cells):
        for start in dict.fromkeys(c.start for c in cells):
            some = [c for c in cells if (c.length, c.start) == (length, start)]
            numbers = [
                statistics.mean(getattr(c, n) for c in some) for n in ("over_plain", "over_best", "over_kind")
            ]
            means.append(
                [str(length), start, *(f"{x:.3f}" for x in numbers), f"{min(c.worst for c in some):.3f}"]
            )
    _print_table(["tokens", "start", "over plain", "over best", "over kind", "worst"], means)


def _print_groups(cells: list[GroupCell]) -> None:
    rows = [
        [c.machine, c.workload, str(c.num_rows), c.start, f"{c.over_plain:.3f}", f"{c.slowest:.3f}"]
        for c in sorted(cells, key=lambda c: [m.name for m in MACHINES].index(c.machine))
    ]
    _print_table(["curve", "text", "rows", "start", "over plain", "slowest 5 %"], rows)


def _print_table(heads: list[str], rows: list[list[Any]]) -> None:
    for row in (heads, ["---"] * len(heads), *rows):
        print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
