"""Flags of llama-server, mlx-lm, Ollama and vLLM: other_programs.toml lists which are other names of mlxspec's, which are not needed
here, and which are refused with an alternative. Knows that table and how values of others are written; knows no option of ours.
"""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from mlxspec.config import MAX_CONTEXT
from mlxspec.errors import ConfigError
from mlxspec.option import shown

DATA = Path(__file__).with_name("other_programs.toml")
_LISTS = ("--stop", "--model", "--allowed-origins", "--chat-template-args")  # may be given again
_SWITCHES = ("on", "off", "auto", "true", "false", "0", "1")
_GGUF = re.compile(r"(?P<owner>[^/]+)/(?P<name>.+?)-GGUF", re.IGNORECASE)
_QUANT = re.compile(r"(?:UD-)?I?Q(?P<bits>[34568])(?:_.*)?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class OtherFlag:
    """A flag of another program. fate: "same" where it is another name of an option here, "needless" or "refused". target: that option,
    or a phrase on why. takes: "=" where a value follows, "=?" where one may. nothing: values with which the flag has no effect.
    reader: name of the function that converts its value; fixed: the value that the flag stands for, None where it has none."""

    program: str
    flag: str
    fate: Literal["same", "needless", "refused"]
    target: str
    takes: Literal["", "=", "=?"] = ""
    nothing: tuple[str, ...] = ()
    reader: str = ""
    fixed: str | None = None


class Said(NamedTuple):
    """The result of replacing flags of other programs. words: arguments in mlxspec's own flags; notes: sentences on the replacements,
    for the user."""

    words: list[str]
    notes: list[str]


@functools.cache
def table() -> dict[str, list[OtherFlag]]:
    """Return the meanings of other programs' flags, by flag, in the order of other_programs.toml. Raises ConfigError for a wrong entry."""
    found: dict[str, list[OtherFlag]] = {}
    for program, fates in tomllib.loads(DATA.read_text(encoding="utf-8")).items():
        for fate, lines in fates.items():
            for target, flags in lines.items():
                for written in flags.split():
                    made = _flag(program, fate, target, written)
                    found.setdefault(made.flag, []).append(made)
    return found


def _flag(program: str, fate: Literal["same", "needless", "refused"], target: str, written: str) -> OtherFlag:
    flag, takes, values = written.partition("=")
    target, has_reader, reader = target.partition(" < ") if fate == "same" else (target, "", "")
    target, has_value, fixed = target.partition(" = ") if fate == "same" else (target, "", "")
    if fate not in ("same", "needless", "refused") or not flag.startswith("-"):
        raise ConfigError(f"{DATA.name}: {written} is no flag of a known fate.")
    if has_reader and reader not in _READERS:
        raise ConfigError(f"{DATA.name}: there is no reader {reader}.")
    return OtherFlag(
        program=program,
        flag=flag,
        fate=fate,
        target=target,
        takes="=?" if values == "?" else "=" if takes else "",
        nothing=tuple(values.split("|")) if values not in ("", "?") else (),
        reader=reader,
        fixed=fixed if has_value else None,
    )


def gone(flag: str) -> str | None:
    """Return the phrase on what to use in place of an option that mlxspec once had; None for any other flag."""
    return next((f.target for f in table().get(flag, ()) if f.program == "mlxspec"), None)


def aliases() -> dict[str, str]:
    """Return mlxspec's flag for each flag of another program that is merely another name of it."""
    plain = [f for flags in table().values() for f in flags if f.fate == "same" and not f.reader]
    return {f.flag: f.target for f in plain if f.fixed is None and f.flag != f.target}


def translated(
    arguments: Sequence[str], known: Collection[str], takes: Collection[str], command: str
) -> Said:
    """Return the arguments of a command with flags of other programs replaced by mlxspec's. known: the command's own flags; takes: those
    of them that take a value; command: its name, for errors.

    Raises ConfigError for a flag that is refused, whose value cannot be read, or that contradicts another one.
    """
    answers = "--draft" in known
    words, notes, said = list[str](), list[str](), dict[str, tuple[str, list[str]]]()
    left = list(arguments)
    while left:
        argument = left.pop(0)
        flag, equals, value = argument.partition("=")
        if (
            flag.startswith("--")
            and (plain := flag.replace("_", "-")) != flag
            and (plain in known or plain in table())
        ):
            argument, flag = f"{plain}{equals}{value}", plain
        meant = _meant(flag, known, answers)
        if meant is None:
            words.append(argument)
            if flag in takes and not equals and left:
                words.append(left.pop(0))
            continue
        given = value if equals else _value(meant, meant.target in takes, left)
        lacks = given is None and (meant.takes == "=" or meant.target in takes)
        if lacks and meant.fixed is None and meant.takes != "=?":
            raise ConfigError(f"{flag} needs a value.")
        if given is not None and given in meant.nothing:
            continue
        if meant.fate == "refused":
            raise ConfigError(f"There is no option {flag}; {meant.target}.")
        if meant.fate == "needless":
            notes.append(f"{flag} is not needed: {meant.target}.")
            continue
        if meant.target not in known:
            raise ConfigError(f"{flag} is {meant.target}, which `mlxspec {command}` does not have.")
        own = _own(meant, given)
        before = said.setdefault(meant.target, (flag, own.words))
        if before[0] != flag and before[1] != own.words and meant.target not in _LISTS:
            raise ConfigError(
                f"{before[0]} and {flag} are one setting here, {meant.target}, and contradict each other."
            )
        words += own.words
        notes += own.notes
    return Said(words, notes)


def _meant(flag: str, known: Collection[str], answers: bool) -> OtherFlag | None:
    """Return the meaning of another program's flag in a command, None for a flag of the command's own and for an unknown one. known: the
    command's own flags; answers: whether the command answers prompts. Other commands accept only the names of their own options."""
    found = table().get(flag, [])
    if flag in known:
        return next((f for f in found if f.fate == "same" and f.target == flag and f.nothing), None)
    here = [f for f in found if f.fate == "same" and f.target in known]
    return next(iter(here or (found if answers else ())), None)


def _value(meant: OtherFlag, own_takes: bool, left: list[str]) -> str | None:
    """Remove the value of a flag from the arguments after it, and return it; None where it has none. own_takes: whether the option that
    the flag stands for takes a value; left: the arguments after the flag."""
    if not left or meant.fixed is not None:
        return None
    is_word = not left[0].startswith("-") or re.fullmatch(r"-[0-9.]+", left[0])
    if meant.takes == "=?" and left[0].lower() not in _SWITCHES:
        return None
    wants = meant.takes != "" or (meant.fate == "same" and own_takes)
    return left.pop(0) if wants and is_word else None


def _own(meant: OtherFlag, given: str | None) -> Said:
    """Return mlxspec's flag with the value, in place of another program's flag. given: its value, None where it has none."""
    if meant.fixed is not None:
        return Said([f"{meant.target}={meant.fixed}"], [])
    if meant.reader and (given is not None or meant.takes == "=?"):
        return _READERS[meant.reader](meant, given or "true")
    return Said([meant.target if given is None else f"{meant.target}={given}"], [])


# --- values as others write them


def _repository(meant: OtherFlag, given: str) -> Said:
    """Convert llama.cpp's `owner/name:QUANT`. Returns the model's repository; for one of GGUF files, which mlxspec does not read, the
    same model in MLX's format, with a note."""
    repo, _, quant = given.partition(":")
    gguf = _GGUF.fullmatch(repo)
    if gguf is None:
        if quant:
            raise ConfigError(f"{meant.flag} {shown(given)} names a file in GGUF; leave :{quant[:20]} out.")
        return Said([f"{meant.target}={repo}"], [])
    bits = _QUANT.fullmatch(quant or "Q4_K_M")
    form = f"{bits['bits']}bit" if bits else "bf16" if quant.upper() in ("BF16", "F16") else ""
    if not form:
        raise ConfigError(
            f"{meant.flag}: no model for MLX is known for {shown(given)}; name one with {meant.target}."
        )
    found = f"mlx-community/{gguf['name']}-{form}"
    return Said(
        [f"{meant.target}={found}"],
        [f"{given} is in GGUF, which MLX does not read: {found} is loaded in its place."],
    )


def _length(meant: OtherFlag, given: str) -> Said:
    """Convert llama.cpp's number of tokens, in which -1 and -2 mean no limit but the context. Returns mlxspec's flag."""
    return Said([f"{meant.target}={MAX_CONTEXT if given in ('-1', '-2') else given}"], [])


def _kv_bits(meant: OtherFlag, given: str) -> Said:
    types = {"f32": 16, "f16": 16, "bf16": 16, "q8_0": 8, "q4_0": 4, "q4_1": 4, "iq4_nl": 4}
    if given.lower() not in types:
        raise ConfigError(f"{meant.flag} must be one of {', '.join(types)}, not {shown(given)}.")
    return Said([f"{meant.target}={types[given.lower()]}"], [])


def _drafters(meant: OtherFlag, given: str) -> Said:
    """Convert llama.cpp's types of drafters. Returns mlxspec's flag with the names of its own."""
    names = {"none": "off", "draft-simple": "draft-model", "draft-dspark": "dflash"}
    own = [names.get(name.strip(), name.strip().removeprefix("draft-")) for name in given.split(",")]
    own = ["draft-model" if name == "model" else name for name in own]
    return Said([f"{meant.target}={','.join(own)}"], [])


def _mebibytes(meant: OtherFlag, given: str) -> Said:
    """Convert a number of MiB. Returns mlxspec's flag; none for -1, which means no limit."""
    return Said(
        [] if given == "-1" else [f"{meant.target}={given}M" if given != "0" else f"{meant.target}=0"], []
    )


def _file(meant: OtherFlag, given: str) -> Said:
    return Said([f"{meant.target}=@{given}"], [])


def _several(meant: OtherFlag, given: str) -> Said:
    return Said([f"{meant.target}={part}" for part in given.split(",")], [])


def _seconds(meant: OtherFlag, given: str) -> Said:
    """Convert a duration as Go writes it, such as 5m or 1h30m. Returns mlxspec's flag with seconds; none for a negative duration, which
    means for ever."""
    parts = re.findall(r"([0-9.]+)(ms|s|m|h)?", given)
    if given.startswith("-"):
        return Said([], [])
    units = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
    try:
        if "".join(map("".join, parts)) != given:
            raise ValueError(given)
        return Said([f"{meant.target}={sum(float(n) * units[unit] for n, unit in parts)}"], [])
    except ValueError as error:
        raise ConfigError(f"{meant.flag} must be a time like 5m or 1h30m, not {shown(given)}.") from error


def _effort(meant: OtherFlag, given: str) -> Said:
    return Said([f"{meant.target}={json.dumps({'reasoning_effort': given})}"], [])


def _think(meant: OtherFlag, given: str) -> Said:
    """Convert Ollama's value of `think`, true, false or an effort. Returns mlxspec's flag for it."""
    if given in ("low", "medium", "high", "max"):
        return Said([f"--chat-template-args={json.dumps({'reasoning_effort': given})}"], [])
    return Said([f"{meant.target}={ {'true': 'on', 'false': 'off'}.get(given, given) }"], [])


def _speculative(meant: OtherFlag, given: str) -> Said:
    """Convert vLLM's JSON of a speculative config. Returns mlxspec's flags for its members."""
    fields = {
        "model": "--draft-model",
        "num_speculative_tokens": "--draft-max",
        "prompt_lookup_min": "--ngram-n",
    }
    methods = {
        "ngram": "ngram-simple",
        "mtp": "mtp",
        "draft_model": "draft-model",
        "eagle3": "eagle3",
        "dflash": "dflash",
    }
    try:
        data = json.loads(given)
        if not isinstance(data, dict):
            raise ValueError(given)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{meant.flag} must be a JSON object, not {shown(given)}.") from error
    words = []
    for name, value in data.items():
        if name == "method" and value in methods:
            words.append(f"--draft={methods[value]}")
        elif name in fields:
            words.append(f"{fields[name]}={value}")
        elif name != "prompt_lookup_max":
            raise ConfigError(
                f"{meant.flag} has {shown(name)}: {shown(value)}, which is not known here; use --draft and --draft-model."
            )
    return Said(words, [])


_READERS: dict[str, Callable[[OtherFlag, str], Said]] = {
    "repository": _repository,
    "length": _length,
    "kv_bits": _kv_bits,
    "drafters": _drafters,
    "mebibytes": _mebibytes,
    "file": _file,
    "several": _several,
    "seconds": _seconds,
    "effort": _effort,
    "think": _think,
    "speculative": _speculative,
}
