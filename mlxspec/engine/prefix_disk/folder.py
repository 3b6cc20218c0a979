"""The folder of the prefix store on disk, whose files are called pieces: an index in memory, a limit of bytes, a lock between processes,
eviction. Writes whole files or none.

    KEY.safetensors            a piece
    KEY.PROCESS.partial        a piece that is being written; left behind by a process that was killed
    mlxspec-prefix.lock        locked for every change; it counts the changes, so that others know when to look again

Readers take no lock: files are never changed, only added, replaced whole and removed. Whoever changes anything holds the lock, looks again
if somebody else has changed something, and removes what others have left. A file that is no piece is not touched.

Knows files, labels and when they were used; knows no models and no arrays of theirs. The index may be asked from any thread; one thread
changes the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import heapq
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlxspec.engine.prefix_disk.piece import (
    Bytes,
    Label,
    Stored,
    decoded,
    encoded,
    header_bytes,
    read_label,
)
from mlxspec.engine.prefix_store import TARGET
from mlxspec.errors import ConfigError, MlxspecError, StorageError
from mlxspec.platform.folders import make_private, wanted_cache_folder

LOCK = "mlxspec-prefix.lock"
SPARE = 256 << 20  # bytes of the disk that are left to others
_SUFFIX = ".safetensors"
_PIECE = re.compile(r"[0-9a-f]{64}\.safetensors")
_PARTIAL = re.compile(r"[0-9a-f]{64}\.[0-9]+\.partial")
_COUNT = 8  # bytes of the lock file
_LOCK_SECONDS = 10.0  # a process that holds the lock for longer has been stopped
_log = logging.getLogger("mlxspec")


def default_folder() -> Path:
    """Where pieces lie unless somebody names a folder."""
    return wanted_cache_folder() / "prefix"


class DiskFiles:
    """The calls by which a folder changes; tests put failures here."""

    def write(self, path: Path, parts: Sequence[Bytes]) -> None:
        """A new file, with its bytes on the disk."""
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            self.sync(file.fileno())

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def rename(self, path: Path, target: Path) -> None:
        path.replace(target)

    def sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def use(self, path: Path, when: int) -> None:
        """when: nanoseconds."""
        os.utime(path, ns=(when, when))

    def count(self, descriptor: int, number: int) -> None:
        os.pwrite(descriptor, number.to_bytes(_COUNT, "little"), 0)

    def free(self, path: Path) -> int:
        return shutil.disk_usage(path).free


@dataclass
class PieceEntry:
    """A piece of the index. size: bytes of its file; used: nanoseconds."""

    label: Label
    size: int
    used: int


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """What a folder holds of one model. num_states: texts that can be continued; used: nanoseconds, the newest."""

    model: str
    num_states: int
    nbytes: int
    used: int


class PieceFolder:
    """path, limit (bytes of all files; None: for looking only, nothing is written). nbytes: of the pieces."""

    def __init__(self, path: Path, limit: int | None, files: DiskFiles | None = None) -> None:
        """Makes the folder and reads the labels of what is in it. Raises ConfigError where it cannot be used, or holds other things."""
        self.path, self.limit, self._files = path, limit, files or DiskFiles()
        self.nbytes = 0
        self._index: dict[str, PieceEntry] = {}
        self._ends: dict[str, dict[str, PieceEntry]] = {}  # by parent
        self._mutex = threading.Lock()
        self._seen = -1  # changes of the folder that the index knows
        self._suspects: set[str] = set()  # files that were no whole pieces when they were read
        self._said: set[str] = set()
        self._descriptor = -1
        try:
            if path.exists() and not (path / LOCK).exists() and any(path.iterdir()):
                raise ConfigError(
                    f"{path} holds other files; name an empty folder for the prefix store, or one that is not there yet."
                )
            make_private(path)
            self._descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._scan()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"The prefix store cannot use the folder {path}: {error.strerror or error}."
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    # --- the index

    def get(self, key: str) -> PieceEntry | None:
        with self._mutex:
            return self._index.get(key)

    def ends(self, parent: str) -> list[PieceEntry]:
        """Ends behind a block, the longest first."""
        with self._mutex:
            found = list(self._ends.get(parent, {}).values())
        return sorted(found, key=lambda e: -e.label.length)

    @property
    def entries(self) -> list[PieceEntry]:
        with self._mutex:
            return list(self._index.values())

    # --- reading

    def read(self, key: str) -> tuple[Label, dict[str, Stored]] | None:
        """A piece as it was written, None where it is not there any more. What is there and has been changed is removed."""
        try:
            return self._read(key + _SUFFIX)
        except OSError:
            self._forget(key)
        except MlxspecError:
            self._forget(key)
            self._suspects.add(key + _SUFFIX)
            with contextlib.suppress(OSError), self._locked():
                pass  # which removes it
        return None

    def _read(self, name: str) -> tuple[Label, dict[str, Stored]]:
        with (self.path / name).open("rb") as file:
            data = np.empty(os.fstat(file.fileno()).st_size, np.uint8)
            num_read = file.readinto(data)  # type: ignore[attr-defined]
        return decoded(data[:num_read], name)

    def use(self, keys: Iterable[str]) -> None:
        """These pieces have been used now, all together."""
        now = time.time_ns()
        for key in keys:
            with self._mutex:
                entry = self._index.get(key)
                if entry is None:
                    continue
                entry.used = now
            try:
                self._files.use(self.path / (key + _SUFFIX), now)
            except OSError:
                self._forget(key)

    # --- writing

    def write(self, label: Label, tensors: Mapping[str, Stored]) -> bool:
        """Add a piece, or replace it. Returns False for one that is larger than the folder may be. Raises OSError where the disk refuses or
        is nearly full. The folder is as it was then, less what was dropped to make room."""
        parts = encoded(label, tensors)
        size = sum(len(part) for part in parts)
        if self.limit is None or size > self._room:
            return False
        with self._locked():
            self._drop(label.key)
            self._make_room(size)
            if self._files.free(self.path) < size + SPARE:
                raise OSError(errno.ENOSPC, "the disk is nearly full")
            self._changes()
            partial = self.path / f"{label.key}.{os.getpid()}.partial"
            try:
                self._files.write(partial, parts)
                self._files.rename(partial, self.path / (label.key + _SUFFIX))
            except OSError:
                self._seen = -1  # look again: something may be left
                with contextlib.suppress(OSError):
                    self._files.remove(partial)
                raise
            self._add(PieceEntry(label, size, time.time_ns()))
            self._files.sync_folder(self.path)
        return True

    def tidy(self) -> None:
        """Remove what processes that were killed have left, and what is above the limit. Raises OSError."""
        with self._locked():
            self._make_room(0)

    def clear(self) -> tuple[int, int]:
        """Remove all pieces, whoever wrote them: how many, and their bytes. Raises StorageError."""
        try:
            with self._locked():
                num, nbytes = len(self._index), self.nbytes
                for key in list(self._index):
                    self._drop(key)
        except OSError as error:
            raise StorageError(
                f"The prefix store in {self.path} cannot be cleared: {error.strerror or error}."
            ) from error
        return num, nbytes

    # --- what only the owner of the lock does

    @property
    def _room(self) -> int:
        """Bytes that pieces may take: the lock is a file too."""
        return max(0, (self.limit or 0) - _COUNT)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone in the folder, with an index that knows everything in it. Raises OSError."""
        self._lock()
        try:
            count = int.from_bytes(os.pread(self._descriptor, _COUNT, 0), "little")
            is_stale, self._seen = count != self._seen, count
            if is_stale or self._suspects:
                try:
                    self._remove_broken()
                    self._scan(is_locked=True)
                except BaseException:
                    self._seen = -1
                    raise
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _lock(self) -> None:
        until = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    raise OSError(errno.EAGAIN, "another process keeps the folder locked") from None
                time.sleep(0.005)

    def _changes(self) -> None:
        """Others must look again; told before anything changes, so that a crash hides nothing."""
        self._seen = (self._seen + 1) % (1 << 8 * _COUNT)  # whatever the file held
        self._files.count(self._descriptor, self._seen)

    def _scan(self, *, is_locked: bool = False) -> None:
        """Bring the index up to date with the folder. With the lock, leftovers are removed too."""
        there: set[str] = set()
        others = 0
        with os.scandir(self.path) as found:
            for item in found:
                try:
                    if item.name == LOCK:
                        continue
                    if _PARTIAL.fullmatch(item.name):
                        if is_locked:
                            self._files.remove(self.path / item.name)
                    elif _PIECE.fullmatch(item.name) and item.is_file(follow_symlinks=False):
                        if self._look(item):
                            there.add(item.name.removesuffix(_SUFFIX))
                    else:
                        others += 1
                except FileNotFoundError:  # another process has just removed it
                    continue
        for key in [k for k in self._index if k not in there]:
            self._forget(key)
        if others:
            self._say(f"{others} other files in the prefix store's folder {self.path} are left alone.")
        if is_locked:
            self._remove_broken()

    def _remove_broken(self) -> None:
        """Read suspects once more, alone in the folder, and remove those that are no whole pieces."""
        suspects, self._suspects = self._suspects, set()
        why = []
        for name in sorted(suspects):
            try:
                self._read(name)
            except OSError:  # it is gone, or cannot be read now
                continue
            except MlxspecError as error:
                self._changes()
                self._files.remove(self.path / name)
                why.append(str(error).rstrip("."))
        if why:
            _log.warning("Damaged files of the prefix store on disk were removed (%d): %s.", len(why), why[0])

    def _look(self, item: os.DirEntry[str]) -> bool:
        """Whether a file is a piece; its entry is right then."""
        info = item.stat(follow_symlinks=False)
        key = item.name.removesuffix(_SUFFIX)
        known = self._index.get(key)
        if known is not None and known.size == info.st_size:
            known.used = max(known.used, info.st_mtime_ns)
            return True
        try:
            with open(item.path, "rb") as file:
                first = file.read(8)
                first += file.read(header_bytes(first, info.st_size, item.name) - 8)
            label = read_label(first, info.st_size, item.name)
        except MlxspecError:
            self._suspects.add(item.name)
            return False
        self._add(PieceEntry(label, info.st_size, info.st_mtime_ns))
        return True

    def _make_room(self, size: int) -> None:
        """Drop the least recently used pieces until `size` more bytes are within the limit."""
        if self.limit is None or self.nbytes + size <= self._room:
            return
        waiting = [(e.used, -e.label.length, key) for key, e in self._index.items()]
        heapq.heapify(waiting)
        while self.nbytes + size > self._room and waiting:
            used, length, key = heapq.heappop(waiting)
            when = self._used(key)
            if when is not None and when > used:  # another process has used it
                heapq.heappush(waiting, (when, length, key))
                continue
            self._drop(key)

    def _used(self, key: str) -> int | None:
        try:
            return (self.path / (key + _SUFFIX)).stat().st_mtime_ns
        except OSError:
            return None

    def _drop(self, key: str) -> None:
        if key in self._index:
            self._changes()
            self._files.remove(self.path / (key + _SUFFIX))
            self._forget(key)

    def _add(self, entry: PieceEntry) -> None:
        self._forget(entry.label.key)
        with self._mutex:
            self._index[entry.label.key] = entry
            self.nbytes += entry.size
            if entry.label.kind == "end":
                self._ends.setdefault(entry.label.parent, {})[entry.label.key] = entry

    def _forget(self, key: str) -> None:
        with self._mutex:
            entry = self._index.pop(key, None)
            if entry is None:
                return
            self.nbytes -= entry.size
            others = self._ends.get(entry.label.parent)
            if others is not None:
                others.pop(key, None)
                if not others:
                    del self._ends[entry.label.parent]

    def _say(self, sentence: str) -> None:
        """Once."""
        if sentence not in self._said:
            self._said.add(sentence)
            _log.warning(sentence)


def summary(folder: PieceFolder) -> list[StoredModel]:
    """By name of the model, the last used first."""
    by_model: dict[str, list[PieceEntry]] = {}
    for entry in folder.entries:
        by_model.setdefault(entry.label.model, []).append(entry)
    found = [
        StoredModel(
            model=model,
            num_states=sum(e.label.kind == "end" and e.label.part == TARGET for e in entries),
            nbytes=sum(e.size for e in entries),
            used=max(e.used for e in entries),
        )
        for model, entries in by_model.items()
    ]
    return sorted(found, key=lambda m: -m.used)
