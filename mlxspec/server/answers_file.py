"""Appends each answer with its prompt to a file, for `mlxspec prove`; see engine/record.py."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from mlxspec.engine.record import record
from mlxspec.engine.request import described
from mlxspec.errors import ConfigError
from mlxspec.option import shown
from mlxspec.server.http import log

if TYPE_CHECKING:
    from mlxspec.engine.engine import Engine
    from mlxspec.engine.request import Request
    from mlxspec.engine.worker import Worker


class AnswersFile:
    """A file to which a record of each answer, with its prompt, is appended. A new file is readable by its owner only."""

    def __init__(self, name: str) -> None:
        """Open the file, or create it. Raises ConfigError where it cannot be written."""
        try:
            path = Path(name).expanduser()
            self._number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._is_cut = _ends_within_a_line(path, self._number)
        except (OSError, RuntimeError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"Answers cannot be recorded in {shown(name)}: {why}.") from error
        self._lock = threading.Lock()  # answers end in several threads
        # digests by engine; keeps no unloaded model alive
        self._weights: WeakKeyDictionary[Engine, str | None] = WeakKeyDictionary()

    def append(self, engine: Engine, worker: Worker, request: Request) -> None:
        """Write a request's record on a line of its own. Where the record cannot be made or the disk refuses it, a line of the log says so,
        and the answer goes on. The first record of an engine waits until its worker has read all weights."""
        try:
            if engine not in self._weights:
                self._weights[engine] = worker.call(lambda own: own.weights_digest).result()
            made = record(request, engine.name, engine.config.kv_bits, self._weights[engine])
            line = json.dumps(made) + "\n"
        except Exception as error:  # whatever is wrong with a record, the answer is whole
            log.line(f"An answer was not recorded: {described(error)}")
            return
        with self._lock:
            left = (("\n" if self._is_cut else "") + line).encode()
            try:
                while left:  # a disk that is almost full takes a part
                    left = left[os.write(self._number, left) :]
                    self._is_cut = bool(left)
            except OSError as error:
                log.line(f"An answer was not recorded: {error.strerror}.")


def _ends_within_a_line(path: Path, number: int) -> bool:
    """Return whether the open file's last line has no end, because an earlier writer was killed. number: the file's descriptor."""
    status = os.fstat(number)
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
