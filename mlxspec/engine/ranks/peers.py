"""How the ranks find each other, and what they must agree on before they begin.

MLX's group is joined first. Over it rank 0 tells where it listens and a key; the others connect there (line.py). Then facts are compared:
versions, options, files. Ranks that differ in one of them are refused with the sentence that names it, before a weight is read. The group
is tried with a long sum whose result is known, because a link can work for short messages and fail for long ones.

Knows processes and facts about them; knows no engine.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxspec.engine.ranks.line import VALUE, Line
from mlxspec.errors import RankError
from mlxspec.models.ranks import Ranks
from mlxspec.platform import device
from mlxspec.platform.host import numbers

RANK_VARIABLE = "MLX_RANK"
_HELLO_BYTES = 256
_CONNECT_SECONDS = 30.0
START_SECONDS = 120.0  # in which all ranks have started and found each other
_ORPHAN_SECONDS = 1.0  # between two looks whether whoever started this process is there
_END_SECONDS = 10.0  # in which the process is ended by whoever watches the line
_LEAVE_SECONDS = 3.0  # in which ranks that were told to end do so
_LONG_SUM = 1 << 20  # numbers
_PACKAGES = "mlxspec", "mlx", "numpy", "tokenizers", "jinja2", "llguidance"
_SAMPLES, _SAMPLE_BYTES = 16, 4096  # of a large file
_WHOLE = 32 << 20  # bytes of a file that is read as a whole
_KINDS = ".safetensors", ".json", ".jinja", ".model", ".txt"

# of a process that ends another one unless its input ends before
_WATCHER = """
import os, select, sys
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    print(sys.argv[2], file=sys.stderr, flush=True)
    os.kill(int(sys.argv[3]), 9)
