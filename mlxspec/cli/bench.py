"""`mlxspec bench`: measures recorded workloads with drafting and without, in turns in one run. A speed-up is reported only where the texts
are the same.

Knows options and output; runs and comparison are mlxspec.bench.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mlxspec.cli import options, stats_line, terminal
from mlxspec.cli.parser import declare
from mlxspec.cli.progress_bar import Waiting
from mlxspec.config import SamplingParams
from mlxspec.errors import ConfigError
from mlxspec.option import check_number, near

if TYPE_CHECKING:
    from mlxspec.bench.turns import Score

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
        (
            "--prompt",
            str,
            "LENGTHS",
            "instead: how fast prompts of so many tokens are read, such as 512,4096",
        ),
        (
            "--beside-mlx-lm",
            bool,
            "",
            "with --prompt: plain mlx-lm reads them too, behind us, from the same folder",
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
    """Run the benchmark and print its figures. Returns 0 where every text is the same as in plain decoding, else 1."""
    check_number("--max-tokens", args.max_tokens, 2, 4096, integer=True)
    check_number("--repeat", args.repeat, 1, 100, integer=True)
    check_number("--rows", args.rows, 1, 64, integer=True)
    check_number("--items", args.items, 1, 1000, integer=True)
    if args.prompt is not None:
        return _read_prompts(args)
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
    options.compile_kernels()
    engine = options.load_engine(args, options.spec_config(args))
    if not engine.spec.drafters:
        raise ConfigError(
            "The benchmark compares drafting with plain decoding; --draft off leaves nothing to compare."
        )
    from mlxspec.bench.answer_rounds import time_rounds
    from mlxspec.bench.turns import Contestant, compare
    from mlxspec.bench.workloads import read_workloads

    workloads, scores = read_workloads(engine, names), []
    for workload in workloads:
        prompts = list(workload.prompts[: args.items])
        groups = [prompts[i : i + args.rows] for i in range(0, len(prompts), args.rows)]
        params = SamplingParams(max_tokens=args.max_tokens, temperature=workload.temperature, seed=0)
        auto = Contestant(name=workload.name, spec=engine.spec)
        with Waiting(f"measuring {workload.name}", is_long=True):
            _, (score,) = compare(engine, groups, [auto], params, repeat=args.repeat)
        scores.append(score)
        if not args.json:
            terminal.say(line(score) + "\n")
    if args.plot is not None:
        title = f"{engine.name}, drafting off and {engine.spec.policy}, {stats_line.computer()}"
        rounds = time_rounds(engine, workloads[0].prompts[0], engine.spec, args.max_tokens)
        plots.draw_bench(Path(args.plot), title, scores, rounds)
    if args.json:
        data = {
            "model": engine.name,
            "spec": asdict(engine.spec),
            "workloads": [score.data() for score in scores],
            "device": stats_line.device_data(),
        }
        terminal.say(json.dumps(data) + "\n")
    else:
        terminal.note("plain: the baseline, without drafting · tokens a round: the mean acceptance length")
        terminal.note(
            f"drafting {engine.spec.policy}: {', '.join(engine.spec.drafters)} · {stats_line.machine()}"
        )
    return 1 if any(score.num_different for score in scores) else 0


def _read_prompts(args: argparse.Namespace) -> int:
    """Measure and print how fast prompts of the lengths of --prompt are read. Returns 0."""
    if not all(length.isdecimal() for length in args.prompt.split(",")):
        raise ConfigError(f"--prompt takes numbers of tokens such as 512,4096, not {args.prompt!r}.")
    from mlxspec.bench.reading import read
    from mlxspec.loading.hub import resolve
    from mlxspec.loading.progress import amount

    options.compile_kernels()
    engine, lengths = options.load_engine(args, options.spec_config(args)), args.prompt.split(",")
    for length in map(int, lengths):
        check_number("--prompt", length, 2, engine.max_context - 1, integer=True)
    folder = resolve(args.model, revision=args.revision) if args.beside_mlx_lm else None
    with Waiting("reading prompts"):
        found = read(engine, [int(length) for length in lengths], args.repeat, folder)
    if args.json:
        terminal.say(json.dumps({who: [r._asdict() for r in each] for who, each in found.items()}) + "\n")
        return 0
    for who, r in ((who, r) for who, each in found.items() for r in each):
        speed = f"{r.num_tokens / r.seconds:,.0f} tokens/s, peak {amount(r.peak_bytes)}"
        terminal.say(f"{who:{_NAME_WIDTH}s} {r.num_tokens:>7,} tokens  {speed}\n")
    terminal.note(
        f"drafters that read too: {', '.join(engine.spec.drafters) or 'none'} · {stats_line.machine()}"
    )
    return 0


def line(score: Score) -> str:
    """Return the line on one workload: `edit             1.92x (1.78x to 2.03x)  310 -> 590 tok/s, 2.71 tokens a round, ngram-simple
    310/402`"""
    begin = f"{score.name:{_NAME_WIDTH}s} "
    if score.num_different:
        return f"{begin}{score.num_different} texts differ from plain decoding: no speed-up to tell."
    if score.ratio.refusal:
        return f"{begin}no ratio, as {score.ratio.refusal}"
    works = [f"{n} {w.num_accepted}/{w.num_drafted}" for n, w in score.works.items() if w.num_drafted]
    return (
        f"{begin}{score.ratio}  "
        f"{score.plain_speed:.0f} -> {score.decode_speed:.0f} tok/s, {score.tokens_per_round:.2f} tokens a round, "
        f"{', '.join(works) or 'nothing drafted'}"
    )
