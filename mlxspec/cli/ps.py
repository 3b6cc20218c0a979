"""`mlxspec ps`: lists the models of a server that runs on this machine. launch.py sends it the request."""

from __future__ import annotations

import argparse

from mlxspec.cli import options, terminal
from mlxspec.cli.launch import served_here
from mlxspec.cli.parser import declare
from mlxspec.option import check_number


def add_options(parser: argparse.ArgumentParser) -> None:
    declare(parser, ("--port", int, "N", "the server's port (default 8080)", 8080), options.DEBUG)


def run(args: argparse.Namespace) -> int:
    """Print the models of a running server, one a line. Returns 0, or 1 where no server answers."""
    check_number("--port", args.port, 1, 65535, integer=True)
    from mlxspec.engine.measured import measured

    found = served_here(args.port)
    for name, is_loaded in found or ():
        tried = measured(name)
        where = "in memory" if is_loaded else "loaded when it is asked for"
        terminal.say(f"{name}  {where}{f'  {tried}' if tried else ''}\n")
    if found is None:
        terminal.note(
            f"No server answers on port {args.port}; `mlxspec serve` starts one, and Ctrl-C there ends it."
        )
    return 1 if found is None else 0
