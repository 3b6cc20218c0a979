"""`mlxspec bench`: recorded workloads with drafting and without, taking turns in one run; a speed-up only where the texts are the same.

Knows options and output; runs and comparison are mlxspec.bench.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxspec.cli import options, stats_line, terminal
from mlxspec.cli.parser import declare, near
from mlxspec.cli.progress_bar import Waiting
from mlxspec.errors import ConfigError
from mlxspec.option import check_number

if TYPE_CHECKING:
    from mlxspec.bench.bench import WorkloadOutcome

_NAME_WIDTH = 16  # the longest of the ten tasks


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_drafting(parser)
    declare(
        parser,
        (
            "--workloads",
            str,
            "LIST",
            "which recorded prompts, separated by commas (default: all); mtp: ten tasks like those of llama.cpp's MTP benchmark",
        ),
        ("--items", int, "N", "at most N prompts of each (default 1000)", 1000),
        ("--rows", int, "N", "prompts answered together (default 1)", 1),
        ("--repeat", int, "N", "measured pairs of each (default 3)", 3),
        ("--max-tokens", int, "N", "longest answer in tokens (default 192)", 192),
        (
            "--plot",
            str,
            "FILE",
            "draw speeds by kind of prompt, acceptance by position, one answer's rounds (.png, .svg, .pdf)",
        ),
        options.JSON,
    )
    options.add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0 only if every text was the same, else 1."""
    check_number("--max-tokens", args.max_tokens, 2, 4096, integer=True)
    check_number("--repeat", args.repeat, 1, 100, integer=True)
    check_number("--rows", args.rows, 1, 64, integer=True)
    check_number("--items", args.items, 1, 1000, integer=True)
    from mlxspec.bench.workloads import MTP
    from mlxspec.demo import WORKLOADS

    known = (*WORKLOADS, MTP)
    names = args.workloads.split(",") if args.workloads is not None else list(WORKLOADS)
    unknown = [n for n in names if n not in known]
    if unknown:
        tip = near(unknown[0], known) or f"there are: {', '.join(known)}."
        raise ConfigError(f"There is no workload {unknown[0]!r}; {tip}")
    if args.plot is not None:
        from mlxspec.bench import plots

        plots.check(Path(args.plot))
    args.policy = args.policy or "auto"  # what there is to prove
    from mlxspec.platform import device

    device.compile_kernels()  # what is measured is worth waiting for
    engine = options.load_engine(args, options.spec_config(args))
    if not engine.spec.drafters:
        raise ConfigError(
            "The benchmark compares drafting with plain decoding; --draft off leaves nothing to compare."
        )
    from mlxspec.bench.bench import run_workload, time_rounds
    from mlxspec.bench.workloads import read_workloads

    outcomes = []
    for workload in read_workloads(engine, names):
        with Waiting(f"measuring {workload.name}", is_long=True):
            outcome = run_workload(
                engine,
                replace(workload, prompts=workload.prompts[: args.items]),
                engine.spec,
                num_rows=args.rows,
                repeat=args.repeat,
                max_tokens=args.max_tokens,
            )
        outcomes.append(outcome)
        if not args.json:
            terminal.say(line(outcome) + "\n")
    if args.plot is not None:
        first = read_workloads(engine, names)[0]
        title = f"{engine.name}, drafting off and {engine.spec.policy}, {stats_line.computer()}"
        rounds = time_rounds(engine, first.prompts[0], engine.spec, args.max_tokens)
        plots.draw_bench(Path(args.plot), title, outcomes, rounds)
    if args.json:
        data = {
            "model": engine.name,
            "spec": asdict(engine.spec),
            "workloads": [_data(o) for o in outcomes],
            "device": stats_line.device_data(),
        }
        terminal.say(json.dumps(data) + "\n")
    else:
        terminal.note(
            f"drafting {engine.spec.policy}: {', '.join(engine.spec.drafters)} · {stats_line.machine()}"
        )
    return 0 if all(o.is_same for o in outcomes) else 1


def _data(outcome: WorkloadOutcome) -> dict[str, Any]:
    """For JSON."""
    speeds = {name: getattr(outcome, name) for name in ("speedup", "plain_speed", "decode_speed")}
    return asdict(outcome) | speeds


def line(outcome: WorkloadOutcome) -> str:
    """`edit             1.92x plain (0.98x to 3.10x)  310 -> 590 tok/s, 2.71 tokens a round, ngram-simple 310/402`"""
    begin = f"{outcome.workload:{_NAME_WIDTH}s} "
    if not outcome.is_same:
        return f"{begin}{outcome.num_different} texts differ from plain decoding: no speed-up to tell."
    if outcome.speedup is None:
        return f"{begin}nothing was decoded."
    used = (
        ", ".join(
            f"{n} {accepted}/{drafted}" for n, (drafted, accepted) in outcome.drafted.items() if drafted
        )
        or "nothing drafted"
    )
    return (
        f"{begin}{outcome.speedup:.2f}x plain ({min(outcome.pairs):.2f}x to {max(outcome.pairs):.2f}x)  "
        f"{outcome.plain_speed:.0f} -> {outcome.decode_speed:.0f} tok/s, {outcome.tokens_per_round:.2f} tokens a round, {used}"
    )
