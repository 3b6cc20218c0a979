"""A private folder of files that are written whole, within a limit of bytes.

    NAME.safetensors           a file: tensors and metadata in the safetensors format, with a checksum over all of it
    NAME.safetensors.PID.new   a file that is being written; if its process is killed, the next process that locks the folder removes it
    mlxspec.lock               locked by the process that writes, makes room or clears

A file is written under another name, flushed and renamed, so it gets its name only when it is complete. A crash loses the file that was
being written and no other, and a reader, which takes no lock, never sees a part of a file. The checksum is compared at each read; a file
that has changed is removed and treated as missing. Room is made before a write: the least recently used file is removed first, by its
modification time, which each use sets. Only regular files are opened, and opening never waits.

The prefix cache on disk (prefix/disk.py) and earlier texts (text_files.py) keep their files with this module. After loading, files are
accessed only in a thread for files, never in the engine's thread. This module deals with bytes, names and times, and not with models,
owners or MLX.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlxspec.errors import ConfigError, MlxspecError, StorageError
from mlxspec.loading.safetensors import TensorEntry, entries, header_length, header_of
from mlxspec.platform.folders import make_private

LOCK = "mlxspec.lock"
REST_SECONDS = 60.0  # without writing, after the disk has refused
SPARE = 256 << 20  # bytes of the disk that are left to others
_SUFFIX = ".safetensors"
_PARTIAL = re.compile(re.escape(_SUFFIX) + r"\.[0-9]+\.new$")
_BLOCK = 4096  # bytes; a file takes a multiple of it
_HEADER_AT_MOST = 4 << 20  # bytes
_LOCK_SECONDS = 10.0  # a process that holds the lock for longer has been stopped
_UNKNOWN = "0" * 64  # in the place of the checksum until it is known
_log = logging.getLogger("mlxspec")


class Stored(NamedTuple):
    """A tensor in host memory. dtype: its name in the safetensors format. pieces: arrays (...) uint8 of the tensor's bytes; joined along
    axis 2 they are the tensor."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[NDArray[np.uint8]]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def data(self) -> NDArray[np.uint8]:
        """Return the bytes of the whole tensor, (n,) uint8."""
        whole = self.pieces[0] if len(self.pieces) == 1 else np.concatenate(self.pieces, axis=2)
        return np.ascontiguousarray(whole).reshape(-1)


class KeptFile(NamedTuple):
    """A file's size and last use. size: bytes. used: nanoseconds since 1970; 0 for a file that is removed before all others."""

    size: int
    used: int


