"""Earlier texts on disk, for the drafter `suffix` of later processes: one file for each vocabulary and owner, to which pieces are appended.

    DIGEST-OWNER.tokens    pieces: MARK, number of tokens, CRC-32 of what follows; then the tokens, int32, little-endian

A piece is written by one call, under a lock between processes. A process that is killed loses the piece it was writing and no other: who
reads looks for the next mark behind what is damaged. The folder is private (0700, files 0600) and takes `limit` bytes at most: room is made
before a piece is written, from the file that was written longest ago, and of one's own file the older half goes. Owners and vocabularies
are known by digests. Whatever the disk refuses costs the texts on it, and no answer; it is logged once. Knows files and ids; no model.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from mlxspec.drafters.text_index import TextIndex
from mlxspec.errors import ConfigError, StorageError
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.platform.folders import make_private, wanted_cache_folder

_MARK = b"mlxtext1"
_HEAD = struct.Struct("<8sII")
_SUFFIX = ".tokens"
_LOCK, _LOCK_SECONDS = "lock", 1.0
_AT_ONCE = 1 << 18  # tokens that are indexed at once
_log = logging.getLogger("mlxspec")


def texts_folder() -> Path:
    return wanted_cache_folder() / "texts"


def open_texts(budget: int, disk: int | None, tokenizer: Tokenizer | None) -> TextIndex:
    """budget: bytes of memory; disk: bytes of files, None or 0 for none. Raises ConfigError for files that cannot be kept."""
    index = TextIndex(budget)
    if disk and tokenizer is None:
        raise ConfigError("Without a tokenizer no texts are kept on disk; leave past_texts_disk out.")
    if disk and tokenizer is not None:
        files = TextFiles(texts_folder(), disk, tokenizer.digest[:16])
        files.fill(index)
        index.keep = files.append
    return index


class TextFiles:
    """path, limit: see the module."""

    def __init__(self, path: Path, limit: int, digest: str) -> None:
        """Raises ConfigError for a folder that cannot be used."""
        self.path, self._limit, self._digest = path, limit, digest
        self._has_failed = False
        try:
            make_private(path)
        except OSError as error:
            raise ConfigError(f"Texts cannot be kept in {path}: {error.strerror or error}.") from error

    def fill(self, index: TextIndex) -> None:
        """Read what is here for this vocabulary, the file that was written last at the end."""
        most = min(_AT_ONCE, index.room // 8)
        for file in _files(self.path):
            digest, _, owner = file.stem.partition("-")
            if digest != self._digest:
                continue
            waiting: list[np.ndarray] = []
            for piece in [*_pieces(self._read(file, index.room)), None]:
                if waiting and (piece is None or sum(map(len, waiting)) + len(piece) > most):
                    index.add(owner, np.concatenate(waiting))
                    waiting = []
                if piece is not None:
                    waiting += [piece, np.full(1, -1, np.int32)]

    def _read(self, file: Path, most: int) -> bytes:
        """A file's last `most` tokens or more, nothing of one that the disk refuses."""
        try:
            with open(file, "rb") as opened:
                opened.seek(-min(4 * most, opened.seek(0, os.SEEK_END)), os.SEEK_END)
                return opened.read()
        except OSError as error:
            _log.warning("Texts in %s cannot be read: %s.", file, error.strerror or error)
            return b""

    def append(self, owner: str, tokens: Sequence[int]) -> None:
        """A piece of a text. What it begins with in common with earlier ones is in it once more."""
        data = np.asarray(tokens, "<i4").tobytes()
        piece = _HEAD.pack(_MARK, len(tokens), zlib.crc32(data)) + data
        if not tokens or len(piece) > self._limit // 2 or self._has_failed:
            return
        try:
            with _locked(self.path):
                file = self.path / f"{self._digest}-{owner}{_SUFFIX}"
                self._make_room(len(piece), file)
                descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                try:
                    if os.write(descriptor, piece) != len(piece):
                        raise OSError("the disk took a part only")
                finally:
                    os.close(descriptor)
        except OSError as error:
            self._has_failed = True
            _log.warning("Texts are no longer kept in %s: %s.", self.path, error.strerror or error)

    def _make_room(self, more: int, own: Path) -> None:
        files = _files(self.path)
        held = sum(f.stat().st_size for f in files)
        for file in files:
            if held + more <= self._limit:
                return
            if file != own:
                held -= file.stat().st_size
                file.unlink()
        if held + more > self._limit:
            kept = own.read_bytes()[-(self._limit // 2) :][: self._limit - more]
            half = own.with_suffix(".new")
            half.touch(0o600)
            half.write_bytes(kept[max(0, kept.find(_MARK)) :])
            half.replace(own)


def clear_texts() -> tuple[int, int]:
    """Remove all texts. Returns how many files there were, and their bytes. Raises StorageError where the disk refuses."""
    path = texts_folder()
    if not path.is_dir():
        return 0, 0
    try:
        return _cleared(path)
    except OSError as error:
        raise StorageError(f"The texts in {path} could not be removed: {error.strerror or error}.") from error


def _cleared(path: Path) -> tuple[int, int]:
    with _locked(path):
        sizes = [(f, f.stat().st_size) for f in _files(path)]
        for file, _ in sizes:
            file.unlink()
    return len(sizes), sum(size for _, size in sizes)


def texts_size() -> int:
    """Bytes of all texts."""
    return sum(f.stat().st_size for f in _files(texts_folder()))


def _files(path: Path) -> list[Path]:
    """Of all vocabularies and owners, what was written longest ago first. What is no plain file is none of ours: opening a pipe waits for
    ever."""
    found: list[tuple[int, str, Path]] = []
    for file in path.glob(f"*{_SUFFIX}"):
        with suppress(FileNotFoundError):  # another process has removed it
            held = file.stat()
            if stat.S_ISREG(held.st_mode):
                found.append((held.st_mtime_ns, file.name, file))
    return [file for _, _, file in sorted(found)]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + _LOCK_SECONDS
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise OSError("another process does not let go of its lock") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _pieces(data: bytes) -> Iterator[np.ndarray]:
    """Whole pieces; what is damaged is passed over."""
    at = data.find(_MARK)
    while at >= 0:
        if at + _HEAD.size <= len(data):
            _, num, check = _HEAD.unpack_from(data, at)
            body = data[at + _HEAD.size : at + _HEAD.size + 4 * num]
            if len(body) == 4 * num and zlib.crc32(body) == check:
                yield np.frombuffer(body, "<i4").astype(np.int32)
                at = data.find(_MARK, at + _HEAD.size + len(body))
                continue
        at = data.find(_MARK, at + 1)
