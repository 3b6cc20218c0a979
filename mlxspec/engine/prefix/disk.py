"""The prefix cache on disk: one file for each state, from which a later process continues texts.

A file holds all that is kept after one text: by part its keys and values, recurrent states and windows. Its header names the model (by
name, and by a signature of what computed the state), the owner and the text (by digests; token ids are in no file) and the number of
tokens. Its name contains the signature, the number of tokens and the text's digest, so that a folder is searched by names.

    ROOT-TOKENS-KIND-TEXT.safetensors      KIND: s for the end of a system prompt, t for other anchors

Anchors of the tree are offered and written one after the other. The least recently used file is removed first (kept_files.py). A text that
continues from an earlier state of its own supersedes it: that file is removed before all others, unless it is the end of a system prompt.

The engine's thread touches no file and waits for no lock. It makes the memory of a state's arrays readable for the thread for files, which
writes from there without a copy: a few microseconds an array. In each step it converts at most SLICE bytes of what was read, or one tensor,
into arrays. The memory that a state takes while it is read is subtracted from the tree's budget by rows.py.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.cache.snapshot import Snapshot
from mlxspec.config import EngineConfig
from mlxspec.drafters.base import Drafter
from mlxspec.engine.kept_files import KeptFiles, Stored
from mlxspec.engine.prefix.signature import of_drafter, of_states, of_target
from mlxspec.engine.prefix.tree import TARGET, Hit, KeyedText, PrefixTree
from mlxspec.engine.thread import JobThread
from mlxspec.models.base import Model
from mlxspec.models.vision.base import VisionTower
from mlxspec.platform import host
from mlxspec.platform.folders import wanted_cache_folder

SLICE = 16 << 20  # bytes that become arrays at once
READ_AHEAD = 64 << 20  # bytes that may wait for the engine's thread
STATES_AT_MOST = 64  # that wait to be written
_NAMES: dict[mx.Dtype, str] = {
    mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8", mx.uint16: "U16", mx.int16: "I16", mx.float16: "F16", mx.bfloat16: "BF16",
    mx.uint32: "U32", mx.int32: "I32", mx.float32: "F32", mx.uint64: "U64", mx.int64: "I64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_log = logging.getLogger("mlxspec")


@dataclass
class DiskStats:
    """Counts of a prefix cache on disk since the engine was made. num_lost: states that left memory before they were written;
    num_failed: writes that the disk refused; num_missed: files that were expected and could not be read as they were written."""

    num_written: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    num_lost: int = 0
    num_failed: int = 0
    num_missed: int = 0


class Fetch:
    """A state of the prefix cache that is being read from its file. The file thread puts tensors in, the engine's thread takes them out.
    length: tokens of the state's text. nbytes: size of the file. has_failed: whether the file is gone or damaged."""

    def __init__(self, length: int, nbytes: int, roots: Mapping[str, str]) -> None:
        self.length, self.nbytes = length, nbytes
        self.has_failed = self.is_cancelled = False
        self.started = time.perf_counter()
        self._roots = roots
        self._changed = threading.Condition()
        self._waiting: deque[tuple[str, Stored]] = deque()
        self._nbytes = 0
        self._metadata: Mapping[str, str] | None = None
        self._arrays: dict[str, mx.array] = {}

    @property
    def is_done(self) -> bool:
        return self._metadata is not None and not self._waiting

    def put(self, name: str, tensor: Stored) -> bool:
        """Wait while READ_AHEAD bytes or more have not been taken yet, and add a tensor; return False where the fetch has been
        cancelled."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_cancelled or self._nbytes < READ_AHEAD)
            if not self.is_cancelled:
                self._waiting.append((name, tensor))
                self._nbytes += tensor.nbytes
                self._changed.notify_all()
        return not self.is_cancelled

    def finish(self, metadata: Mapping[str, str] | None) -> None:
        """Note that the reading has ended. metadata: the file's; None: reading failed, and the tensors must not be used."""
        with self._changed:
            self._metadata, self.has_failed = metadata, metadata is None
            self._changed.notify_all()

    def take(self, most: int) -> None:
        """Convert tensors that have been read into MLX arrays, until at least `most` bytes are converted or none is left."""
        while most > 0:
            with self._changed:
                if not self._waiting:
                    return
                name, (dtype, shape, pieces) = self._waiting.popleft()
                self._nbytes -= pieces[0].nbytes
                self._changed.notify_all()
            self._arrays[name] = host.from_bytes(pieces[0], _DTYPES[dtype], shape)
            most -= pieces[0].nbytes

    def wait(self, seconds: float) -> None:
        """Wait until a tensor has been read or the reading has ended, for at most this number of seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.has_failed or self.is_done, seconds)

    def cancel(self) -> None:
        """Stop the reading and drop the tensors, because no caller needs them any more."""
        with self._changed:
            self.is_cancelled = True
            self._waiting.clear()
            self._arrays.clear()
            self._changed.notify_all()

    def hit(self) -> Hit | None:
        """Return the state that was read; None where the file does not hold the expected state. Parts of drafters that this engine does
        not have are left out."""
        try:
            parts, length = {}, self.length
            for index, part in enumerate(json.loads((self._metadata or {})["parts"])):
                if part["root"] == self._roots.get(part["name"]):
                    kv = [tuple(self._numbered(f"{index}.t.{i}")) for i in range(part["layers"])]
                    point = [tuple(self._numbered(f"{index}.p.{i}")) for i in range(part["states"])]
                    parts[part["name"]] = Snapshot(part["length"], [kv], point)
            if parts[TARGET].length != length:
                return None
            return Hit(length, parts, self._arrays["hidden"])
        except (KeyError, ValueError, TypeError):
            return None

    def _numbered(self, stem: str) -> Iterator[mx.array]:
        """Yield the arrays named STEM.0, STEM.1, and so on, until one is missing. Raises KeyError where there is none."""
        num = 0
        while (name := f"{stem}.{num}") in self._arrays:
            yield self._arrays[name]
            num += 1
        if not num:
            raise KeyError(stem)


@dataclass(kw_only=True, eq=False)
class _State:
    """A state of the prefix cache that waits to be written to a file. older: names of the files that it supersedes."""

    key: bytes
    length: int
    name: str
    owner: str
    is_shared: bool
    older: Sequence[str]
    tensors: dict[str, Stored] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    is_cancelled: bool = False
    is_done: bool = False


class PrefixDisk:
    """The prefix cache on disk of one engine. Attributes: stats, files."""

    def __init__(
        self,
        files: KeptFiles,
        thread: JobThread,
        roots: Mapping[str, str],
        *,
        model: str,
    ) -> None:
        """Open the cache in a folder of files. thread: reads and writes the files. roots: for each part of a state (target, drafters)
        the signature of the model that computed it; files with another signature of the target are not used. model: its name, which
        is written into files for people to read."""
        self.files, self.stats = files, DiskStats()
        self._thread, self._roots, self._model = thread, dict(roots), model
        self._waiting: dict[bytes, _State] = {}
        self._writing: _State | None = None
        self._seen: Mapping[str, Any] | None = None
        self._lengths: list[int] = []
        self._has_said: set[str] = set()
        thread.run(partial(_try, files.tidy))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all files."""
        return self.files.nbytes

    # --- reading

    def fetch(self, text: KeyedText, known: int, room: int, most: int) -> Fetch | None:
        """Begin to read the file of the longest beginning of `text` with more than `known` and at most `most` tokens, and return the
        fetch; None where there is no such file. room: most bytes that the file may have."""
        self._thread.run(partial(_try, self.files.look))
        for length in reversed(self._own_lengths()):
            name = self._name(text, length) if known < length <= min(most, len(text)) else None
            file = None if name is None else self.files.found.get(name)
            if name is not None and file is not None and file.size <= room:
                found = Fetch(length, file.size, self._roots)
                self._thread.run(partial(self._read, found, name, text.key(length)), is_urgent=True)
                return found
        return None

    def _read(self, fetch: Fetch, name: str, key: bytes) -> None:
        """Read a file into `fetch`. Runs in the file thread. key: of the text whose state the file must hold. Any error makes the fetch
        fail, because a row waits for its end."""
        metadata: Mapping[str, str] | None = None
        try:
            metadata = self.files.read(name, fetch.put)
            if metadata is not None and not self._is_of(key, metadata):
                metadata = None
                self.files.discard(name)  # it would take room, uncounted
            if metadata is not None:
                self.files.use(name)
                self.stats.bytes_read += fetch.nbytes
        except Exception as error:
            _log.warning(
                "A file of the prefix cache could not be read (%s: %s).", type(error).__name__, error
            )
        finally:
            if metadata is None and not fetch.is_cancelled:
                self.files.forget(name)
                self.stats.num_missed += 1
            fetch.finish(metadata)

    def _is_of(self, key: bytes, metadata: Mapping[str, str]) -> bool:
        """Return whether a file's metadata belong to this model and to the text of this key."""
        return (metadata.get("signature"), metadata.get("text")) == (self._roots[TARGET], key.hex())

    # --- writing

    def offer(
        self, text: KeyedText, length: int, *, is_shared: bool = False, supersedes: bool = False
    ) -> None:
        """Queue the state after the first `length` tokens of a text to be written to the disk. Where its file exists, note only that it
        was used. is_shared: many texts begin with these tokens. supersedes: states of fewer tokens are no longer useful to this text."""
        name = self._name(text, length)
        if name is not None:
            self._thread.run(partial(self.files.use, name))
            return
        key = text.key(length)
        if key in self._waiting or (self._writing is not None and self._writing.key == key):
            return
        older: list[str] = []
        if supersedes:
            names = (self._name(text, num) for num in self._own_lengths() if num < length)
            older = [found for found in names if found is not None and "-t-" in found]
            for state in [*self._waiting.values(), *([] if self._writing is None else [self._writing])]:
                if not state.is_shared and state.length < length and text.key(state.length) == state.key:
                    self._waiting.pop(state.key, None)
                    older.append(state.name)
        name = f"{self._stem(length)}{'s' if is_shared else 't'}-{self._digest(key)}"
        self._waiting[key] = _State(
            key=key, length=length, name=name, owner=text.owner, is_shared=is_shared, older=older
        )
        if len(self._waiting) > STATES_AT_MOST:
            del self._waiting[next(iter(self._waiting))]
            self._lose("waited too long to be written")

    @property
    def has_work(self) -> bool:
        """Return whether a state waits to be written or is being written. False while the disk refuses writes."""
        return bool(self._waiting or self._writing) and not self.files.rests

    @property
    def can_work(self) -> bool:
        """Return whether a call of `work` would do something now."""
        return self.has_work and (self._writing is None or self._writing.is_done)

    def work(self, tree: PrefixTree) -> None:
        """Hand the next state to the file thread, if that has written the last one. tree: holds the states in memory. An error costs
        only the state, not a request."""
        state = self._writing
        if state is not None and not state.is_done:
            if tree.state(state.key) is None:  # its memory is wanted
                state.is_cancelled = True
            return
        self._writing = None
        try:
            self._begin(tree)
        except Exception as error:
            self._lose(f"could not be copied ({type(error).__name__}: {error})")

    def flush(self, tree: PrefixTree, seconds: float) -> bool:
        """Write all states that wait, for at most this number of seconds; return whether all were written."""
        until = time.monotonic() + seconds
        while (self.has_work or not self._thread.is_idle) and time.monotonic() < until:
            self.work(tree)
            if not self.can_work:
                time.sleep(0.001)
        return not self.has_work

    def close(self, tree: PrefixTree, seconds: float) -> None:
        """Write waiting states for at most this number of seconds, and drop the others. Nothing is written afterwards."""
        if not self.flush(tree, seconds) and not self.files.rests:
            num = len(self._waiting) + (self._writing is not None)
            _log.warning("The prefix cache on disk ends with %d texts that were not written.", num)
        self._waiting.clear()
        if self._writing is not None:
            self._writing.is_cancelled = True

    def _begin(self, tree: PrefixTree) -> None:
        """Make the memory of the next waiting state readable for the file thread, and queue its writing there."""
        if not self._waiting or self.files.rests:
            return
        state = self._waiting.pop(next(iter(self._waiting)))
        node = tree.state(state.key)
        if node is None:
            self._lose("left memory before they were written")
            return
        hit = tree.hit(node)
        if self.files.limit is not None and sum(s.nbytes for s in hit.parts.values()) > self.files.limit:
            self._say(
                "A text is larger than the prefix cache on disk may be (--prefix-disk); it was not written."
            )
            return
        parts = {name: hit.parts[name] for name in self._roots if name in hit.parts}
        named = dict(_arrays(parts, hit.hidden))
        pieces = iter(host.memory([x for arrays in named.values() for x in arrays]))
        for name, arrays in named.items():
            shape = list(arrays[0].shape)
            if len(arrays) > 1:
                shape[2] = sum(x.shape[2] for x in arrays)
            own = [next(pieces) for _ in arrays]
            state.tensors[name] = Stored(_NAMES[arrays[0].dtype], tuple(shape), own)
        state.metadata = self._header(state, parts)
        self._writing = state
        self._thread.run(partial(self._write, state))

    def _header(self, state: _State, parts: Mapping[str, Snapshot]) -> dict[str, str]:
        told = [
            {
                "name": name,
                "root": self._roots[name],
                "length": s.length,
                "layers": len(s.segments[0]),
                "states": len(s.point),
            }
            for name, s in parts.items()
        ]
        return {
            "model": self._model,
            "signature": self._roots[TARGET],
            "owner": hashlib.sha256(f"owner {state.owner}".encode()).hexdigest(),
            "text": state.key.hex(),
            "tokens": str(state.length),
            "parts": json.dumps(told),
        }

    def _write(self, state: _State) -> None:
        """Write a state to its file. Runs in the file thread."""
        try:
            nbytes = sum(tensor.nbytes for tensor in state.tensors.values())
            if self.files.write(
                state.name, state.tensors, state.metadata, is_wanted=lambda: not state.is_cancelled
            ):
                self.stats.num_written += 1
                self.stats.bytes_written += nbytes
                for name in state.older:
                    self.files.use(name, 0)
            elif state.is_cancelled:
                self._lose("left memory before they were written")
            self.stats.num_failed = self.files.num_failed
        finally:
            state.tensors.clear()
            state.is_done = True

    def _own_lengths(self) -> list[int]:
        """Return the lengths in tokens, ascending, of the texts whose states this model has files of."""
        if self.files.found is not self._seen:
            self._seen = found = self.files.found
            own = {name.split("-")[1] for name in found if name.startswith(self._roots[TARGET][:16] + "-")}
            self._lengths = sorted(int(num) for num in own if num.isdecimal())
        return self._lengths

    def _name(self, text: KeyedText, length: int) -> str | None:
        """Return the name of the file for the first `length` tokens of a text; None where there is no such file."""
        digest = self._digest(text.key(length))
        names = (f"{self._stem(length)}{kind}-{digest}" for kind in "st")
        return next((name for name in names if name in self.files.found), None)

    def _stem(self, length: int) -> str:
        return f"{self._roots[TARGET][:16]}-{length}-"

    def _digest(self, key: bytes) -> str:
        return hashlib.sha256(self._roots[TARGET].encode() + key).hexdigest()[:40]

    def _lose(self, why: str) -> None:
        self.stats.num_lost += 1
        self._say(f"Texts for the prefix cache on disk {why}; metrics count them.")

    def _say(self, sentence: str) -> None:
        """Log a sentence, at most once in this object's life."""
        if sentence not in self._has_said:
            self._has_said.add(sentence)
            _log.warning(sentence)


