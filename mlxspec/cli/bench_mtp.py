"""`mlxspec bench mtp`: the ten tasks of llama.cpp's MTP benchmark, its columns and its summary, in this process or against a server.

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

# What a server decides for itself, and what is not about these tasks.
_SERVERS: tuple[str, ...] = ("draft", "policy", "draft_model", "draft_max", "draft_min")
_SERVERS += (
    "draft_p_min",
    "ngram_n",
    "ngram_m",
    "max_context",
    "dtype",
    "exact",
    "rollback",
    "trace",
    "revision",
)
_OTHERS = ("workloads", "items", "rows", "repeat", "plot")


def run(args: argparse.Namespace) -> int:
    """Ask all ten. Returns 0."""
    check_number("--max-tokens", args.max_tokens, 2, 4096, integer=True)
    defaults = options.parse(["bench"])
    _refuse(args, defaults, _OTHERS, "is for recorded prompts; `bench mtp` has prompts of its own")
    if args.url is not None:
        _refuse(args, defaults, _SERVERS, "is for the server to decide; leave it out with --url")
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
    drafted = "   -" if row.drafted is None else f"{row.drafted:4d}"
    accepted = "   -" if row.accepted is None else f"{row.accepted:4d}"
    rate = "    -" if row.rate is None else f"{row.rate:.3f}"
    return f"  {row.task:<17s}  pred={row.predicted:4d} draft={drafted} acc={accepted} rate={rate} tok/s={row.speed:.1f}"


def _ask(args: argparse.Namespace) -> Ask:
    from mlxspec.bench import mtp

    if args.url is not None:
        return mtp.over_http(args.url, None if args.model == options.DEMO else args.model)
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
