"""Fetches single tensors of a repository on the hub, as byte ranges of its safetensors files, with huggingface_hub's HfFileSystem.

A file's first bytes say where each tensor lies, so a head of 100 MB is fetched out of a file of 5 GB with 100 MB of traffic. The fetched
tensors become one safetensors file: a header of our own, then the ranges one behind the other. Nothing of the repository enters the hub's
cache: its config and its index are read into memory. Knows files, headers and ranges; does not know which tensors are wanted, or what for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from mlxspec.errors import ModelError, StorageError
from mlxspec.loading import download, progress, repositories
from mlxspec.loading.safetensors import TensorEntry, entries, header_length, header_of

_LARGEST_JSON = 64 << 20  # bytes of a config or an index
_AT_ONCE = 64 << 20  # bytes of one request
_ONE = {"F16": b"\0\x3c", "BF16": b"\x80\x3f", "F32": b"\0\0\x80\x3f"}  # the number, as it is stored


Held = dict[str, tuple[int, dict[str, TensorEntry]]]  # by file, where its data begins and its tensors


class Repository(NamedTuple):
    """A repository as the hub describes it. sizes: bytes by file name. base_models: the `base_model` entries of its card."""

    repo: str
    commit: str
    sizes: Mapping[str, int]
    base_models: tuple[str, ...]


class FileRange(NamedTuple):
    """The bytes of a file from `begin` up to but without `end`."""

    file: str
    begin: int
    end: int


class Selection(NamedTuple):
    """A selection of a repository's tensors, to be fetched into one safetensors file. header: the first bytes of that file; pieces: the
    ranges whose bytes follow, in order."""

    repo: str
    commit: str
    tensors: Mapping[str, TensorEntry]
    header: bytes
    pieces: tuple[FileRange, ...]

    @property
    def data_bytes(self) -> int:
        """Return the number of bytes to fetch."""
        return sum(p.end - p.begin for p in self.pieces)

    @property
    def size(self) -> int:
        """Return the size of the whole file in bytes."""
        return len(self.header) + self.data_bytes

    @property
    def key(self) -> str:
        """Return a digest of the content, for file names: 32 hexadecimal digits."""
        told = json.dumps([self.repo, self.commit, self.pieces])
        return hashlib.sha256(self.header + told.encode()).hexdigest()[:32]


def look(repo: str, revision: str | None = None) -> Repository:
    """Return the hub's description of a repository. Fetches no file. revision: branch, tag or commit, None for `main`. Raises ModelError
    where the hub has no such repository or cannot be reached."""
    from huggingface_hub import HfApi, constants

    repositories.check_repo(repo)
    repositories.check_revision(revision)
    with download.explained(repo, revision):
        info = HfApi().model_info(
            repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
        if not isinstance(info.sha, str):
            raise ModelError(f"The hub names no commit of {repo}; try again later.")
        sizes = {s.rfilename: s.size for s in info.siblings or [] if type(s.size) is int}
        return Repository(repo, info.sha, sizes, download.base_models(info))


def read_json(where: Repository, name: str) -> dict[str, Any]:
    """Fetch a JSON file of a repository into memory; return its object. name: of the file. Raises ModelError where it is missing or
    damaged."""
    if name not in where.sizes:
        raise ModelError(f"{where.repo} has no {name}.")
    if where.sizes[name] > _LARGEST_JSON:
        raise ModelError(f"{name} of {where.repo} is larger than any such file.")
    with download.explained(where.repo, where.commit):
        raw = _reader(where.repo, where.commit)(FileRange(name, 0, where.sizes[name]))
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name} of {where.repo} is no JSON.") from error
    if not isinstance(found, dict):
        raise ModelError(f"{name} of {where.repo} is no JSON object.")
    return found


def headers(where: Repository, files: Iterable[str]) -> Held:
    """Fetch the headers of safetensors files. Returns, by file name, the offset of the file's data and its tensors by name. Raises
    ModelError where a header is damaged or cannot be fetched."""
    return {name: _parsed(where, name, raw) for name, raw in _raw_headers(where, list(files)).items()}


def write_outline(where: Repository, files: Iterable[str], folder: Path) -> None:
    """Write safetensors files into `folder` that have the tensor names, shapes and sizes of a repository's files, without fetching their
    values. Vectors are filled with ones, as norms may be; the rest is a hole, which takes no room on the disk. Fetches headers only.
    Raises ModelError, StorageError."""
    for name, raw in _raw_headers(where, list(files)).items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as out:
                out.write(raw)
                out.truncate(where.sizes[name])
                for entry in _parsed(where, name, raw)[1].values():
                    if len(entry.shape) == 1 and entry.dtype in _ONE:
                        out.seek(len(raw) + entry.begin)
                        out.write(_ONE[entry.dtype] * entry.shape[0])
        except OSError as error:
            raise StorageError(
                f"The outline of {where.repo} could not be written to {folder}: {error.strerror or error}."
            ) from error


def _raw_headers(where: Repository, files: Sequence[str]) -> dict[str, bytes]:
    """Fetch the first bytes of safetensors files, up to where their data begins; return them by file name."""
    with download.explained(where.repo, where.commit), ThreadPoolExecutor() as pool:
        read = _reader(where.repo, where.commit)

        def raw(name: str) -> bytes:
            size = where.sizes[name]
            first = read(FileRange(name, 0, min(8, size)))
            return first + read(FileRange(name, 8, 8 + header_length(first, size, name)))

        return dict(zip(files, pool.map(raw, files), strict=True))


def _parsed(where: Repository, name: str, raw: bytes) -> tuple[int, dict[str, TensorEntry]]:
    return len(raw), entries(raw[8:], where.sizes[name] - len(raw), name)


def select(where: Repository, held: Held, wanted: Callable[[str, str], bool]) -> Selection:
    """Return the selection of a repository's tensors for which `wanted(file, name)` is true. held: the files' tensors, as `headers`
    returns them. Raises ModelError where two files hold a wanted name."""
    tensors: dict[str, TensorEntry] = {}
    pieces: list[FileRange] = []
    for file, (begin, found) in held.items():
        for name, entry in sorted(found.items(), key=lambda item: item[1].begin):
            if not wanted(file, name):
                continue
            if name in tensors:
                raise ModelError(f"{where.repo} holds the tensor {name[:80]!r} twice.")
            tensors[name] = entry
            first, last = begin + entry.begin, begin + entry.end
            if pieces and pieces[-1].file == file and pieces[-1].end == first:
                pieces[-1] = pieces[-1]._replace(end=last)
            elif first < last:
                pieces.append(FileRange(file, first, last))
    return Selection(where.repo, where.commit, tensors, header_of(tensors), tuple(pieces))


def fetch(wanted: Selection, path: Path) -> Path:
    """Fetch a selection into the file `path`, unless that exists already; return the path. The file is written completely or not at all.
    Raises ModelError, StorageError."""
    if path.is_file() and path.stat().st_size == wanted.size:
        return path
    part = path.with_name(f"{path.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            download.explained(wanted.repo, wanted.commit),
            part.open("wb") as out,
            progress.steps(f"fetching the MTP head of {wanted.repo}", wanted.size) as step,
        ):
            read = _reader(wanted.repo, wanted.commit)
            out.write(wanted.header)
            step(len(wanted.header))
            for piece in wanted.pieces:
                for begin in range(piece.begin, piece.end, _AT_ONCE):
                    end = min(begin + _AT_ONCE, piece.end)
                    out.write(read(FileRange(piece.file, begin, end)))
                    step(end - begin)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _reader(repo: str, commit: str) -> Callable[[FileRange], bytes]:
    """Return a function that reads a range of a repository's file into memory. The function raises the errors of the hub's library, and
    ModelError where the server ignores the range."""
    from huggingface_hub import HfFileSystem

    hub = HfFileSystem(skip_instance_cache=True)  # one that is kept remembers refusals, whatever token comes

    def read(piece: FileRange) -> bytes:
        if piece.begin >= piece.end:
            return b""
        with hub.open(f"{repo}@{commit}/{piece.file}", "rb", cache_type="none") as file:
            file.seek(piece.begin)
            found = bytes(file.read(piece.end - piece.begin))
        if len(found) != piece.end - piece.begin:
            raise ModelError("The server does not send the bytes that it was asked for; try again later.")
        return found

    return read
