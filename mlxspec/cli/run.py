"""`mlxspec run`: a model is fetched if it is not here, and a conversation begins; without a name, which models fit this machine.

Knows options; pull.py fetches, chat.py talks.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout

from mlxspec.cli import chat, options, pull, terminal
from mlxspec.cli.table import print_table

_ROOM = 1.3  # memory over weights: a few thousand tokens of context and a drafter


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="MODEL", help=options.MODEL)
    chat.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Fetch, with the questions of pull, and chat; or list what there is to fetch."""
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
    """Models with short names whose weights fit, those with a head of their own and the largest first, and what drafts for them."""
    from mlxspec.checkpoints.catalogue import catalogue
    from mlxspec.loading.short_names import short_names
    from mlxspec.platform.memory import machine_memory

    machine = machine_memory()
    rows = []
    for known in sorted(short_names(), key=lambda k: (k.head, k.gb), reverse=True):
        if known.gb * 1e9 * _ROOM > machine:
            continue
        base = known.repo.partition("/")[2].removesuffix("-4bit").removesuffix("-it").lower()
        beside = [
            d
            for d in catalogue()
            if any(t.partition("/")[2].removesuffix("-it").lower() == base for t in d.targets)
        ]
        drafter = (
            "its MTP head" if known.head else f"{beside[0].kind}, {beside[0].repo}" if beside else "lookups"
        )
        rows.append((known.name, f"{known.gb:.1f} GB", drafter, known.repo))
    print_table(("model", "download", "who drafts", "from"), rows, right=(1,))
    terminal.note("`mlxspec run NAME` fetches one and chats; `mlxspec run demo` needs no download.")
    return 0


def fetch_absent(args: argparse.Namespace) -> None:
    """Fetch the model as `mlxspec pull` does if neither a folder nor the cache holds it. Raises MlxspecError subclasses."""
    from mlxspec.loading import hub

    if hub.is_local(args.model) or hub.cached(args.model, args.revision) is not None:
        return
    given = [args.model] if args.revision is None else [args.model, f"--revision={args.revision}"]
    with redirect_stdout(sys.stderr):  # answers alone go to stdout
        pull.run(options.parser_of("pull").parse_args(given))
