"""`mlxspec run`: a model is fetched if it is not here, and a conversation begins. Knows options; pull.py fetches, chat.py talks."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout

from mlxspec.cli import chat, options, pull


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="MODEL", help=options.MODEL)
    chat.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Fetch, with the questions of pull, and chat."""
    if args.name is not None:
        args.model = args.name
    options.spec_config(args)
    options.sampling_params(args)
    options.engine_config(args)
    fetch_absent(args)
    return chat.run(args)


def fetch_absent(args: argparse.Namespace) -> None:
    """Fetch the model as `mlxspec pull` does if neither a folder nor the cache holds it. Raises MlxspecError subclasses."""
    from mlxspec.loading import hub

    if hub.is_local(args.model) or hub.cached(args.model, args.revision) is not None:
        return
    given = [args.model] if args.revision is None else [args.model, f"--revision={args.revision}"]
    with redirect_stdout(sys.stderr):  # answers alone go to stdout
        pull.run(options.parser_of("pull").parse_args(given))
