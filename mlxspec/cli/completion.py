"""`mlxspec completion`: prints a script that completes commands, options and their values in a shell. shtab writes the script."""

from __future__ import annotations

import argparse

import shtab

from mlxspec.cli import options, terminal
from mlxspec.cli.parser import CommandParser, choice, declare

SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", type=choice("SHELL", SHELLS), help=", ".join(SHELLS))
    declare(parser, options.DEBUG)


def run(args: argparse.Namespace) -> int:
    """Print the completion script of a shell. Returns 0."""
    terminal.say(shtab.complete(whole_parser(), args.shell) + "\n")
    return 0


def whole_parser() -> CommandParser:
    """Return a parser of all commands with all their options, with the choices of values that completion scripts need."""
    parser = CommandParser(prog="mlxspec")
    commands = parser.add_subparsers(dest="command")
    for name, about in options.COMMANDS.items():
        command = commands.add_parser(name, help=about)
        options.builder(name)(command)
        for action in command._actions:
            known = getattr(action.type, "choices", None)
            if action.dest in ("model", "source"):
                known = options.DEMO_FAMILY
            if known is not None:
                action.choices = known
            elif action.nargs != 0:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser
