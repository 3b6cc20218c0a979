"""argparse without abbreviated options. A mistake is reported in one sentence, with the option that was probably meant.

Knows words and flags; knows no option of ours.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mlxspec.cli import other_programs
from mlxspec.errors import ConfigError
from mlxspec.option import Option, near, options, shown

_LONGEST_NUMBER = 40  # characters
_LARGEST_FILE = 1 << 20  # bytes of a value that is read from a file


class CommandParser(argparse.ArgumentParser):
    """An argparse parser that does not accept abbreviated options and raises ConfigError with one sentence for a mistake."""

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
        grown = re.match(r"argument (\S+): ignored explicit argument '(.*)'", message)
        if grown and grown[1].startswith("-h"):
            raise ConfigError(f"There is no option -h{grown[2]}.")
        if grown:
            raise ConfigError(f"{grown[1]} takes no value.")
        raise ConfigError(f"{message[:1].upper()}{message[1:]}.")


def declare(group: argparse._ActionsContainer, *rows: tuple[Any, ...]) -> None:
    """Add options to a parser, given as rows of a table: (names, kind, metavar, help, default=None).

    names: "-p --prompt"; errors use the first long one. kind: int, float, str, bool (a switch), list (a text that may be given again),
    `size` (bytes), `text_or_file`, or a tuple of choices.
    """
    for names, kind, metavar, text, *default in rows:
        flags = names.split()
        flag = next((f for f in flags if f.startswith("--")), names)
        settings: dict[str, Any] = {"help": text}
        if kind is bool:
            settings["action"] = "store_true"
        else:
            settings |= {"metavar": metavar, "default": default[0] if default else None}
        if kind is list:
            settings["action"] = "append"
        elif kind in (int, float):
            settings["type"] = number(flag, kind)
        elif kind in (size, text_or_file):
            settings["type"] = kind(flag)
        elif isinstance(kind, tuple):
            settings["type"] = choice(flag, kind)
        group.add_argument(*flags, **settings)


def declare_options(
    group: argparse._ActionsContainer,
    config: type[Any],
    names: str = "",
    defaults: Mapping[str, str] | None = None,
) -> None:
    """Add the options of a config class to a parser. names: fields in the order wanted, separated by blanks; "" for all that have a
    flag. defaults: by field, the default that the help names, where it is not the class's."""
    found = options(config)
    for name in names.split() or found:
        own = found[name]
        if own.flag:
            told = (defaults or {}).get(name) or own.usual
            declare(
                group,
                (
                    own.flag,
                    _kind(own),
                    own.metavar,
                    f"{own.about}{told and f' (default: {told})'}{_more(own)}",
                ),
            )


def _kind(own: Option) -> Any:
    if isinstance(own.kind, tuple):
        return int if isinstance(own.kind[0], int) else own.kind
    return {"bytes": size, "grammar": text_or_file, "schema": text_or_file, Path: str}.get(own.kind, own.kind)


def _more(own: Option) -> str:
    return {list: "; may be given again", "grammar": "; @FILE reads it", "schema": "; @FILE reads it"}.get(
        own.kind, ""
    )


def options_given(args: argparse.Namespace, config: type[Any]) -> dict[str, Any]:
    """Return the options of a config class that were given on the command line, by field of the class."""
    found = {o.name: getattr(args, o.dest, None) for o in options(config).values() if o.flag}
    return {name: value for name, value in found.items() if value is not None}


def aliases_of(parser: argparse.ArgumentParser) -> str:
    """Return lines for the help that list the flags of other programs a command accepts, "" where there are none."""
    known = flags(parser)
    found: dict[str, list[str]] = {}
    for flag, meanings in other_programs.table().items():
        for meant in meanings[:1]:
            if meant.fate == "same" and meant.target in known and flag not in known:
                found.setdefault(meant.target, []).append(flag)
    lines = [f"  {own:<21} {', '.join(others)}" for own, others in found.items()]
    return "\n".join(["also understood, as in llama.cpp, mlx-lm, Ollama and vLLM:", *lines]) if lines else ""


# what help shows of a command that has more than _FEW options
_COMMON = frozenset(
    "--help --prompt --model --system --image --temp --max-tokens --thinking --draft --draft-model --max-context --stats --json --resume "
    "--request --show-thinking --debug --port --host --api-key --max-rows --alias --idle-unload --repeat --workloads --plot "
    "--prompts".split()
)
_FEW = 15


