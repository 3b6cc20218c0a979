"""The options that only `mlxspec serve` has. Knows flags and argparse; the rest are the words of every command (options.py)."""

from __future__ import annotations

import argparse

from mlxspec.cli.parser import number, numbers, size

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
