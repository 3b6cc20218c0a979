"""`option`: a field of a config class, with its kind, default, range, meaning and names in one line.

Everything that knows an option is made from that line: the checks of the class (`check_options`), flags and help of the command line
(cli/options.py), fields of request bodies with their other names (server/forms), and the table of `mlxspec flags`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, Literal, TypeVar

from mlxspec.errors import ConfigError

Called = TypeVar("Called", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type[Any])
Kind = type | tuple[Any, ...] | Literal["bytes", "ids", "grammar", "schema"]


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a config class. kind: int, float, bool, str or Path; list for several texts; a tuple for one of its values; "bytes"
    for an amount of memory; "ids" for token ids; "grammar" for a text, and "schema" for a JSON object or its text, that an answer
    follows.

    low, high: the smallest and largest number allowed; of a list, high is the most texts that a request may have. above: low itself is
    not allowed. about: its meaning, for help. unset: what None means, for help. flag: its name on the command line, with two dashes;
    metavar: the name of its value. body: its field in a request's body; aliases: other programs' names of that field. An empty flag or
    body: it has none. off: a number by which clients mean "not set", which is read as the default.
    """

    name: str
    kind: Kind
    default: Any
    about: str
    low: float
    high: float
    metavar: str
    flag: str
    body: str
    aliases: tuple[str, ...]
    above: bool = False
    unset: str = ""
    off: int | None = None

    @property
    def dest(self) -> str:
        """Return the attribute of parsed command-line arguments that holds the option's value."""
        return self.flag[2:].replace("-", "_")

    @property
    def is_whole(self) -> bool:
        return self.kind in (int, "bytes")

    @property
    def usual(self) -> str:
        """Return the default as help shows it. It is `unset`, which may be empty, if the default is None or the kind is bool, list or
        "ids"."""
        if self.default is None or self.kind in (bool, list, "ids"):
            return self.unset
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def values(self) -> str:
        """Return a description of the values that the option may have, for help and errors."""
        if isinstance(self.kind, tuple):
            return ", ".join(map(str, self.kind))
        if self.kind in (int, float, "bytes"):
            return span(self.low, self.high, above=self.above)
        names = {
            bool: "true or false",
            list: "texts",
            "ids": "token ids",
            "schema": "a schema",
            Path: "a folder",
        }
        return names.get(self.kind, "a text")

    def check(self, value: Any) -> Any:
        """Return the value as a config class keeps it: lists become tuples. Raises ConfigError."""
        if value is None and self.default is None:
            return None
        if isinstance(self.kind, tuple):
            if type(value) is not type(self.kind[0]) or value not in self.kind:
                choices = ", ".join(map(str, self.kind))
                raise ConfigError(f"{self.name} must be one of {choices}, not {shown(value)}.")
        elif self.kind is bool:
            if not isinstance(value, bool):
                raise ConfigError(f"{self.name} must be True or False, not {shown(value)}.")
        elif self.kind is list:
            return texts(self.name, value)
        elif self.kind == "ids":
            return self._ids(value)
        elif self.kind == "schema":
            if not isinstance(value, (Mapping, str)):
                raise ConfigError(f"{self.name} must be a mapping or JSON text, not {shown(value)}.")
        elif self.kind in (str, Path, "grammar"):
            if not isinstance(value, (str, Path) if self.kind is Path else str) or not str(value):
                kind = "a folder's path" if self.kind is Path else "a non-empty string"
                raise ConfigError(f"{self.name} must be {kind}, not {shown(value)}.")
        else:
            check_number(self.name, value, self.low, self.high, integer=self.is_whole, above=self.above)
        return value

    def _ids(self, value: Any) -> tuple[int, ...]:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{self.name} must be a list of token ids, not {shown(value)}.")
        for token in value:
            check_number(f"a token id in {self.name}", token, self.low, self.high, integer=True)
        return tuple(value)


def option(
    kind: Kind,
    default: Any,
    about: str,
    low: float = 0,
    high: float = 0,
    metavar: str = "",
    *,
    aliases: str = "",
    **more: Any,
) -> Any:
    """Return a dataclass field that is an option: see `Option`. aliases: separated by blanks. Unless others are given, the flag is
    --name-with-dashes, and the field of a request's body has the same name."""
    known = {"kind": kind, "about": about, "low": low, "high": high, "metavar": metavar}
    return field(default=default, metadata={"option": {**known, **more, "aliases": tuple(aliases.split())}})


def options(config: type[Any]) -> dict[str, Option]:
    """Return the options of a config class by name, in order. Fields that were not made by `option` are left out."""
    if config not in _KNOWN:
        made = [f for f in fields(config) if "option" in f.metadata]
        _KNOWN[config] = {f.name: _made(f.name, f.default, f.metadata["option"]) for f in made}
    return _KNOWN[config]


def _made(name: str, default: Any, known: Mapping[str, Any]) -> Option:
    return Option(
        name=name, default=default, **{"flag": f"--{name.replace('_', '-')}", "body": name, **known}
    )


_KNOWN: dict[type[Any], dict[str, Option]] = {}


def check_options(config: Any) -> None:
    """Check every option of a config object that is being made. Raises ConfigError."""
    for name, found in options(type(config)).items():
        object.__setattr__(config, name, found.check(getattr(config, name)))


