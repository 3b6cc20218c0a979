"""The question before something is removed. Knows the terminal and `--yes`."""

from __future__ import annotations

import sys

from mlxspec.cli import terminal
from mlxspec.errors import ConfigError


def confirmed(doing: str, asking: str, what: str, *, yes: bool) -> bool:
    """Whether to go on. doing, asking: "Removing", "Remove". Raises ConfigError where nobody can be asked."""
    if yes:
        return True
    if not terminal.is_terminal(sys.stdin):
        raise ConfigError(f"{doing} {what} must be confirmed: run it in a terminal, or add --yes.")
    terminal.say(f"{asking} {what}? [y/N] ")
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    terminal.say("Nothing was removed.\n")
    return False
