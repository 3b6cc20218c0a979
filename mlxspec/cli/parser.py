"""argparse with our manners: no abbreviations, and every mistake is one sentence with what was probably meant.

Knows words and flags; knows no option of ours.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mlxspec.config import shown
from mlxspec.errors import ConfigError

_LONGEST_NUMBER = 40  # characters


# What people know from mlx-lm and llama.cpp, and what it is called here. Understood wherever a command has the flag.
ALIASES = {
    "-m": "--model",
    "-n": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--predict": "--max-tokens",
    "--temperature": "--temp",
    "--repeat-penalty": "--repetition-penalty",
    "-s": "--seed",
    "-c": "--max-context",
    "--ctx-size": "--max-context",
    "-md": "--draft-model",
    "--model-draft": "--draft-model",
    "--spec-draft-model": "--draft-model",
    "--spec-type": "--draft",
    "--draft-n": "--draft-max",
    "--spec-draft-n-max": "--draft-max",
    "--num-draft-tokens": "--draft-max",
    "--draft-n-min": "--draft-min",
    "--spec-draft-n-min": "--draft-min",
    "--spec-draft-p-min": "--draft-p-min",
}


class CommandParser(argparse.ArgumentParser):
    """argparse whose mistakes are one sentence of ours, and which never guesses an option from its beginning."""

    def __init__(self, **settings: Any) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"allow_abbrev": False, "formatter_class": layout, **settings})

    def error(self, message: str) -> NoReturn:
        missing = re.match(r"argument (\S+): expected (?:one|at least one) argument", message)
        if missing:
            last = missing[1].rsplit("/", 1)[-1]
            raise ConfigError(
                f"{missing[1]} needs a value (one that begins with a dash is written {last}=VALUE)."
            )
        raise ConfigError(f"{message[:1].upper()}{message[1:]}.")


def spelled(arguments: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Arguments with aliases spelled as this command's own flags. A value that begins with a dash stands behind `=`, so none is touched."""
    known = flags(parser)
    out = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        own = ALIASES.get(flag)
        out.append(f"{own}{equals}{value}" if own in known and flag not in known else argument)
    return out


def aliases_of(parser: argparse.ArgumentParser) -> str:
    """Lines for --help, empty where there are none."""
    known = flags(parser)
    found: dict[str, list[str]] = {}
    for alias, own in ALIASES.items():
        if own in known and alias not in known:
            found.setdefault(own, []).append(alias)
    lines = [f"  {own:<21} {', '.join(others)}" for own, others in found.items()]
    return "\n".join(["also understood, as in mlx-lm and llama.cpp:", *lines]) if lines else ""


def flags(parser: argparse.ArgumentParser) -> list[str]:
    """Every option string of a command."""
    return [s for action in parser._actions for s in action.option_strings]


def refuse(extra: str, command: str, parser: argparse.ArgumentParser) -> NoReturn:
    """Raise ConfigError for a word that no option took."""
    if not extra.startswith("-"):
        raise ConfigError(f"{extra!r} belongs to no option; `mlxspec {command} --help` lists the options.")
    flag = extra.split("=", 1)[0]
    known = flags(parser)
    near = [k for k in known if k.startswith(flag)] or difflib.get_close_matches(flag, known, 1)
    tip = (
        f"did you mean {' or '.join(near[:3])}?" if near else f"`mlxspec {command} --help` lists the options."
    )
    raise ConfigError(f"There is no option {flag}; {tip}")


def number(flag: str, kind: type) -> Callable[[str], int | float]:
    """Reads an integer or a number; ConfigError names the flag."""
    noun = "an integer" if kind is int else "a number"

    def read(text: str) -> int | float:
        try:
            if len(text) > _LONGEST_NUMBER:
                raise ConfigError(f"{flag} must be {noun} of at most {_LONGEST_NUMBER} characters.")
            return kind(text)  # type: ignore[no-any-return]
        except ValueError as error:
            raise ConfigError(f"{flag} must be {noun}, not {text!r}.") from error

    return read


def numbers(group: argparse._ActionsContainer) -> Callable[[str, type, str, str], None]:
    """What adds an option that takes a number to `group`: flag, int or float, metavar, help."""

    def add(flag: str, kind: type, metavar: str, text: str) -> None:
        group.add_argument(flag, type=number(flag, kind), metavar=metavar, help=text)

    return add


_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}  # powers of two


def size(flag: str) -> Callable[[str], int]:
    """Reads bytes: digits, and K, M, G or T of 1024; ConfigError names the flag."""

    def read(text: str) -> int:
        found = re.fullmatch(r"([0-9]{1,15})([KMGT]?)(?:iB|B)?", text.strip(), re.IGNORECASE | re.ASCII)
        if found is None:
            raise ConfigError(f"{flag} must be bytes, like 800M or 6G, not {shown(text)}.")
        return int(found[1]) << _UNITS[found[2].upper()]

    return read


def choice(flag: str, choices: Sequence[str]) -> Callable[[str], str]:
    """Reads one of `choices`; ConfigError names the flag."""

    def read(text: str) -> str:
        if text not in choices:
            raise ConfigError(f"{flag} must be one of {', '.join(choices)}, not {text!r}.")
        return text

    return read
