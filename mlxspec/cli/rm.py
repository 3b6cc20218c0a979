"""`mlxspec rm`: removes a model from the local cache, after the user has confirmed it."""

from __future__ import annotations

import argparse
import sys

from mlxspec.cli import options, terminal
from mlxspec.errors import ConfigError


def run(args: argparse.Namespace) -> int:
    """Ask for confirmation, remove a model from the cache and print what was freed. Returns 0, or 1 where the user declines."""
    from mlxspec.checkpoints.cache import removal
    from mlxspec.loading.progress import amount
    from mlxspec.loading.short_names import repository

    if args.repo in options.DEMO_FAMILY:
        raise ConfigError(f"{args.repo} comes with mlxspec and stays.")
    wanted = removal(repository(args.repo), args.revision)
    what = f"{wanted.name} ({', '.join(r[:12] for r in wanted.revisions)}), {amount(wanted.freed)}"
    if not (args.yes or _is_confirmed(what)):
        terminal.say("Nothing was removed.\n")
        return 1
    wanted.execute()
    terminal.say(f"Removed {wanted.name}: {amount(wanted.freed)} freed.\n")
    return 0


def _is_confirmed(what: str) -> bool:
    """Ask at the terminal whether to remove a model, and return the answer. what: the model, for the question. Raises ConfigError where
    stdin is no terminal."""
    if not terminal.is_terminal(sys.stdin):
        raise ConfigError(f"Removing {what} must be confirmed: run it in a terminal, or add --yes.")
    terminal.say(f"Remove {what}? [y/N] ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
