"""Runs programs that may not end, on data of strangers, in helper processes with a limit of time and memory.

A chat template or a crafted image can keep C code busy that no counter in this process could stop. So another process works on it, which
is killed where it overruns; the next call starts another one. It is started anew, because a process with threads and MLX must not fork; it
imports no MLX, has no descriptor of this process and few of its variables, and ends with it. What it sends back is JSON and bytes, and is
checked; nothing is unpickled. A helper serves one call at a time, of any program. Any thread may call.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

from mlxspec.errors import HelperError, MemoryBudgetError
from mlxspec.platform.helper_child import ENDED_LATE, LENGTHS, send

MOST_PROCESSES = 4
_START_SECONDS = 60.0  # for Python and the imports of a program
_WAITED_SECONDS = 10.0  # of a call, by the clock, for a processor that others use: a limit by the clock alone refuses honest data there
_LONGEST_HEAD = 1 << 16  # bytes
_LOOK_SECONDS = 0.01  # between two looks at a helper's memory
_HOLDS_LIMITS = sys.platform == "linux"  # macOS accepts a limit of the address space and does not hold it
_VARIABLES = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "TZ", "TZDIR")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program that a helper process runs, with its limits; a call that exceeds one fails with HelperError. file: Python with a
    function `run(ask, body)` that returns JSON's values and bytes; it is loaded without its package. what: the subject of error
    messages, as in "Decoding the image". seconds: the limit of processor time for a call. memory: the limit of memory in bytes,
    beyond what the program's imports take. most: the limit of bytes that a call returns. once: the process ends after one call,
    because a call leaves much in memory."""

    file: Path
    what: str
    seconds: float
    memory: int
    most: int
    once: bool = False


def run(program: Program, ask: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytearray]:
    """Run a program in a helper process and return its result, unchecked. Raises HelperError where it was ended at a limit, failed, or
    ended by itself, and MemoryBudgetError where no process can be started."""
    with _places:
        worker = _taken()
        try:
            worker.load(program)
            found = worker.run(program, ask, body)
        except BaseException:
            worker.end()
            prepare(program)
            raise
        if program.once:
            worker.end()
        else:
            _idle.append(worker)
        return found


def prepare(program: Program) -> None:
    """Start a helper process for the program if none is waiting, and return at once."""
    if _idle or len(_workers) >= MOST_PROCESSES:
        return
    with suppress(MemoryBudgetError):
        worker = _Worker()
        worker.begin(program)
        _idle.append(worker)


def _taken() -> _Worker:
    """Return a helper process that no other thread uses. Raises MemoryBudgetError."""
    while True:
        try:
            worker = _idle.pop()
        except IndexError:
            return _Worker()
        if worker.is_alive:
            return worker
        worker.end()  # killed by somebody while it waited