"""


class Peers:
    """This process among the ranks. ranks: its number and MLX's group; line: its connections."""

    def __init__(self, ranks: Ranks, line: Line) -> None:
        self.ranks, self.line = ranks, line
        self.on_end: Callable[[], None] | None = None  # tells the other ranks, once there is an engine

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks.rank == 0

    def share(self, value: Any) -> list[Any]:
        """Every rank's value, plain JSON, by rank. Waits for all ranks; all must call it, in the same order."""
        raw = json.dumps(value).encode()
        if not self.leads:
            self.line.send(VALUE, raw)
            found: list[Any] = json.loads(self.line.receive(VALUE))
            return found
        others = [json.loads(self.line.receive(VALUE, r)) for r in range(1, self.ranks.size)]
        found = [json.loads(raw), *others]
        self.line.send(VALUE, json.dumps(found).encode())
        return found

    def least(self, value: int) -> int:
        """The least of the ranks' values."""
        return min(int(v) for v in self.share(value))

    def compare(self, what: str, facts: Mapping[str, Any]) -> None:
        """Raises RankError, on every rank alike, where a rank's facts differ from rank 0's. what: how facts are called: "version"."""
        own = self.share(dict(facts))
        for rank, theirs in enumerate(own):
            for name in sorted({*own[0], *theirs}):
                first, other = own[0].get(name), theirs.get(name)
                if first != other:
                    raise RankError(_difference(what, name, rank, first, other))

    def end(self) -> None:
        """This rank ends, and with it the others; rank 0 waits for them. Raises RankError where they ended otherwise than they should."""
        if self.on_end is not None:
            self.on_end()
        if self.leads and self.line.fault is None:
            self.line.wait_left(_LEAVE_SECONDS)
        fault = self.line.fault
        self.line.close()
        if fault is not None:
            raise fault

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Tells the others why this rank fails by itself, so that they end."""
        try:
            yield
        except RankError as error:
            if self.line.is_left_to_others(error):
                time.sleep(_END_SECONDS)
            self.line.fail(str(error), is_own=True)
            raise
        except Exception as error:
            # what MLX says of a rank that is gone is less than what is known a moment later
            reason = self.line.explain() if isinstance(error, RuntimeError) else None
            if reason is None:
                why = str(error).strip().rstrip(".") or type(error).__name__
                self.line.fail(f"Rank {self.ranks.rank} cannot go on: {why}.", is_own=True)
                raise
            if self.line.is_left_to_others(reason):
                time.sleep(_END_SECONDS)
            raise reason from error


def is_rank() -> bool:
    """Whether mlx.launch, or something like it, has started this process as one of several."""
    return RANK_VARIABLE in os.environ


def _is_alone() -> bool:
    """Whether the file of hosts is empty, as mlx.launch writes it for one process; MLX cannot read it then."""
    with suppress(OSError, UnicodeDecodeError, KeyError):
        return not Path(os.environ["MLX_HOSTFILE"]).read_text(encoding="utf-8").strip()
    return False


def join() -> Peers | None:
    """Find the other ranks; None where this process is the only one. Raises RankError."""
    if not is_rank() or _is_alone():
        return None
    _end_with_parent()
    with _watched():
        try:
            group = mx.distributed.init(strict=False)
        except (RuntimeError, ValueError) as error:
            raise RankError(f"The ranks cannot be joined: {_first_line(error)}.") from error
        if group.size() == 1:
            return None
        ranks = Ranks(rank=group.rank(), size=group.size(), group=group)
        peers = Peers(ranks, _connect(ranks))
        with peers.failing_together():
            peers.compare("version", _versions())
            _try_long_sum(ranks)
        return peers


@contextmanager
def _watched() -> Iterator[None]:
    """Ends this process where what is inside takes START_SECONDS: a rank has never started. MLX waits for it in a call that lets no other
    thread of Python run, so another process keeps the time."""
    rank = os.environ.get(RANK_VARIABLE, "")
    why = f"mlxspec: error: Rank {rank} has waited {START_SECONDS:g} seconds for the other ranks to start."
    command = [sys.executable, "-I", "-S", "-c", _WATCHER, str(START_SECONDS), why, str(os.getpid())]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        watcher.communicate()


def _connect(ranks: Ranks) -> Line:
    """Connections between rank 0 and everybody else."""
    if ranks.rank == 0:
        host = address_of_first() or ""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as listener:
            try:
                listener.bind((host, 0))
            except OSError:
                listener.bind(("", 0))
            listener.listen(ranks.size)
            listener.settimeout(_CONNECT_SECONDS)
            key = secrets.token_hex(16)
            _tell_all(ranks, {"port": listener.getsockname()[1], "key": key})
            return Line(0, ranks.size, _accepted(listener, key, ranks.size), device.is_compiling)
    said = _tell_all(ranks, None)
    address = (address_of_first() or "127.0.0.1", int(said["port"]))
    try:
        connection = socket.create_connection(address, timeout=_CONNECT_SECONDS)
        connection.sendall(json.dumps({"key": said["key"], "rank": ranks.rank}).encode() + b"\n")
    except OSError as error:
        raise RankError(
            f"Rank {ranks.rank} cannot connect to rank 0 at {address[0]}: {error.strerror}."
        ) from error
    return Line(ranks.rank, ranks.size, {0: connection}, device.is_compiling)


def _accepted(listener: socket.socket, key: str, size: int) -> dict[int, socket.socket]:
    found: dict[int, socket.socket] = {}
    until = time.monotonic() + _CONNECT_SECONDS
    while len(found) < size - 1:
        if time.monotonic() > until:
            missing = min(r for r in range(1, size) if r not in found)
            raise RankError(f"Rank {missing} did not connect to rank 0 within {_CONNECT_SECONDS:g} seconds.")
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        connection.settimeout(_CONNECT_SECONDS)
        try:
            said = json.loads(_read_line(connection))
            rank = int(said["rank"])
            is_ours = secrets.compare_digest(str(said["key"]), key) and 0 < rank < size and rank not in found
        except (OSError, ValueError, KeyError, TypeError):
            is_ours = False
        if is_ours:
            found[rank] = connection
        else:
            connection.close()
    return found


def _read_line(connection: socket.socket) -> bytes:
    """Up to the end of a line, byte by byte: what follows is the line's."""
    found = b""
    while not found.endswith(b"\n") and len(found) < _HELLO_BYTES:
        byte = connection.recv(1)
        if not byte:
            break
        found += byte
    return found


