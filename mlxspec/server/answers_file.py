"""Appends each answer with its prompt to a file, for `mlxspec prove`; see engine/record.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from mlxspec.engine.record import record
from mlxspec.errors import ConfigError
from mlxspec.option import shown
from mlxspec.server.http import log

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine
    from mlxspec.engine.request import Request


class AnswersFile:
    """One file that only its owner may read, as it holds prompts."""

    def __init__(self, name: str) -> None:
        """Raises ConfigError for a file that cannot be written."""
        try:
            path = Path(name).expanduser()
            self._number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (OSError, RuntimeError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"Answers cannot be recorded in {shown(name)}: {why}.") from error

    def append(self, engine: Engine, request: Request) -> None:
        """Write one line. The log says where the disk refuses it; the answer goes on."""
        line = json.dumps(record(request, engine.name, engine.config.kv_bits)) + "\n"
        try:
            os.write(self._number, line.encode())
        except OSError as error:
            log.line(f"An answer was not recorded: {error.strerror}.")
