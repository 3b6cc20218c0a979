"""The thread that reads and writes the files (pieces) of the prefix store on disk. It touches no MLX: what goes in and out are bytes.

Reading comes before writing. One piece at a time waits to be written, so whoever offers pieces is told to wait and the host's memory stays
bounded. Where the disk refuses, nothing is written for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mlxspec.engine.prefix_disk.folder import PieceFolder
from mlxspec.engine.prefix_disk.piece import Label, Stored

READ_AHEAD = 64 << 20  # bytes that may wait for the engine's thread
REST_SECONDS = 60.0  # without writing, after the disk has refused
_log = logging.getLogger("mlxspec")


@dataclass
class DiskStats:
    """Since the engine was made. num_lost: texts that were to be written and had left memory before; num_failed: pieces that the disk
    refused; num_missed: pieces that were expected and could not be read as they were written."""

    num_written: int = 0
    bytes_written: int = 0
    num_read: int = 0
    bytes_read: int = 0
    num_lost: int = 0
    num_failed: int = 0
    num_missed: int = 0


class Reading:
    """Pieces on their way from the disk, in order. The mover puts, the engine's thread takes."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)
        self.has_failed = self.is_cancelled = False
        self.changed = threading.Condition()
        self._waiting: deque[tuple[Label, dict[str, Stored]]] = deque()
        self._nbytes = 0

    def put(self, label: Label, tensors: dict[str, Stored]) -> bool:
        """Wait until there is room. False where nobody wants it any more."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_cancelled or self._nbytes < READ_AHEAD)
            if self.is_cancelled:
                return False
            self._waiting.append((label, tensors))
            self._nbytes += _size(tensors)
            self.changed.notify_all()
        return True

    def fail(self) -> None:
        with self.changed:
            self.has_failed = True
            self.changed.notify_all()

    def take(self) -> tuple[Label, dict[str, Stored]] | None:
        """The next piece, None where it has not come yet."""
        with self.changed:
            if not self._waiting:
                return None
            found = self._waiting.popleft()
            self._nbytes -= _size(found[1])
            self.changed.notify_all()
        return found

    def wait(self, seconds: float) -> None:
        """Until there is something to take, or it has failed."""
        with self.changed:
            self.changed.wait_for(lambda: self._waiting or self.has_failed or self.is_cancelled, seconds)

    def cancel(self) -> None:
        """Nobody wants it any more."""
        with self.changed:
            self.is_cancelled = True
            self._waiting.clear()
            self._nbytes = 0
            self.changed.notify_all()


class Mover:
    """Owns a folder and the thread that changes it. `stats` may be read from any thread."""

    def __init__(self, folder: PieceFolder) -> None:
        self.folder, self.stats = folder, DiskStats()
        self._changed = threading.Condition()
        self._readings: deque[Reading] = deque()
        self._used: deque[Sequence[str]] = deque()
        self._waiting: tuple[Label, Mapping[str, Stored]] | None = None
        self._is_busy = self._is_closed = False
        self._rests_until = 0.0
        self._thread = threading.Thread(target=self._run, name="mlxspec-prefix-disk", daemon=True)
        self._start()

    def _start(self) -> None:
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether a piece waits to be written or is being written, so that no other is taken."""
        return self._waiting is not None

    @property
    def is_idle(self) -> bool:
        return self._waiting is None and not self._is_busy

    @property
    def rests(self) -> bool:
        """Whether the disk has refused lately."""
        return time.monotonic() < self._rests_until

    def write(self, label: Label, tensors: Mapping[str, Stored]) -> None:
        """Queue a piece; not while `is_full`."""
        with self._changed:
            self._waiting = label, tensors
            self._changed.notify_all()

    def read(self, keys: Sequence[str]) -> Reading:
        """Begin to read these pieces."""
        reading = Reading(keys)
        with self._changed:
            self._readings.append(reading)
            self._changed.notify_all()
        return reading

    def use(self, keys: Sequence[str]) -> None:
        """These pieces count as used now."""
        with self._changed:
            self._used.append(keys)
            self._changed.notify_all()

    def close(self, seconds: float) -> bool:
        """End the thread behind what is queued. Returns whether it has ended in time."""
        with self._changed:
            self._is_closed = True
            for reading in self._readings:
                reading.cancel()
            self._changed.notify_all()
        self._thread.join(seconds)
        ended = not self._thread.is_alive()
        if ended:
            self.folder.close()
        return ended

    # --- the thread

    def _run(self) -> None:
        self._guard(self.folder.tidy)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_task or self._is_closed)
                if not self._has_task:
                    return
                self._is_busy = True
            self._turn()
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    @property
    def _has_task(self) -> bool:
        return bool(self._readings or self._used or self._waiting)

    def _turn(self) -> None:
        """One task."""
        if self._readings:
            self._read(self._readings.popleft())
        elif self._used:
            self.folder.use(self._used.popleft())
        elif self._waiting is not None:
            self._guard(partial(self._write, *self._waiting))
            self._waiting = None

    def _read(self, reading: Reading) -> None:
        """Whatever goes wrong fails the reading: a row waits for it."""
        try:
            for key in reading.keys:
                found = self.folder.read(key)
                if found is None:
                    self._miss(reading)
                    return
                self.stats.num_read += 1
                self.stats.bytes_read += _size(found[1])
                if not reading.put(*found):
                    return
            self.folder.use(reading.keys)
        except Exception as error:
            self._miss(reading)
            why = f"{type(error).__name__}: {error}"
            _log.warning("A piece of the prefix store on disk could not be read (%s).", why)

    def _miss(self, reading: Reading) -> None:
        self.stats.num_missed += 1
        reading.fail()

    def _write(self, label: Label, tensors: Mapping[str, Stored]) -> None:
        if self.folder.write(label, tensors):
            self.stats.num_written += 1
            self.stats.bytes_written += _size(tensors)
        else:
            self.stats.num_failed += 1

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.stats.num_failed += 1
            self._rests_until = time.monotonic() + REST_SECONDS
            why = getattr(error, "strerror", None) or error
            _log.warning(
                "The prefix store on disk could not be written (%s). It is tried again in %d seconds.",
                why,
                REST_SECONDS,
            )


def _size(tensors: Mapping[str, Stored]) -> int:
    return sum(len(stored.data) for stored in tensors.values())