def shorten(parser: argparse.ArgumentParser) -> None:
    """Hide all but the common options in the help of a command with more than _FEW, and add a line on how to see all."""
    own = [a for a in parser._actions if a.option_strings]
    if len(own) <= _FEW:
        return
    for action in own:
        if not _COMMON.intersection(action.option_strings):
            action.help = argparse.SUPPRESS
    parser.epilog = f"`{parser.prog} --help-all` shows all {len(own)} options, and flags of other programs that are understood."


def flags(parser: argparse.ArgumentParser) -> list[str]:
    """Return all flags of a command."""
    return [s for action in parser._actions for s in action.option_strings]


def refuse(extra: str, command: str, parser: argparse.ArgumentParser) -> NoReturn:
    """Raise ConfigError for an argument that the command does not have, with a guess at what was meant. extra: the argument."""
    if not extra.startswith("-"):
        named = "--model names a model, and " if "--model" in flags(parser) else ""
        raise ConfigError(
            f"{shown(extra)} belongs to no option; {named}`mlxspec {command} --help` lists the options."
        )
    flag = extra.split("=", 1)[0]
    known = flags(parser)
    aliases = [alias for alias, own in other_programs.aliases().items() if own in known]
    tip = near(flag, known) or near(flag, aliases) or f"`mlxspec {command} --help` lists the options."
    raise ConfigError(f"There is no option {flag}; {tip}")


def number(flag: str, kind: type) -> Callable[[str], int | float]:
    """Return a function that reads a number of type `kind` from a text. It raises ConfigError, which names `flag`."""
    noun = "an integer" if kind is int else "a number"

    def read(text: str) -> int | float:
        try:
            if len(text) > _LONGEST_NUMBER:
                raise ConfigError(f"{flag} must be {noun} of at most {_LONGEST_NUMBER} characters.")
            return kind(text)  # type: ignore[no-any-return]
        except ValueError as error:
            raise ConfigError(f"{flag} must be {noun}, not {text!r}.") from error

    return read


_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}  # powers of two
_SMALLEST_BARE = 1 << 20


def size(flag: str) -> Callable[[str], int]:
    """Return a function that reads a number of bytes as that of `num_bytes` does, and refuses one below a MiB without a unit."""
    as_bytes = num_bytes(flag)

    def read(text: str) -> int:
        num = as_bytes(text)
        if text.strip().isdigit() and 0 < num < _SMALLEST_BARE:
            raise ConfigError(f"{flag} {num} would be {num} bytes; write a unit, like {num}M or {num}G.")
        return num

    return read


def num_bytes(flag: str) -> Callable[[str], int]:
    """Return a function that reads a number of bytes from digits and a unit K, M, G or T (powers of 1024). It raises ConfigError, which
    names `flag`."""

    def read(text: str) -> int:
        found = re.fullmatch(r"([0-9]{1,15})([KMGT]?)(?:iB|B)?", text.strip(), re.IGNORECASE | re.ASCII)
        if found is None:
            raise ConfigError(f"{flag} must be bytes, like 800M or 6G, not {shown(text)}.")
        return int(found[1]) << _UNITS[found[2].upper()]

    return read


def text_or_file(flag: str) -> Callable[[str], str]:
    """Return a function that returns a text itself, or for `@FILE` the text of that file. It raises ConfigError, which names `flag`."""

    def read(text: str) -> str:
        if not text.startswith("@"):
            return text
        path = Path(text[1:])
        try:
            path = path.expanduser()
            if path.stat().st_size > _LARGEST_FILE:
                raise ConfigError(f"{flag}: {path} is larger than {_LARGEST_FILE >> 20} MiB.")
            found = path.read_text(encoding="utf-8").removesuffix("\n")
        except OSError as error:
            raise ConfigError(f"{flag}: the file {path} cannot be read: {error.strerror}.") from error
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"{flag}: the file {shown(text[1:])} cannot be read as UTF-8 text.") from error
        if not found:
            raise ConfigError(f"{flag}: the file {path} is empty.")
        return found

    return read


def choice(flag: str, choices: Sequence[str]) -> Callable[[str], str]:
    """Return a function that returns its text if that is one of `choices`. It raises ConfigError, which names `flag`, for others."""

    def read(text: str) -> str:
        if text not in choices:
            tip = near(text, choices) if text else ""
            said = f"{flag} must be one of {', '.join(choices)}, not {text!r}"
            raise ConfigError(f"{said}; {tip}" if tip else f"{said}.")
        return text

    read.choices = tuple(choices)  # type: ignore[attr-defined]  # for shell completion
    return read
