"""Conversations as JSON files: written whole or not at all, and checked when they are read.

    {"format": "mlxspec-conversation", "version": 1, "model": "...", "system": null or "...",
     "messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "...", "reasoning_content": "..."}]}

A question may have "images", the paths of its images. Conversations at a terminal are saved in the cache folder automatically, and the
newest KEPT of them are kept. Knows files and messages; knows no engine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxspec.cli import terminal
from mlxspec.errors import ConfigError
from mlxspec.platform import folders

FORMAT = "mlxspec-conversation"
VERSION = 1
_LARGEST = 64 << 20  # bytes
_ROLES = ("user", "assistant")
KEPT = 20  # conversations


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A saved conversation. model: the model that answered; system: the system prompt; messages: questions and answers in turns."""

    model: str
    system: str | None
    messages: Sequence[Mapping[str, Any]]


def save(path: Path, saved: Saved) -> None:
    """Write a conversation to a file that only its owner can read. Raises ConfigError where the file cannot be written, or exists and is
    not a saved conversation."""
    if path.exists() and not _is_ours(path):
        raise ConfigError(f"{path} is there and is no saved conversation; choose another name.")
    data = {"format": FORMAT, "version": VERSION, "model": saved.model, "system": saved.system}
    text = json.dumps(data | {"messages": [dict(m) for m in saved.messages]}, ensure_ascii=False, indent=1)
    try:
        folders.write_whole(path, text.encode() + b"\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written: {_why(error)}.") from error


def new_file() -> Path | None:
    """Return the path for a conversation that begins now, None where the cache folder cannot be used. Of the earlier ones, only the
    newest KEPT - 1 are kept."""
    folder, notice = folders.private_folder("chats")
    if notice:
        return None
    for old in kept_files()[KEPT - 1 :]:
        with suppress(OSError):
            old.unlink()
    return folder / f"{time.strftime('%Y-%m-%d %H.%M.%S')} {os.getpid()}.json"


def kept_files() -> list[Path]:
    """Return the files of the conversations that chats have saved automatically, the newest first."""
    folder, notice = folders.private_folder("chats")
    return [] if notice else sorted(folder.glob("[!.]*.json"), reverse=True)


def title(path: Path) -> str:
    """Return the beginning of a conversation's first question, with its number of turns."""
    try:
        messages = load(path).messages
    except ConfigError:
        return "cannot be read"
    first = terminal.sentence(messages[0]["content"])[:60] if messages else "empty"
    turns = len(messages) // 2
    return f"{first} ({turns} turn{'' if turns == 1 else 's'})"


def load(path: Path) -> Saved:
    """Return the conversation of a file. Raises ConfigError where the file cannot be read or is damaged."""
    data = _read(path)
    if data.get("format") != FORMAT:
        raise ConfigError(f"{path} is no conversation saved by mlxspec.")
    if data.get("version") != VERSION:
        raise ConfigError(f"{path} was saved by another version of mlxspec.")
    model, system, messages = data.get("model"), data.get("system"), data.get("messages")
    if not isinstance(model, str) or not (system is None or _is_text(system)):
        raise ConfigError(f"{path} is damaged: its model or system prompt is no text.")
    if not isinstance(messages, list) or len(messages) % 2:
        raise ConfigError(f"{path} is damaged: its messages are not pairs of question and answer.")
    return Saved(model=model, system=system, messages=[_message(m, i, path) for i, m in enumerate(messages)])


def _message(found: Any, index: int, path: Path) -> dict[str, Any]:
    allowed = {"role", "content", "reasoning_content"}
    if (
        not isinstance(found, dict)
        or found.get("role") != _ROLES[index % 2]
        or not _is_text(found.get("content"))
        or not all(
            (k in allowed and _is_text(v)) or (k == "images" and _are_texts(v)) for k, v in found.items()
        )
    ):
        raise ConfigError(f"{path} is damaged: message {index + 1} is no message of the {_ROLES[index % 2]}.")
    return dict(found)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_text(value: Any) -> bool:
    """Return whether a value is a string of whole characters. JSON can hold lone surrogates, which are halves of characters."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST:
            raise ConfigError(f"{path} is too large for a conversation.")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {_why(error)}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no valid JSON.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is no conversation saved by mlxspec.")
    return data


def _is_ours(path: Path) -> bool:
    try:
        return _read(path).get("format") == FORMAT
    except ConfigError:
        return False


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).rstrip(".")
