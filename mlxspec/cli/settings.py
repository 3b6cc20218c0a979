"""The user's config file: options that apply unless the command line sets them.

    # ~/.config/mlxspec/config.toml            ($XDG_CONFIG_HOME is honoured, MLXSPEC_CONFIG names another file or, empty, none)
    model = "mlx-community/Qwen3.5-4B-4bit"    for every command that answers

    [chat]                                     for one command
    system = "Be brief."

    [presets.coder]                            for --preset coder
    temp = 0.2

    [models."owner/model"]                     for one model of `serve`, by the name that clients use or the one that it is loaded by
    thinking = "off"

    [drafters]                                 --draft-model for a model, where it is loaded with --draft auto
    "owner/model" = "owner/drafter"

Keys are the options without their dashes. A model's table wins over a preset, that over a command's table, and that over the keys at the
top. Options of one command only may stand at the top: the other commands leave them out. Knows TOML and flags; knows no option of ours.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxspec.cli.other_programs import aliases, gone
from mlxspec.cli.parser import flags
from mlxspec.errors import ConfigError
from mlxspec.option import near, shown

_ANSWERING = ("generate", "chat", "run", "serve", "launch", "bench", "tune")
_LARGEST = 1 << 20  # bytes


def config_file() -> Path | None:
    """Return the path of the config file, which need not exist; None where MLXSPEC_CONFIG is set and empty, or the user has no home
    folder."""
    named = os.environ.get("MLXSPEC_CONFIG")
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if named is not None and not named:
        return None
    try:
        if named:
            return Path(named).expanduser()
        root = Path(base) if os.path.isabs(base) else Path("~/.config").expanduser()
        return root / "mlxspec" / "config.toml"
    except RuntimeError:  # nobody's home
        return None


def arguments_from_file(
    command: str, parsers: Mapping[str, Callable[[], argparse.ArgumentParser]], given: Sequence[str]
) -> list[str]:
    """Return the arguments that the config file adds to those of a command. given: the arguments of the command line, which win;
    parsers: functions that make the parser of each command, by name. Raises ConfigError for a wrong file, key or preset."""
    preset = _preset(given)
    path = config_file()
    if path is None or not path.exists():
        if preset is not None:
            raise ConfigError(
                f"There is no preset {shown(preset)}: there is no file {path or 'of settings'}."
            )
        if path is not None and os.environ.get("MLXSPEC_CONFIG"):
            raise ConfigError(f"MLXSPEC_CONFIG names {path}, and there is no such file.")
        return []
    layers = _layers(_read(path), command, preset, path, parsers)
    return _words(layers, parsers[command](), given, parsers)


def arguments_of_model(
    names: Sequence[str], parser: argparse.ArgumentParser, given: Sequence[str]
) -> list[str]:
    """Return the arguments that the config file's tables of a model add. names: names of the model; given: the arguments of the command
    line, which win. Raises ConfigError."""
    path = config_file()
    tables = _models(_read(path), path) if path is not None and path.exists() else {}
    layers = [(f"[models.{name}] of {path}", tables[name], True) for name in names if name in tables]
    return _words(layers, parser, given, {})


def _words(
    layers: Sequence[tuple[str, Mapping[str, Any], bool]],
    parser: argparse.ArgumentParser,
    given: Sequence[str],
    parsers: Mapping[str, Callable[[], argparse.ArgumentParser]],
) -> list[str]:
    known = {s: a for a in parser._actions for s in a.option_strings}
    named = {known[w].dest for word in given if (w := word.partition("=")[0]) in known}
    found: dict[str, list[str]] = {}
    for where, table, is_own in layers:
        for key, value in table.items():
            flag = aliases().get(f"--{key}", f"--{key}").replace("_", "-")
            action = known.get(flag)
            never = flag in ("--help", "--preset", "--prompt") or (not parsers and flag == "--model")
            if action is None or never:
                if is_own or never or not any(flag in flags(make()) for make in parsers.values()):
                    _refuse(key, where, known)
            elif action.dest not in named:
                found[action.dest] = _spelled(flag, action, value, where)
    return [word for words in found.values() for word in words]


def drafter_of(model: str) -> str | None:
    """Return the drafter that the config file's table [drafters] gives for a model, None where it gives none. Raises ConfigError for a
    wrong file."""
    path = config_file()
    if path is None or not path.exists():
        return None
    return _drafters(_read(path), path).get(model)


def _drafters(data: dict[str, Any], path: Path) -> dict[str, str]:
    """Remove the table [drafters] from the data of the config file and return it. Raises ConfigError where it is wrong."""
    found = data.pop("drafters", {})
    if not isinstance(found, dict) or not all(isinstance(v, str) and v.strip() for v in found.values()):
        raise ConfigError(f'In {path}, [drafters] holds lines like "owner/model" = "owner/drafter".')
    return found


def _models(data: dict[str, Any], path: Path) -> dict[str, dict[str, Any]]:
    """Remove the tables [models.NAME] from the data of the config file and return them by name. Raises ConfigError where they are wrong."""
    found = data.pop("models", {})
    if not isinstance(found, dict) or not all(isinstance(table, dict) for table in found.values()):
        raise ConfigError(f"In {path}, [models.NAME] holds the options of a model.")
    return found


def _preset(given: Sequence[str]) -> str | None:
    for i, word in enumerate(given):
        if word == "--preset" and i + 1 < len(given) and not given[i + 1].startswith("-"):
            return given[i + 1]
        if word.startswith("--preset="):
            return word.partition("=")[2]
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST:
            raise ConfigError(f"The config file {path} is too large.")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The config file {path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"The config file {path} is no valid TOML: {str(error).rstrip('.')}.") from error


def _layers(
    data: dict[str, Any], command: str, preset: str | None, path: Path, commands: Collection[str]
) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Return the tables of the config file that apply to a command, the weakest first: (name of the table for errors, its keys and
    values, whether every key must be an option of this command). Raises ConfigError for an unknown table or preset."""
    _drafters(data, path)
    _models(data, path)
    presets = data.pop("presets", {})
    if not isinstance(presets, dict) or not all(isinstance(p, dict) for p in presets.values()):
        raise ConfigError(f"In {path}, [presets.NAME] holds the options of a preset.")
    tables = {k: v for k, v in data.items() if isinstance(v, dict)}
    for name in tables:
        if name not in commands:
            tip = near(name, commands) or "a table is called after a command, or [presets.NAME]."
            raise ConfigError(f"There is no command for the table [{name}] in {path}; {tip}")
    if preset is not None and preset not in presets:
        tip = near(preset, presets) or f"there are: {', '.join(presets) or 'none'}."
        raise ConfigError(f"There is no preset {shown(preset)} in {path}; {tip}")
    top = {k: v for k, v in data.items() if k not in tables}
    layers: list[tuple[str, Mapping[str, Any], bool]] = []
    if command in _ANSWERING:
        layers.append((str(path), top, False))
    layers.append((f"[{command}] of {path}", tables.get(command, {}), True))
    if preset is not None:
        layers.append((f"[presets.{preset}] of {path}", presets[preset], False))
    return layers


def _spelled(flag: str, action: argparse.Action, value: Any, where: str) -> list[str]:
    """Return a value of the config file as arguments of the command line. where: name of the table, for errors. Raises ConfigError where
    the option does not take the value."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{flag[2:]} must be true or false in {where}, not {shown(value)}.")
        return [flag] if value else []
    is_list = isinstance(action, argparse._AppendAction)
    values = value if is_list and isinstance(value, list) else [value]
    if not all(isinstance(v, str | int | float) and not isinstance(v, bool) for v in values):
        kind = "a text, a number or a list of texts" if is_list else "a text or a number"
        raise ConfigError(f"{flag[2:]} must be {kind} in {where}, not {shown(value)}.")
    for v in values:
        if callable(action.type):
            try:
                action.type(str(v))
            except ConfigError as error:
                raise ConfigError(f"In {where}: {error}") from error
    return [f"{flag}={v}" for v in values]


def _refuse(key: str, where: str, known: Mapping[str, Any]) -> None:
    names = [s[2:] for s in known if s.startswith("--")]
    instead = gone(f"--{key}")
    tip = f"{instead}." if instead else near(key, names) or "a key is an option without its dashes."
    raise ConfigError(f"There is no option {shown(key)} for {where}; {tip}")
