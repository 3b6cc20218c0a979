"""`mlxspec run`: fetches a model unless it is on this disk, and begins a conversation; without a name, lists the models that fit this
machine.

Knows options; pull.py fetches, chat.py talks.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout

from mlxspec.cli import chat, options, pull, terminal
from mlxspec.cli.table import print_table


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="MODEL", help=options.MODEL)
    chat.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Fetch the model unless it is on this disk, and hold a conversation; without a model, list those that fit. Returns the exit code."""
    if args.name is not None:
        args.model = args.name
    elif args.model == options.DEMO and not any(word.startswith(("-m", "--model")) for word in args.given):
        return _list()
    options.spec_config(args)
    options.sampling_params(args)
    options.engine_config(args)
    fetch_absent(args)
    return chat.run(args)


def _list() -> int:
    """Print the models with short names that fit this machine, what drafts for each, and how fast each was here where that was measured.
    Returns 0."""
    from mlxspec.checkpoints.fitting import fitting
    from mlxspec.engine.measured import measured
    from mlxspec.loading.progress import amount
    from mlxspec.platform.memory import machine_memory

    fits = fitting(machine_memory())
    rows = [(m.name, amount(m.size), m.drafter, m.repo) for m in fits]
    print_table(("model", "download", "who drafts", "from"), rows, right=(1,))
    for name, said in ((m.name, measured(m.repo)) for m in fits):
        if said:
            terminal.note(f"{name} {said}.")
    terminal.note(
        "MTP head: a part of the model that drafts. Lookups: what the text has said before. Others are small models made to draft for one."
    )
    terminal.note("`mlxspec run NAME` fetches one and chats; `mlxspec run demo` needs no download.")
    return 0


def fetch_absent(args: argparse.Namespace) -> None:
    """Fetch the model of `args` as `mlxspec pull` does, unless it is a folder or in the cache. Raises MlxspecError."""
    from mlxspec.loading import hub

    if hub.is_local(args.model) or hub.cached(args.model, args.revision) is not None:
        return
    given = [args.model] if args.revision is None else [args.model, f"--revision={args.revision}"]
    with redirect_stdout(sys.stderr):  # answers alone go to stdout
        pull.run(options.parser_of("pull").parse_args(given))