def _tell_all(ranks: Ranks, said: dict[str, Any] | None) -> dict[str, Any]:
    """Sends what rank 0 says to all, over MLX's group."""
    raw = np.zeros(_HELLO_BYTES, np.int32)
    if said is not None:
        text = json.dumps(said).encode()
        raw[: len(text)] = np.frombuffer(text, np.uint8)
    total = mx.distributed.all_sum(mx.array(raw), group=ranks.group)
    try:
        mx.eval(total)
    except RuntimeError as error:
        raise RankError(f"The ranks cannot talk to each other: {_first_line(error)}.") from error
    text = bytes(numbers(total).astype(np.uint8).tolist()).rstrip(b"\0")
    found: dict[str, Any] = json.loads(text)
    return found


def address_of_first() -> str | None:
    """Rank 0's address as mlx.launch has told it, None where it has not."""
    coordinator = os.environ.get("MLX_JACCL_COORDINATOR", "")
    if coordinator:
        return coordinator.rpartition(":")[0].strip("[]")
    with suppress(OSError, ValueError, IndexError, KeyError, TypeError, AttributeError):
        hosts = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text(encoding="utf-8"))
        return str(hosts[0][0]).rpartition(":")[0].strip("[]")
    return None


def _versions() -> dict[str, str]:
    """The versions of everything that has a say in the text."""
    found = {"mlxspec's code": _code(), "Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    report = device.report()
    return found | {"backend": report.backend, "compilation": str(report.compile_enabled)}


def _code() -> str:
    """A digest of the package's sources."""
    found = hashlib.sha256()
    root = Path(__file__).resolve().parents[2]
    for file in sorted(root.rglob("*.py")):
        found.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return found.hexdigest()[:12]


def files_of(folder: Path) -> dict[str, str]:
    """A digest for each file of a model folder that has a say in the text. Of large files size, beginning, end and samples are read."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in _KINDS and path.is_file():
            found[path.name] = digest_of(path)
    return found


def digest_of(path: Path) -> str:
    """The digest of one file, see `files_of`."""
    size, found = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        if size <= _WHOLE:
            found.update(file.read())
        else:
            found.update(str(size).encode())
            for i in range(_SAMPLES + 1):
                file.seek((size - _SAMPLE_BYTES) * i // _SAMPLES)
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()[:16]


def _difference(what: str, name: str, rank: int, first: Any, other: Any) -> str:
    def told(value: Any) -> str:
        return "none" if value is None else str(value)[:60]

    here, there = told(first), told(other)
    return f"Rank {rank} has another {what} than rank 0: {name} is {there} there and {here} on rank 0; every rank needs the same."


def _try_long_sum(ranks: Ranks) -> None:
    """Raises RankError where a long sum is not what it must be."""
    part = mx.arange(_LONG_SUM, dtype=mx.int32) % 1009
    total = mx.distributed.all_sum((part + ranks.rank).astype(mx.float32), group=ranks.group)
    wanted = (ranks.size * part + ranks.size * (ranks.size - 1) // 2).astype(mx.float32)
    try:
        is_right = bool(mx.array_equal(total, wanted).item())
    except RuntimeError as error:
        raise RankError(f"The ranks cannot talk to each other: {_first_line(error)}.") from error
    if not is_right:
        raise RankError(
            f"A sum of {_LONG_SUM:,} numbers over the ranks came out wrong; the link between them cannot be used."
        )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _end_with_parent() -> None:
    """Whoever started the ranks may be killed and leave them behind: then this process ends."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_ORPHAN_SECONDS)
        _leave("What started this rank has ended, so the rank ends.")

    threading.Thread(target=look, name="mlxspec-orphan", daemon=True).start()


def leave_on_fault(line: Line, say: Callable[[str], None]) -> None:
    """End the process with exit code 2 as soon as the ranks cannot go on, wherever its threads are: the one that computes may wait in
    MLX."""

    def leave(fault: RankError) -> None:
        with suppress(Exception):
            say(str(fault))
        _leave(None)

    line.on_fault(leave)


def _leave(why: str | None) -> None:
    with suppress(Exception):
        if why is not None:
            print(why, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(2)