class KeptFiles:
    """A folder of files within a limit of bytes. path: the folder. limit: bytes that its files may take, None for a process that only
    reads. found: the files by name, without the suffix; the mapping is replaced at every change, so any thread may read it.
    num_failed: number of writes that the disk refused."""

    def __init__(self, path: Path, limit: int | None, what: str) -> None:
        """Make the folder if it is missing, and list its files. what: name of the files in messages ("The prefix cache"). Raises
        ConfigError where the folder cannot be used, or holds files of another kind."""
        self.path, self.limit, self._what = path, limit, what
        self.found: Mapping[str, KeptFile] = {}
        self.num_failed = 0
        self._rests_until = 0.0
        self._seen = -1  # the folder's modification time when it was looked through
        try:
            names = {item.name for item in path.iterdir()} if path.exists() else set()
            if names and LOCK not in names:
                raise ConfigError(
                    f"{path} holds other files; remove them if an earlier version wrote them, else name an empty folder."
                )
            make_private(path)
            self.look()
        except OSError as error:
            raise ConfigError(f"{what} cannot use the folder {path}: {error.strerror or error}.") from error

    @property
    def nbytes(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size for file in self.found.values())

    @property
    def rests(self) -> bool:
        """Return whether nothing is written now because the disk refused a write less than REST_SECONDS ago."""
        return time.monotonic() < self._rests_until

    def look(self) -> None:
        """Update `found` from the folder, if the folder has changed."""
        seen = self.path.stat().st_mtime_ns
        if seen == self._seen:
            return
        found: dict[str, KeptFile] = {}
        with os.scandir(self.path) as items:
            for item in items:
                if item.name.endswith(_SUFFIX) and not item.name.startswith(
                    "."
                ):  # `._NAME`: macOS's, on drives of other systems
                    with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                        info = item.stat(follow_symlinks=False)
                        if stat.S_ISREG(info.st_mode):
                            found[item.name.removesuffix(_SUFFIX)] = KeptFile(info.st_size, info.st_mtime_ns)
        self.found, self._seen = found, seen

    def metadata(self, name: str) -> dict[str, str]:
        """Return the metadata of a file; an empty dict where the file cannot be read. The tensors are neither read nor checked."""
        with contextlib.suppress(OSError, MlxspecError), self._open(name) as file:
            return _head(file, name)[2]
        return {}

    def read(self, name: str, take: Callable[[str, Stored], bool]) -> dict[str, str] | None:
        """Read a file, and call `take` with each tensor's name and data until it returns False. Return the metadata where the whole file
        was read and its checksum is right, else None; the tensors that `take` received must not be used then. A damaged file is
        removed."""
        try:
            with self._open(name) as file:
                head, found, metadata = _head(file, name)
                checksum = metadata.pop("checksum", "")
                digest = hashlib.sha256(head.replace(checksum.encode() or b" ", _UNKNOWN.encode(), 1))
                for tensor, entry in sorted(found.items(), key=lambda item: item[1].begin):
                    data = np.empty(entry.end - entry.begin, np.uint8)
                    if file.readinto(data) != len(data):  # type: ignore[attr-defined]
                        raise StorageError(f"{name} is cut short.")
                    digest.update(data)
                    if not take(tensor, Stored(entry.dtype, entry.shape, [data])):
                        return None
                if not _is_same(digest.hexdigest(), checksum) or file.read(1):
                    raise StorageError(f"{name} has changed since it was written.")
                return metadata
        except FileNotFoundError:
            self.forget(name)
        except OSError as error:
            _log.warning("%s cannot read a file (%s).", self._what, error.strerror or error)
            self.forget(name)
        except MlxspecError as error:
            _log.warning("%s removes a damaged file: %s", self._what, error)
            self.discard(name)
        return None

    def write(
        self,
        name: str,
        tensors: Mapping[str, Stored],
        metadata: Mapping[str, str],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Write a file, or replace the file of this name; return whether it was written. It is not where it is larger than the folder's
        limit, where the disk refuses or is nearly full, within REST_SECONDS after a refusal, and where `is_wanted`, called before
        each tensor, returns False. The folder is then as it was, except that least recently used files may have been removed to make
        room."""
        shapes = {key: TensorEntry(t.dtype, t.shape, 0, t.nbytes) for key, t in tensors.items()}
        head = header_of(shapes, {"checksum": _UNKNOWN, **metadata})
        size = len(head) + sum(t.nbytes for t in tensors.values())
        if self.rests or self.limit is None or _taken(size) > self.limit:
            self.num_failed += 1
            return False
        path = self.path / f"{name}{_SUFFIX}.{os.getpid()}.new"
        try:
            with self._locked():
                self.forget(name, remove=True)
                self._make_room(_taken(size))
                if shutil.disk_usage(self.path).free < size + SPARE:
                    raise OSError(errno.ENOSPC, "the disk is nearly full")
                try:
                    if not _write(path, head, tensors, is_wanted):
                        return False
                    path.replace(self.path / (name + _SUFFIX))
                finally:
                    path.unlink(missing_ok=True)
                _sync(self.path)
                self._set({**self.found, name: KeptFile(size, time.time_ns())})
        except OSError as error:
            self.num_failed += 1
            self._rests_until = time.monotonic() + REST_SECONDS
            why = error.strerror or error
            _log.warning(
                "%s could not be written (%s). It is tried again in %d seconds.",
                self._what,
                why,
                REST_SECONDS,
            )
            return False
        return True

    def use(self, name: str, when: int | None = None) -> None:
        """Note that a file was used at `when`, in nanoseconds since 1970; None: now."""
        when = time.time_ns() if when is None else when
        try:
            os.utime(self.path / (name + _SUFFIX), ns=(when, when), follow_symlinks=False)
        except OSError:
            self.forget(name)
        else:
            if name in self.found:
                self.found = {**self.found, name: KeptFile(self.found[name].size, when)}

    def tidy(self) -> None:
        """Remove the partial files that killed processes have left, and the least recently used files beyond the limit. Raises OSError."""
        with self._locked():
            self._make_room(0)

    def _open(self, name: str) -> BinaryIO:
        """Open a file for reading and return it. Raises OSError where it is no regular file."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self.path / (name + _SUFFIX), flags)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is no regular file")
        return open(descriptor, "rb")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[tuple[int, int]]:
        """Lock the folder against other processes, remove the partial files of killed processes, and update `found`. Yields the number
        of those partial files and their bytes. Raises OSError where another process keeps the lock."""
        descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        until = time.monotonic() + _LOCK_SECONDS
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise OSError(errno.EAGAIN, "another process keeps the folder locked") from None
                    time.sleep(0.005)
            left = [path for path in self.path.iterdir() if _PARTIAL.search(path.name)]
            sizes = [path.lstat().st_size for path in left]
            for path in left:
                path.unlink()
            self.look()
            yield len(left), sum(sizes)
        finally:
            os.close(descriptor)

    def _make_room(self, size: int) -> None:
        """Remove the least recently used files until `size` more bytes are within the limit. The caller holds the lock."""
        held = sum(_taken(file.size) for file in self.found.values())
        most = None if self.limit is None else self.limit - size
        if most is None or held <= most:
            return
        self._seen = -1
        self.look()  # another process may have used some
        for name, file in sorted(self.found.items(), key=lambda item: item[1].used):
            if held <= most:
                break
            self.forget(name, remove=True)
            held -= _taken(file.size)

    def forget(self, name: str, *, remove: bool = False) -> None:
        """Remove a file from `found`. remove: delete it from the folder, too; the caller must hold the lock then."""
        if name in self.found:
            if remove:
                (self.path / (name + _SUFFIX)).unlink(missing_ok=True)
            self._set({other: file for other, file in self.found.items() if other != name})

    def discard(self, name: str) -> None:
        """Delete a file that can be of no use to any process, without waiting for the lock."""
        with contextlib.suppress(OSError):
            (self.path / (name + _SUFFIX)).unlink(missing_ok=True)
        self.forget(name)

    def _set(self, found: Mapping[str, KeptFile]) -> None:
        """Replace `found` after a change that this process has made to the folder."""
        self.found = found
        with contextlib.suppress(OSError):
            self._seen = self.path.stat().st_mtime_ns