class _Worker:
    """A helper process and the socket to it. One thread at a time uses it."""

    def __init__(self) -> None:
        """Start the process. Raises MemoryBudgetError."""
        paths = json.dumps([os.path.abspath(path) for path in sys.path if path])
        child = str(Path(__file__).with_name("helper_child.py"))
        kept = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        self.line, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-B", "-P", child, paths],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={**kept, "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the process of the terminal's user
            )
        except OSError as error:
            self.line.close()
            raise MemoryBudgetError(f"No helper process can be started: {error.strerror}.") from error
        finally:
            theirs.close()
        self._programs: set[Path] = set()
        self._loading: Path | None = None
        self._base = 0
        _workers.add(self)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def begin(self, program: Program) -> None:
        """Let the helper process import a program. Returns at once."""
        self._loading = program.file
        with suppress(OSError):  # whoever waits for it finds out
            send(self.line, {"load": str(program.file)}, b"")

    def load(self, program: Program) -> None:
        """Wait until the helper process has imported a program. Raises HelperError."""
        while program.file not in self._programs:
            if self._loading is None:
                self.begin(program)
            self._exchange(program, _START_SECONDS, None, b"", most=0)
            self._programs |= {self._loading} if self._loading else set()
            self._loading, self._base = None, _footprint(self._process.pid)

    def run(self, program: Program, ask: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytearray]:
        head = {
            "program": str(program.file),
            "ask": ask,
            "seconds": program.seconds,
            "clock": program.seconds + _WAITED_SECONDS,
            "memory": program.memory,
        }
        try:
            said, out = self._exchange(program, program.seconds, head, body, most=program.most)
        except MemoryError:
            said, out = {"ended": "memory"}, bytearray()
        if said.get("ended") == "memory":
            raise HelperError(f"{program.what} needs more than {program.memory >> 20} MiB and was ended.")
        if "ended" in said:
            raise HelperError(f"{program.what} failed: {said['ended']}.")
        return said, out

    def end(self) -> None:
        _workers.discard(self)
        self.line.close()
        self._process.kill()
        self._process.wait()

    def forget(self) -> None:
        """Close our side of the pipes in a fork of the process that owns this helper."""
        self.line.close()
        self._process.returncode = 0

    def _exchange(
        self, program: Program, seconds: float, head: Mapping[str, Any] | None, body: bytes, *, most: int
    ) -> tuple[dict[str, Any], bytearray]:
        """Send `head` and `body`, or nothing where `head` is None, and return the helper's answer: JSON, and at most `most` bytes after
        it. program: the program that the helper runs, for its memory limit and the text of errors. seconds: the limit of the whole
        exchange, to which _WAITED_SECONDS are added. Raises HelperError, and MemoryError where the helper takes too much memory."""
        until = time.monotonic() + seconds + _WAITED_SECONDS
        late = HelperError(f"{program.what} takes more than {seconds:g} seconds and was ended.")
        try:
            if head is not None:
                self.line.settimeout(until - time.monotonic())
                send(self.line, head, body)
            lengths = LENGTHS.unpack(self._exactly(LENGTHS.size, until, program))
            if lengths[0] > _LONGEST_HEAD or lengths[1] > most:
                raise HelperError(f"{program.what} gives more than it may.")
            answer, out = (self._exactly(number, until, program) for number in lengths)
            said = json.loads(answer)
            if isinstance(said, dict):
                return said, out
        except TimeoutError:
            raise late from None
        except (OSError, ValueError, RecursionError):
            pass  # it has ended, or says what is no JSON
        with suppress(subprocess.TimeoutExpired):
            if -self._process.wait(1.0) in ENDED_LATE:
                raise late
        raise HelperError(f"{program.what} cannot go on: its helper process has ended.")

    def _exactly(self, number: int, until: float, program: Program) -> bytearray:
        """Read `number` bytes. Raises OSError, TimeoutError, and MemoryError where the helper takes too much."""
        found = bytearray(number)
        view, done = memoryview(found), 0
        while done < number:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self.line.settimeout(left if _HOLDS_LIMITS else min(left, _LOOK_SECONDS))
            try:
                got = self.line.recv_into(view[done:])
            except TimeoutError:
                if self._base and _footprint(self._process.pid) > self._base + program.memory:
                    raise MemoryError from None
                continue
            if not got:
                raise ConnectionError
            done += got
        return found


def _footprint(pid: int) -> int:
    """Return the bytes of memory that a process takes; 0 where the system itself enforces its limit."""
    if _HOLDS_LIMITS:
        return 0
    found = (ctypes.c_uint64 * 12)()  # struct rusage_info_v0: ri_phys_footprint is the tenth
    libproc = ctypes.CDLL("/usr/lib/libproc.dylib")
    return 0 if libproc.proc_pid_rusage(pid, 0, ctypes.byref(found)) else int(found[9])


_idle: list[_Worker]
_workers: WeakSet[_Worker]
_places: threading.Semaphore


def _begin() -> None:
    """Reset the list of helper processes to empty."""
    global _idle, _workers, _places
    _idle, _workers, _places = [], WeakSet(), threading.Semaphore(MOST_PROCESSES)


def _forget() -> None:
    """Drop the helpers in a fork of this process, which must not use the same pipes."""
    for worker in list(_workers):
        worker.forget()
    _begin()


def _close() -> None:
    """End the helpers at the end of the process."""
    for worker in list(_workers):
        worker.end()


_begin()
os.register_at_fork(after_in_child=_forget)
atexit.register(_close)