def check_number(
    name: str, value: object, low: float, high: float, *, integer: bool = False, above: bool = False
) -> None:
    """Raise ConfigError unless `value` is a finite number (not a bool) in [low, high]; above: in (low, high]."""
    kind = "an integer" if integer else "a number"
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)):
        raise ConfigError(f"{name} must be {kind}, not {shown(value)}.")
    # also false for nan; isfinite would choke on integers beyond float
    if not low <= value <= high or (above and value == low):
        raise ConfigError(f"{name} must be {span(low, high, above=above)}, not {shown(value)}.")


def span(low: float, high: float, *, above: bool = False) -> str:
    """Return the range from low to high in words. above: low itself is excluded."""
    least, most = (int(end) if float(end).is_integer() else end for end in (low, high))
    return f"above {least} and at most {most}" if above else f"between {least} and {most}"


def shown(value: object) -> str:
    """Return a value for an error message: at most 80 characters, cut in the middle, since the end tells paths apart."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to spell integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:38]}...{text[-39:]}"


def texts(name: str, value: object) -> tuple[str, ...]:
    """Return a string, or several of them, as a tuple. Raises ConfigError for anything else, and for empty ones."""
    found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    if "" in found:
        raise ConfigError(f"{name} must not be empty.")
    if not all(isinstance(item, str) for item in found):
        raise ConfigError(f"{name} must be texts, not {shown(value)}.")
    return tuple(str(item) for item in found)


def near(word: str, known: Iterable[str]) -> str:
    """Return a question on what `word` probably means, like `did you mean chat?`; empty where no known word is similar. Case, `-` and
    `_` are ignored."""
    by_plain = {k.lower().replace("_", "-"): k for k in known}
    plain = word.lower().replace("_", "-")
    found = [k for k in by_plain if plain == k or (len(plain.strip("-")) > 1 and k.startswith(plain))]
    alike = [k for k in by_plain if k.strip("-")[:1] == plain.strip("-")[:1]]  # few mistake the first letter
    found = found or get_close_matches(plain, alike, 1, 0.65) or get_close_matches(plain, by_plain, 1, 0.8)
    return f"did you mean {' or '.join(by_plain[k] for k in found[:3])}?" if found else ""


def by_name(function: Called) -> Called:
    """Return a function for users in which unknown and missing arguments raise ConfigError instead of TypeError."""
    form = signature(function)

    @wraps(function)
    def called(*values: Any, **named: Any) -> Any:
        try:
            return function(*values, **named)
        except TypeError:
            # a class is called by its own name
            name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
            wrong = misnamed(name, form, values, named)
            if wrong is None:
                raise
        raise ConfigError(wrong)

    return called  # type: ignore[return-value]


def fields_by_name(**gone: str) -> Callable[[Class], Class]:
    """Return a decorator for config classes: wrong fields raise ConfigError instead of TypeError. gone: by the name of a removed field,
    why it was removed."""

    def decorated(config: Class) -> Class:
        made, form = config.__init__, signature(config)

        @wraps(made)
        def init(self: Any, *values: Any, **named: Any) -> None:
            for name in named:
                if name in gone:
                    raise ConfigError(f"There is no {name} any more: {gone[name]}.")
            try:
                made(self, *values, **named)
            except TypeError:
                wrong = misnamed(config.__name__, form, values, named)
                if wrong is None:
                    raise
                raise ConfigError(wrong) from None

        config.__init__ = init
        return config

    return decorated


def misnamed(name: str, form: Signature, values: Iterable[Any], named: Mapping[str, Any]) -> str | None:
    """Return a sentence on wrong names or a wrong number of arguments of a call; None where they are right."""
    known, given = form.parameters, tuple(values)
    is_open = any(p.kind is Parameter.VAR_KEYWORD for p in known.values())
    for word in () if is_open else named:
        if word not in known:
            there = [n for n in known if n != "self"]
            meant = near(word, there) or f"there are: {', '.join(there)}."
            return f"{name} has no argument {shown(word)}; {meant}"
    places = [
        n for n, p in known.items() if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(given) > len(places):
        most = len(places) - ("self" in known)
        example = next((n for n, p in known.items() if p.kind is Parameter.KEYWORD_ONLY), "")
        rest = (
            f"name {'the others' if most else 'them'}, as in {name}({example}=...)."
            if example
            else "it was given more."
        )
        return f"{name} takes {most or 'no'} {'value' if most == 1 else 'values'} by position; {rest}"
    twice = next((n for n in places[: len(given)] if n in named), None)
    if twice is not None:
        return f"{name} was given {twice} twice."
    open_ended = Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL
    needed = [n for n, p in known.items() if p.default is Parameter.empty and p.kind not in open_ended]
    lacks = [n for n in needed if n not in named and n not in places[: len(given)]]
    return f"{name} needs {' and '.join(lacks)}." if lacks else None


def of_kind(name: str, value: object, *kinds: type[Any]) -> None:
    """Raise ConfigError unless the value is None or of one of these classes."""
    if value is not None and not isinstance(value, kinds):
        raise ConfigError(f"{name} must be {' or '.join(k.__name__ for k in kinds)}, not {shown(value)}.")