def _is_same(digest: str, checksum: str) -> bool:
    return digest == checksum


def _taken(size: int) -> int:
    """Return the bytes that a file of this size takes on the disk."""
    return -(-size // _BLOCK) * _BLOCK


def _write(path: Path, head: bytes, tensors: Mapping[str, Stored], is_wanted: Callable[[], bool]) -> bool:
    """Write a new file and flush it to the disk; return False where `is_wanted` returned False before one of the tensors. head: the
    header, with a placeholder for the checksum."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        digest = hashlib.sha256(head)
        file.write(head)
        for tensor in tensors.values():
            if not is_wanted():
                return False
            data = tensor.data
            digest.update(data)
            file.write(data)
        file.seek(0)
        file.write(head.replace(_UNKNOWN.encode(), digest.hexdigest().encode(), 1))
        file.flush()
        os.fsync(file.fileno())
    return True


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _head(file: BinaryIO, name: str) -> tuple[bytes, dict[str, TensorEntry], dict[str, str]]:
    """Return the header's bytes, its tensors by name, and its metadata. name: of the file, for messages. Raises MlxspecError where the
    header is damaged or does not match the file's size."""
    size = os.fstat(file.fileno()).st_size
    first = file.read(8)
    length = header_length(first, size, name)
    if length > _HEADER_AT_MOST:
        raise StorageError(f"{name} has a header that is too long.")
    text = file.read(length)
    found = entries(text, size - 8 - length, name)
    if sum(entry.end - entry.begin for entry in found.values()) != size - 8 - length:
        raise StorageError(f"{name} has bytes that belong to no tensor.")
    metadata = json.loads(text).get("__metadata__")
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise StorageError(f"{name} has no metadata.")
    return first + text, found, metadata