def default_folder() -> Path:
    """Return the folder of the prefix cache where the options name none."""
    return wanted_cache_folder() / "prefix"


def open_files(path: Path, limit: int | None) -> KeptFiles:
    """Return the files of a prefix cache on disk. limit: most bytes of all files; None for a process that only reads. Raises ConfigError
    for a folder that cannot be used."""
    return KeptFiles(path, limit, "The prefix cache")


def open_disk(
    model: Model,
    drafters: Collection[Drafter],
    config: EngineConfig,
    name: str,
    thread: JobThread,
    tower: VisionTower | None = None,
) -> PrefixDisk | None:
    """Return the prefix cache on disk that an engine's options request; None, with a logged warning, where no signature can be computed
    for a drafter or the vision tower. name: the model's. thread: reads and writes the files. tower: the vision tower, None without
    one. Raises ConfigError for a folder that cannot be used."""
    hearing = [d for d in drafters if d.needs.every_hidden]
    strange = [d.name for d in hearing if d.modules is None]
    why = f"the drafter {strange[0]} does not say by which `modules` its states are made" if strange else None
    if tower is not None and not isinstance(tower, nn.Module):
        why = "the vision tower is no mlx.nn.Module, so its weights are unknown"
    if why is not None:
        _log.warning("There is no prefix cache on disk: %s.", why)
        return None
    path = default_folder() if config.prefix_dir is None else Path(config.prefix_dir).expanduser().absolute()
    files = open_files(path, config.prefix_disk)
    layers = sorted({i for d in drafters for i in d.needs.layers})
    target = of_target(model, config, layers, tower)
    found = {d.name: root for d in drafters if (root := of_drafter(target, d)) is not None}
    # a state that lacks the part of a drafter which needs every hidden can be of no use
    roots = {TARGET: of_states(target, [found[d.name] for d in hearing]), **found}
    return PrefixDisk(files, thread, roots, model=name)


def _arrays(parts: Mapping[str, Snapshot], hidden: mx.array) -> Iterator[tuple[str, Sequence[mx.array]]]:
    """Yield the tensors of a state's file by name, each as a list of arrays to be joined along the tokens. parts: snapshots by part, the
    target's first. hidden: of the last token."""
    for index, snapshot in enumerate(parts.values()):
        for i, pieces in enumerate(zip(*snapshot.segments, strict=True)):
            for j, arrays in enumerate(zip(*pieces, strict=True)):
                yield f"{index}.t.{i}.{j}", arrays
        for i, state in enumerate(snapshot.point):
            for j, array in enumerate(state):
                yield f"{index}.p.{i}.{j}", [array]
    yield "hidden", [hidden]


def _try(work: Callable[[], None]) -> None:
    """Run `work`, and log an OSError that it raises."""
    try:
        work()
    except OSError as error:
        _log.warning("The prefix cache on disk: %s.", error.strerror or error)
