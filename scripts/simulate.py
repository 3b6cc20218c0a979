#!/usr/bin/env python3
"""How long recorded answers would take under every policy on machines that are not here: the table of docs/never-slower.md.

    scripts/simulate [--traces FILE] [--requests 200] [--curves NAMES] [--workloads NAMES] [--lengths 256,1024] [--jobs N]
                     [--drafters NAMES] [--fixed] [--rows 1] [--json FILE] [--alone] [--like NAME=NAME]
                     [--rates NAME=94:86:77]

A cell is a curve, a workload, a length in tokens, and whether the controller begins knowing nothing (cold) or after as many other
requests (warm). Ratios are total decode times: above 1 is faster than plain decoding. --fixed adds a line for every fixed depth.
--rows above 1: groups of so many recorded answers that decode together, each as long as it is (--lengths does not count), of one
workload and of all mixed. --alone: the controller with all of --drafters beside the controller with the lookups and one of those that run a
model. --like dflash=mtp, with --alone: the first says what the second said, seven tokens at most, so that costs alone tell them apart.
--rates mtp=94:86:77, with --alone, once for each drafter: accepted as a card says, in so many percent of rounds one token at least, two,
and three.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from simulation.machines import MACHINES
from simulation.report import (
    DRAFTERS,
    Cell,
    GroupCell,
    auto_over_plain,
    run_cells,
    run_group_cells,
    worst,
)
from simulation.requests import MODELS
from simulation.traces import read_traces, said_alike, said_by_rates

TRACES = Path(__file__).resolve().parent.parent / "tests" / "policy" / "traces.npz"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--curves", default=",".join(m.name for m in MACHINES))
    parser.add_argument("--workloads")
    parser.add_argument("--lengths", default="256,1024")
    parser.add_argument("--drafters", default=",".join(DRAFTERS))
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--like", default="")
    parser.add_argument("--rates", action="append", default=[])
    options = parser.parse_args()
    _check(parser, options)
    names = options.workloads.split(",") if options.workloads else list(read_traces(options.traces))
    machines = [m for m in MACHINES if m.name in options.curves.split(",")]
    lengths = [int(n) for n in options.lengths.split(",")]
    drafters = options.drafters.split(",")
    if options.alone:
        settings = [
            (
                options.traces,
                options.like,
                _rates(options),
                name,
                length,
                machines,
                options.requests,
                drafters,
            )
            for name in names
            for length in lengths
        ]
        with ProcessPoolExecutor(options.jobs) as pool:
            _print_alone([line for found in pool.map(_alone_job, settings) for line in found])
        return
    if options.rows > 1:
        groups = [
            (options.traces, which, options.rows, machines, options.requests, drafters)
            for which in [*([n] for n in names), names]
        ]
        with ProcessPoolExecutor(options.jobs) as pool:
            _print_groups([cell for found in pool.map(_group_job, groups) for cell in found])
        return
    jobs = [
        (options.traces, name, length, machines, options.requests, drafters)
        for name in names
        for length in lengths
    ]
    with ProcessPoolExecutor(options.jobs) as pool:
        cells: list[Cell] = []
        for found in pool.map(_job, jobs):
            cells += found
            if options.json:  # as far as it is: all of them take long
                options.json.write_text(json.dumps([asdict(c) for c in cells], indent=1))
    _print(cells, options.fixed)


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exits 2 with one sentence for what cannot be simulated."""
    for name in ("rows", "requests", "jobs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.rows > 1 and (options.fixed or options.json):
        parser.error("--fixed and --json are for one row")
    if options.alone and not set(options.drafters.split(",")) & set(MODELS):
        parser.error("--alone needs --drafters of which one runs a model")
    if not options.traces.is_file():
        parser.error(f"there is no file {options.traces}")
    rates = _rates(options)
    if rates and not (options.alone and set(rates) <= set(MODELS) and all(map(_falls, rates.values()))):
        parser.error(
            "--rates goes with --alone and takes NAME=94:86:77, falling percents of a drafter that runs a model"
        )
    traces = read_traces(options.traces)
    known = {
        "curves": [m.name for m in MACHINES],
        "workloads": list(traces),
        "drafters": list(dict.fromkeys(n for w in traces.values() for a in w.answers for n in a)),
    }
    for option, names in known.items():
        if option == "drafters":
            names += [options.like.split("=")[0]] * bool(options.like) + list(_rates(options))
        wrong = [n for n in (getattr(options, option) or "").split(",") if n and n not in names]
        if wrong:
            parser.error(f"--{option} knows no {wrong[0]!r}; there are {', '.join(names)}")
    pair = options.like.split("=")
    fits = options.alone and len(pair) == 2 and pair[0] in MODELS and pair[1] in known["drafters"]
    if options.like and not fits:
        parser.error("--like goes with --alone and takes NAME=NAME, the second of a drafter in the traces")
    if not all(n.isdigit() and int(n) > 0 for n in options.lengths.split(",")):
        parser.error("--lengths are numbers of tokens with commas between them")


def _rates(options: argparse.Namespace) -> dict[str, list[float]]:
    """By drafter; without any numbers where there are none to read."""
    found = {}
    for given in options.rates:
        name, _, percents = given.partition("=")
        numbers = percents.split(":")
        found[name] = [int(n) / 100 for n in numbers] if all(n.isdecimal() for n in numbers) else []
    return found


def _falls(shares: list[float]) -> bool:
    return bool(shares) and all(1 >= a >= b > 0 for a, b in pairwise([1.0, *shares]))


def _job(job):  # type: ignore[no-untyped-def]
    path, name, length, machines, count, drafters = job
    return run_cells(read_traces(path)[name], length, machines, count=count, drafters=drafters)


def _alone_job(setting):  # type: ignore[no-untyped-def]
    """Per cell: its name, speed over plain decoding with all drafters, and with the lookups and each that runs a model."""
    path, like, rates, name, length, machines, count, drafters = setting
    workload = read_traces(path)[name]
    if like:
        workload = said_alike(workload, *like.split("="))
    if rates:
        workload = said_by_rates(workload, rates)
    lookups = [d for d in drafters if d not in MODELS]
    sets = {d: [*lookups, d] for d in drafters if d in MODELS}

    def ratios(some: list[str]) -> dict[str, float]:
        return auto_over_plain(workload, length, machines, count=count, drafters=some)

    every, single = ratios(drafters), {d: ratios(some) for d, some in sets.items()}
    return [
        (f"{cell}, {length}", ratio, {d: r[cell] for d, r in single.items()}) for cell, ratio in every.items()
    ]


def _print_alone(lines: list[tuple[str, float, dict[str, float]]]) -> None:
    names = list(lines[0][2])
    print("| curve, workload, start, tokens | all |", " | ".join(names), "| all / best alone |")
    print("|---|---|", "---|" * len(names), "---|", sep="")
    for cell, ratio, single in lines:
        each = " | ".join(f"{single[n]:.3f}" for n in names)
        print(f"| {cell} | {ratio:.3f} | {each} | {ratio / max(single.values()):.3f} |")
    worst_cell, ratio, single = min(lines, key=lambda line: line[1] / max(line[2].values()))
    print(f"\nworst: {ratio / max(single.values()):.3f} ({worst_cell})")


def _group_job(job):  # type: ignore[no-untyped-def]
    path, names, num_rows, machines, count, drafters = job
    known = read_traces(path)
    return run_group_cells([known[n] for n in names], num_rows, machines, count=count, drafters=drafters)


def _print_groups(cells: list[GroupCell]) -> None:
    print("| curve | workload | rows | start | auto / plain | slowest 5 % |")
    print("|---|---|---|---|---|---|")
    for c in sorted(cells, key=lambda c: [m.name for m in MACHINES].index(c.machine)):
        print(
            f"| {c.machine} | {c.workload} | {c.num_rows} | {c.start} | {c.over_plain:.3f} | {c.slowest:.3f} |"
        )


def _print(cells: list[Cell], fixed: bool) -> None:
    print(
        "| curve | workload | tokens | start | auto / plain | slowest 5 % | auto / best fixed | best fixed | first | longest | oracle |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for c in cells:
        print(
            f"| {c.machine} | {c.workload} | {c.length} | {c.start} | {c.over_plain:.3f} | {c.slowest:.3f} | {c.over_best:.3f} "
            f"| {c.best[0]} {c.best[1]}: {c.best_over_plain:.2f} | {c.first:.2f} | {c.longest:.2f} | {c.oracle:.2f} |"
        )
        if fixed:
            print("  " + ", ".join(f"{k} {v:.2f}" for k, v in c.fixed.items()))
    for start in ("cold", "warm"):
        print(f"\nworst, {start}: {worst(cells, start)}")


if __name__ == "__main__":
    main()
