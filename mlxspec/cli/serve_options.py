"""The options that only `mlxspec serve` has. Knows flags and argparse; the rest are the words of every command (options.py)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from mlxspec.cli.parser import number, numbers, size
from mlxspec.config import shown
from mlxspec.errors import ConfigError
from mlxspec.server.limits import KINDS, ServerLimits

MAX_TOKENS = 4096
FLAGS = {
    "host": "--host",
    "port": "--port",
    "idle_unload": "--idle-unload",
}
BUDGETS = {"memory_budget": "--memory-budget", "prefix_budget": "--prefix-budget"}  # of an EngineConfig


def add(parser: argparse.ArgumentParser) -> None:
    """The groups `server`, `rows` and `memory`."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on (default 127.0.0.1: this machine alone); others need a key",
    )
    group.add_argument(
        "--port",
        type=number("--port", int),
        default=8080,
        metavar="N",
        help="port to listen on, 0 for any that is free (default 8080)",
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help="what clients must send, @FILE to read it from a file (default: the environment's MLXSPEC_API_KEY)",
    )
    group.add_argument(
        "--allowed-origins",
        action="append",
        metavar="ORIGIN",
        help="an origin beside this machine's that may call, like https://example.com or chrome-extension://ID; may be given again",
    )
    group.add_argument(
        "--allowed-hosts",
        action="append",
        metavar="NAME",
        help="a name beside localhost under which this machine is asked; may be given again",
    )
    numbers(group)(
        "--idle-unload",
        float,
        "SECONDS",
        "free the memory after so long without a request; the next one loads again (default: never)",
    )
    group.add_argument(
        "--limit",
        action="append",
        metavar="NAME=VALUE",
        help="how much work a client may cause, like max_grammar=256K or header_seconds=5; may be given again; GET /limits lists all names",
    )
    rows = parser.add_argument_group("rows")
    add = numbers(rows)
    add("--max-rows", int, "N", "answers that grow side by side (default 8)")
    add("--prefill-chunk", int, "N", "tokens of prompts that are read between two rounds (default 512)")
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--memory-budget",
        type=size("--memory-budget"),
        metavar="SIZE",
        help="what it may take in all, weights included, like 800M or 6G (default: what this machine gives)",
    )
    memory.add_argument(
        "--prefix-budget",
        type=size("--prefix-budget"),
        metavar="SIZE",
        help="of that, what is kept for prompts that begin like earlier texts; 0 keeps nothing (default: a share)",
    )


def limits(given: Sequence[str]) -> ServerLimits:
    """Those of `--limit NAME=VALUE`. Raises ConfigError."""
    found: dict[str, Any] = {}
    for text in given:
        name, _, value = text.partition("=")
        kind = KINDS.get(name.replace("-", "_"))
        if kind is None:
            raise ConfigError(f"--limit knows no {shown(name)}; it knows {', '.join(KINDS)}.")
        try:
            parse = size("--limit") if kind == "bytes" else float if kind == "seconds" else int
            found[name.replace("-", "_")] = parse(value)
        except ValueError as error:
            raise ConfigError(f"--limit {name} needs a number, not {shown(value)}.") from error
    return ServerLimits(**found)
