"""Flags of llama-server, mlx-lm, Ollama and vLLM: other_programs.toml says which are other names of ours, which are not needed here, and
which are refused with what to use. Knows that table and how values of others are written; knows no option of ours.
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
    """fate: see the head of the table. target: the own flag, or a sentence. takes: whether a value follows. nothing: values that ask for
    nothing. reader: what makes words of ours out of a value; fixed: the value that the flag stands for."""

    program: str
    flag: str
    fate: Literal["same", "needless", "refused"]
    target: str
    takes: Literal["", "=", "=?"] = ""
    nothing: tuple[str, ...] = ()
    reader: str = ""
    fixed: str | None = None


class Said(NamedTuple):
    """Words of ours in place of a flag of another program's, and what a person is told of it."""

    words: list[str]
    notes: list[str]


@functools.cache
def table() -> dict[str, list[OtherFlag]]:
    """Return what flags of other programs mean here, by flag, in the order of the file. Raises ConfigError for a line that is wrong."""
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
    """The sentence on what to use in place of an option that mlxspec had; None for any other flag."""
    return next((f.target for f in table().get(flag, ()) if f.program == "mlxspec"), None)


def aliases() -> dict[str, str]:
    """Flags that are nothing but other names of ours, and those."""
    plain = [f for flags in table().values() for f in flags if f.fate == "same" and not f.reader]
    return {f.flag: f.target for f in plain if f.fixed is None and f.flag != f.target}


def translated(
    arguments: Sequence[str], known: Collection[str], takes: Collection[str], command: str
) -> Said:
    """Arguments of a command in its own flags. known: these; takes: those of them that take a value, which is never looked at.

    Raises ConfigError for a flag that is refused, whose value cannot be read, or that says something else than another one.
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
    """Return the meaning of another program's flag in a command; None for a flag of our own and for one that no program has. answers:
    whether the command answers."""
    found = table().get(flag, [])
    if flag in known:
        return next((f for f in found if f.fate == "same" and f.target == flag and f.nothing), None)
    here = [f for f in found if f.fate == "same" and f.target in known]
    return next(iter(here or (found if answers else ())), None)


def _value(meant: OtherFlag, own_takes: bool, left: list[str]) -> str | None:
    """Taken off the arguments behind a flag."""
    if not left or meant.fixed is not None:
        return None
    is_word = not left[0].startswith("-") or re.fullmatch(r"-[0-9.]+", left[0])
    if meant.takes == "=?" and left[0].lower() not in _SWITCHES:
        return None
    wants = meant.takes != "" or (meant.fate == "same" and own_takes)
    return left.pop(0) if wants and is_word else None


def _own(meant: OtherFlag, given: str | None) -> Said:
    """An own flag and its value."""
    if meant.fixed is not None:
        return Said([f"{meant.target}={meant.fixed}"], [])
    if meant.reader and (given is not None or meant.takes == "=?"):
        return _READERS[meant.reader](meant, given or "true")
    return Said([meant.target if given is None else f"{meant.target}={given}"], [])


# --- values as others write them


def _repository(meant: OtherFlag, given: str) -> Said:
    """`owner/name:QUANT` of llama.cpp. GGUF files are not read here; the same model lies beside them as MLX reads it."""
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
    """-1 and -2 of llama.cpp: no limit but the context's."""
    return Said([f"{meant.target}={MAX_CONTEXT if given in ('-1', '-2') else given}"], [])


def _kv_bits(meant: OtherFlag, given: str) -> Said:
    types = {"f32": 16, "f16": 16, "bf16": 16, "q8_0": 8, "q4_0": 4, "q4_1": 4, "iq4_nl": 4}
    if given.lower() not in types:
        raise ConfigError(f"{meant.flag} must be one of {', '.join(types)}, not {shown(given)}.")
    return Said([f"{meant.target}={types[given.lower()]}"], [])


def _drafters(meant: OtherFlag, given: str) -> Said:
    """Types of llama.cpp."""
    names = {"none": "off", "draft-simple": "draft-model", "draft-dspark": "dflash"}
    own = [names.get(name.strip(), name.strip().removeprefix("draft-")) for name in given.split(",")]
    own = ["draft-model" if name == "model" else name for name in own]
    return Said([f"{meant.target}={','.join(own)}"], [])


def _mebibytes(meant: OtherFlag, given: str) -> Said:
    """-1: no limit."""
    return Said(
        [] if given == "-1" else [f"{meant.target}={given}M" if given != "0" else f"{meant.target}=0"], []
    )


def _file(meant: OtherFlag, given: str) -> Said:
    return Said([f"{meant.target}=@{given}"], [])


def _several(meant: OtherFlag, given: str) -> Said:
    return Said([f"{meant.target}={part}" for part in given.split(",")], [])


def _seconds(meant: OtherFlag, given: str) -> Said:
    """Go's durations, such as 5m or 1h30m; below zero: for ever."""
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
    """Ollama's true and false, or an effort."""
    if given in ("low", "medium", "high", "max"):
        return Said([f"--chat-template-args={json.dumps({'reasoning_effort': given})}"], [])
    return Said([f"{meant.target}={ {'true': 'on', 'false': 'off'}.get(given, given) }"], [])


def _speculative(meant: OtherFlag, given: str) -> Said:
    """vLLM's JSON."""
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
