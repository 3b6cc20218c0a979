"""Single tensors out of a repository of the hub, fetched as byte ranges of its safetensors files.

A file's first bytes say where each tensor lies, and the hub answers requests for ranges, so a head of 100 MB is fetched out of a file of
5 GB with 100 MB of traffic. The fetched tensors become one safetensors file: a header of our own, then the ranges one behind the other.
That file grows from its beginning, so a fetch that broke off goes on where it stopped.

Nothing of the repository enters the hub's cache: its config and its index are read into memory. Knows files, headers and ranges; does not
know which tensors are wanted, or what for.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mlxspec.errors import ModelError
from mlxspec.loading import download, progress, repositories
from mlxspec.loading.safetensors import TensorEntry, entries, header_length, header_of

_LARGEST_JSON = 64 << 20  # bytes of a config or an index


Held = dict[str, tuple[int, dict[str, TensorEntry]]]  # by file, where its data begins and its tensors


class Repository(NamedTuple):
    """A repository as the hub describes it. sizes: bytes by file name. base_models: what its card names as `base_model`."""

    repo: str
    commit: str
    sizes: Mapping[str, int]
    base_models: tuple[str, ...]


class FileRange(NamedTuple):
    """Bytes begin to end of a file."""

    file: str
    begin: int
    end: int


class Selection(NamedTuple):
    """Tensors of a repository that are to become a file of their own. header: its first bytes; pieces: what follows, in order."""

    repo: str
    commit: str
    tensors: Mapping[str, TensorEntry]
    header: bytes
    pieces: tuple[FileRange, ...]

    @property
    def data_bytes(self) -> int:
        """To be fetched."""
        return sum(p.end - p.begin for p in self.pieces)

    @property
    def size(self) -> int:
        """Of the file."""
        return len(self.header) + self.data_bytes

    @property
    def key(self) -> str:
        """Of just this content: 32 hexadecimal digits."""
        told = json.dumps([self.repo, self.commit, self.pieces])
        return hashlib.sha256(self.header + told.encode()).hexdigest()[:32]


def look(repo: str, revision: str | None = None) -> Repository:
    """What the hub says of a repository. Fetches no file. Raises ModelError where it has none, or cannot be reached."""
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
    """A JSON object of the repository. Raises ModelError."""
    if name not in where.sizes:
        raise ModelError(f"{where.repo} has no {name}.")
    if where.sizes[name] > _LARGEST_JSON:
        raise ModelError(f"{name} of {where.repo} is larger than any such file.")
    raw = _read(where, FileRange(name, 0, where.sizes[name]))
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name} of {where.repo} is no JSON.") from error
    if not isinstance(found, dict):
        raise ModelError(f"{name} of {where.repo} is no JSON object.")
    return found


def headers(where: Repository, files: Iterable[str]) -> Held:
    """By safetensors file, where its data begins and what it holds. Fetches headers only. Raises ModelError."""
    found = {}
    for name in files:
        size = where.sizes[name]
        length = header_length(_read(where, FileRange(name, 0, min(8, size))), size, name)
        begin = 8 + length
        found[name] = begin, entries(_read(where, FileRange(name, 8, begin)), size - begin, name)
    return found


def select(where: Repository, held: Held, wanted: Callable[[str, str], bool]) -> Selection:
    """Of what files hold, the tensors that are `wanted` by file and name. Raises ModelError for a name that is wanted from two files."""
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


def fetch(wanted: Selection, part: Path, path: Path) -> Path:
    """The selection as the file `path`, which is there whole or not at all. part: what grows until it is complete; what a former try left
    there is gone on from. Raises ModelError, StorageError."""
    if path.is_file() and path.stat().st_size == wanted.size:
        return path
    part.parent.mkdir(parents=True, exist_ok=True)
    with (
        download.explained(wanted.repo, wanted.commit),
        part.open("ab") as out,
        download.alone(out, wanted.repo),
        progress.steps(f"fetching the MTP head of {wanted.repo}", wanted.size) as step,
    ):
        have = _checked_length(part, wanted)
        out.truncate(have)
        out.seek(have)
        step(have)
        out.write(wanted.header[have:])
        places: dict[str, tuple[str, dict[str, str]]] = {}
        at = len(wanted.header)
        for piece in wanted.pieces:
            length = piece.end - piece.begin
            done = min(max(have - at, 0), length)
            if done < length:
                if piece.file not in places:
                    places[piece.file] = download.location(wanted.repo, wanted.commit, piece.file)
                rest = piece._replace(begin=piece.begin + done)
                _copy(places[piece.file], rest, _Sink(out, length - done), step)
            at += length
        out.flush()
        os.fsync(out.fileno())
        part.replace(path)
    return path


def _checked_length(part: Path, wanted: Selection) -> int:
    """Bytes of a former try that can be gone on from: 0 where it was for something else."""
    begin = len(wanted.header)
    with part.open("rb") as file:
        own = file.read(begin)
    size = part.stat().st_size
    return min(size, wanted.size) if own == wanted.header[: len(own)] else 0


def _read(where: Repository, piece: FileRange) -> bytes:
    """Some bytes of a file, into memory."""
    buffer = io.BytesIO()
    if piece.begin < piece.end:
        with download.explained(where.repo, where.commit):
            place = download.location(where.repo, where.commit, piece.file)
            _copy(place, piece, _Sink(buffer, piece.end - piece.begin), lambda _: None)
    return buffer.getvalue()


class _Sink:
    """A file to write `most` bytes to. A server that ignores the range it was asked for sends a whole file, which must not come here."""

    def __init__(self, out: Any, most: int) -> None:
        self._out, self._left, self._written = out, most, 0

    def write(self, data: bytes) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise ModelError("The server sends more than the bytes that it was asked for; try again later.")
        self._written += len(data)
        return int(self._out.write(data))

    def tell(self) -> int:
        return self._written

    def seek(self, place: int) -> None:
        """The hub's library begins anew where a server does not resume."""
        raise ModelError("The server does not resume a download that broke off; try again later.")


def _copy(place: tuple[str, dict[str, str]], piece: FileRange, out: _Sink, step: progress.Step) -> None:
    """A range of a file, taken up again where the connection breaks. place: of the file, see download.location."""
    from huggingface_hub.file_download import http_get

    url, headers = place
    asked = {"Range": f"bytes={piece.begin}-{piece.end - 1}", "Accept-Encoding": "identity"}
    http_get(
        url,
        out,
        headers=headers | asked,
        expected_size=piece.end - piece.begin,
        tqdm_class=download.counter(step),
    )
