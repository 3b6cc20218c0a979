"""`mlxspec bench mtp`: the ten tasks of llama.cpp's MTP benchmark, its columns and its summary.

Knows options and output; the tasks and what asks them are mlxspec.bench.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from mlxspec.cli import options, terminal
from mlxspec.config import check_number
from mlxspec.errors import ConfigError

if TYPE_CHECKING:
    from mlxspec.bench.mtp import Ask, Row

_OTHERS = ("workloads", "items", "rows", "repeat", "plot")


def run(args: argparse.Namespace) -> int:
    """Ask all ten. Returns 0."""
    check_number("--max-tokens", args.max_tokens, 2, 4096, integer=True)
    defaults = options.parse(["bench"])
    _refuse(args, defaults, _OTHERS, "is for recorded prompts; `bench mtp` has prompts of its own")
    from mlxspec.bench import mtp
    from mlxspec.bench.tasks import TASKS

    def told(row: Row) -> None:
        if not args.json:
            terminal.say(line(row) + "\n")

    report = mtp.run(TASKS, _ask(args), args.max_tokens, told)
    aggregate = report.aggregate()
    if args.json:
        rows = [asdict(r) | {"rate": r.rate} for r in report.rows]
        terminal.say(json.dumps({"tasks": rows, "aggregate": aggregate}) + "\n")
    else:
        terminal.say(f"\nAggregate: {json.dumps(aggregate, indent=2)}\n")
    return 0


def line(row: Row) -> str:
    """`  code_python        pred= 192 draft= 153 acc= 140 rate=0.915 tok/s=103.2`"""
    rate = "    -" if row.rate is None else f"{row.rate:.3f}"
    return f"  {row.task:<17s}  pred={row.predicted:4d} draft={row.drafted:4d} acc={row.accepted:4d} rate={rate} tok/s={row.speed:.1f}"


def _ask(args: argparse.Namespace) -> Ask:
    from mlxspec.bench import mtp
    from mlxspec.platform import device

    args.policy = args.policy or "fixed"  # how much of what is drafted stands is the question
    spec = options.spec_config(args)
    device.compile_kernels()  # what is measured is worth waiting for
    engine = options.load_engine(args, spec)
    engine.chat([{"role": "user", "content": "Say yes."}])  # what runs first compiles
    return mtp.in_process(engine, engine.spec)


def _refuse(args: argparse.Namespace, defaults: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(args, name) != getattr(defaults, name):
            raise ConfigError(f"--{name.replace('_', '-')} {why}.")
