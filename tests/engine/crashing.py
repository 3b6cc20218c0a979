"""Files of the prefix store on disk that fail where a test says so, and that watch the limit of bytes at every step.

A crash is a BaseException: nothing in the store may catch it. What the process that crashed would have written later is never written.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path

from mlxspec.engine.prefix_disk.folder import DiskFiles, PieceFolder
from mlxspec.engine.prefix_disk.mover import Mover, Reading
from mlxspec.engine.prefix_disk.piece import Bytes

STEP = 64  # bytes that are written between two places where a write may crash


class Crash(BaseException):
    """The process is gone."""


def bytes_in(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.iterdir())


class TooMany(BaseException):
    """The folder has more bytes than it may."""


class WatchedFiles(DiskFiles):
    """limit: bytes that the folder never has more of. crash_at: the operation that does not return; full_at: the operations that find the
    disk full. loses_unsynced: a crash is that of the machine, which forgets what was not synced. num_done: operations."""

    def __init__(
        self,
        folder: Path,
        limit: int,
        *,
        crash_at: int | None = None,
        full_at: frozenset[int] = frozenset(),
        loses_unsynced: bool = False,
        seed: int = 0,
    ) -> None:
        self._folder, self._limit, self._crash_at, self._full_at = folder, limit, crash_at, full_at
        self._loses_unsynced, self._random = loses_unsynced, random.Random(seed)
        self._unsynced: set[Path] = set()
        self.num_done = self.most = 0

    def _step(self, name: str) -> None:
        """Before each operation."""
        found = bytes_in(self._folder)
        self.most = max(self.most, found)
        if found > self._limit:
            raise TooMany(f"{found} bytes before {name}")
        self.num_done += 1
        if self._crash_at is not None and self.num_done >= self._crash_at:
            if self._loses_unsynced:
                for path in self._unsynced:
                    if path.exists():
                        os.truncate(path, self._random.randint(0, path.stat().st_size))
            raise Crash(name)
        if self.num_done in self._full_at:
            raise OSError(errno.ENOSPC, "No space left on device")

    def write(self, path: Path, parts: Sequence[Bytes]) -> None:
        self._step("create")
        data = b"".join(bytes(part) for part in parts)
        with path.open("xb", buffering=0) as file:
            self._unsynced.add(path)
            step = max(STEP, len(data) // 4)
            for begin in range(0, len(data), step):
                self._step("write")
                file.write(data[begin : begin + step])
            self.sync(file.fileno())
        self._unsynced.discard(path)

    def sync(self, descriptor: int) -> None:
        self._step("sync")

    def rename(self, path: Path, target: Path) -> None:
        self._step("rename")
        super().rename(path, target)
        if path in self._unsynced:
            self._unsynced.add(target)
        self._step("renamed")

    def sync_folder(self, path: Path) -> None:
        self._step("sync folder")

    def remove(self, path: Path) -> None:
        self._step("remove")
        super().remove(path)

    def use(self, path: Path, when: int) -> None:
        self._step("use")
        super().use(path, when)

    def count(self, descriptor: int, number: int) -> None:
        self._step("count")
        super().count(descriptor, number)

    def free(self, path: Path) -> int:
        return 1 << 60


class InlineMover(Mover):
    """Does at once what is asked of it, in the caller's thread."""

    def __init__(self, folder: PieceFolder) -> None:
        super().__init__(folder)
        self.folder.tidy()

    def _start(self) -> None:
        """No thread."""

    def _work(self) -> None:
        while self._has_task:
            self._turn()

    def write(self, *piece) -> None:
        super().write(*piece)
        self._work()

    def read(self, keys: Sequence[str]) -> Reading:
        reading = super().read(keys)
        self._work()
        return reading

    def use(self, keys: Sequence[str]) -> None:
        super().use(keys)
        self._work()

    def close(self, seconds: float) -> bool:
        self.folder.close()
        return True
