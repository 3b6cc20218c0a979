"""Runs programs that may not end, on data of strangers, in helper processes with a limit of time and memory.

A chat template or a crafted image can keep C code busy that no counter in this process could stop. So another process works on it, which
is killed and replaced where it overruns. It is started anew, because a process with threads and MLX must not fork; it imports no MLX, has
no descriptor of this process and few of its variables, and ends with it. What it sends back is JSON and bytes, and is checked; nothing is
unpickled. Any thread may call.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
    """What a helper runs. file: Python with a function `run(ask, body)` that returns JSON's values and bytes; it is loaded without its
    package. what: the subject of sentences about it. seconds: of a call, of processor time. memory: bytes beyond what its imports take.
    most: bytes that it returns. once: the process ends after a call, because it leaves much in memory."""

    file: Path
    what: str
    seconds: float
    memory: int
    most: int
    once: bool = False


def run(program: Program, ask: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytearray]:
    """What the program returns, unchecked. Raises HelperError where it was ended at a limit, failed or ended by itself; MemoryBudgetError
    where no process can be started."""
    worker = _pool.take(program)
    try:
        found = worker.run(program, ask, body)
    except BaseException:
        _pool.replace(worker, program)
        raise
    if program.once:
        _pool.end(worker)
    else:
        _pool.give_back(worker)
    return found


def prepare(program: Program) -> None:
    """Start a helper for it where none waits, without waiting for that."""
    _pool.prepare(program)


class _Worker:
    """A helper process and the line to it. One thread at a time uses it."""

    def __init__(self) -> None:
        """Raises MemoryBudgetError."""
        paths = json.dumps([os.path.abspath(path) for path in sys.path if path])
        child = str(Path(__file__).with_name("helper_child.py"))
        kept = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        self._line, theirs = socket.socketpair()
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
            self._line.close()
            raise MemoryBudgetError(f"No helper process can be started: {error.strerror}.") from error
        finally:
            theirs.close()
        self.programs: set[Path] = set()
        self._loading: Path | None = None
        self._base = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def begin(self, program: Program) -> None:
        """Have it import a program. Does not wait."""
        self._loading = program.file
        with suppress(OSError):  # whoever waits for it finds out
            send(self._line, {"load": str(program.file)}, b"")

    def load(self, program: Program) -> None:
        """Wait until it has imported a program. Raises HelperError."""
        while program.file not in self.programs:
            if self._loading is None:
                self.begin(program)
            loads = replace(program, seconds=_START_SECONDS)
            _Call(self._line, self._process, loads, lambda: False).answer(0)
            self.programs |= {self._loading} if self._loading else set()
            self._loading = None
            self._base = _footprint(self.pid)

    def run(self, program: Program, ask: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytearray]:
        head = {
            "program": str(program.file),
            "ask": ask,
            "seconds": program.seconds,
            "clock": program.seconds + _WAITED_SECONDS,
            "memory": program.memory,
        }
        most = self._base + program.memory
        call = _Call(self._line, self._process, program, lambda: _footprint(self.pid) > most)
        try:
            call.send(head, body)
            said, out = call.answer(program.most)
        except MemoryError:
            said, out = {"ended": "memory"}, bytearray()
        if said.get("ended") == "memory":
            raise HelperError(f"{program.what} needs more than {program.memory >> 20} MiB and was ended.")
        if "ended" in said:
            raise HelperError(f"{program.what} failed: {said['ended']}.")
        return said, out

    def end(self) -> None:
        self._line.close()
        self._process.kill()
        self._process.wait()

    def forget(self) -> None:
        """In a fork of the process that it belongs to."""
        self._line.close()
        self._process.returncode = 0


class _Call:
    """One exchange over a line, within its time. is_over: whether the helper takes too much memory."""

    def __init__(
        self,
        line: socket.socket,
        process: subprocess.Popen[bytes],
        program: Program,
        is_over: Callable[[], bool],
    ) -> None:
        self._line, self._process, self._is_over = line, process, is_over
        self._what, self._seconds = program.what, program.seconds
        self._until = time.monotonic() + program.seconds + _WAITED_SECONDS

    def send(self, said: Mapping[str, Any], body: bytes) -> None:
        """Raises HelperError."""
        self._line.settimeout(self._until - time.monotonic())
        try:
            send(self._line, said, body)
        except TimeoutError as error:
            raise self._late() from error
        except OSError as error:
            raise self._gone() from error

    def answer(self, most: int) -> tuple[dict[str, Any], bytearray]:
        """most: bytes behind the JSON. Raises HelperError, and MemoryError where the helper takes too much."""
        num_head, num_body = LENGTHS.unpack(self._exactly(LENGTHS.size))
        if num_head > _LONGEST_HEAD or num_body > most:
            raise HelperError(f"{self._what} gives more than it may.")
        head, body = self._exactly(num_head), self._exactly(num_body)
        try:
            said = json.loads(head)
        except (ValueError, RecursionError) as error:
            raise self._gone() from error
        if not isinstance(said, dict):
            raise self._gone()
        return said, body

    def _exactly(self, number: int) -> bytearray:
        found = bytearray(number)
        view, done = memoryview(found), 0
        while done < number:
            left = self._until - time.monotonic()
            if left <= 0:
                raise self._late()
            self._line.settimeout(left if _HOLDS_LIMITS else min(left, _LOOK_SECONDS))
            try:
                got = self._line.recv_into(view[done:])
            except TimeoutError:
                if self._is_over():
                    raise MemoryError from None
                continue
            except OSError as error:
                raise self._gone() from error
            if not got:
                raise self._gone()
            done += got
        return found

    def _late(self) -> HelperError:
        return HelperError(f"{self._what} takes more than {self._seconds:g} seconds and was ended.")

    def _gone(self) -> HelperError:
        with suppress(subprocess.TimeoutExpired):
            if -self._process.wait(1.0) in ENDED_LATE:
                return self._late()
        return HelperError(f"{self._what} cannot go on: its helper process has ended.")


class _Pool:
    """Helpers that wait, and those at work: at most MOST_PROCESSES together."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._num_starting = 0

    def take(self, program: Program) -> _Worker:
        """One that has imported the program, used by nobody else. Raises HelperError and MemoryBudgetError."""
        worker = None
        with self._changed:
            self._changed.wait_for(lambda: self._idle or self._has_room)
            if self._idle:
                worker = next((w for w in reversed(self._idle) if program.file in w.programs), self._idle[-1])
                self._idle.remove(worker)
            else:
                self._num_starting += 1
        if worker is not None and not worker.is_alive:  # killed by somebody while it waited
            with self._changed:
                self._all.discard(worker)
                self._num_starting += 1
            worker.end()
            worker = None
        worker = worker or self._started()
        try:
            worker.load(program)
        except BaseException:
            self.end(worker)
            raise
        return worker

    def give_back(self, worker: _Worker) -> None:
        with self._changed:
            self._idle.append(worker)
            self._changed.notify()

    def replace(self, worker: _Worker, program: Program) -> None:
        self.end(worker)
        self.prepare(program)

    def prepare(self, program: Program) -> None:
        with self._changed:
            if self._idle or not self._has_room:
                return
            self._num_starting += 1
        with suppress(MemoryBudgetError):
            worker = self._started()
            worker.begin(program)
            self.give_back(worker)

    def close(self) -> None:
        """At the end of the process."""
        with self._changed:
            workers, self._all, self._idle = self._all, set(), []
        for worker in workers:
            worker.end()

    def forget(self) -> None:
        for worker in self._all:
            worker.forget()

    @property
    def _has_room(self) -> bool:
        return len(self._all) + self._num_starting < MOST_PROCESSES

    def _started(self) -> _Worker:
        """A new one, whose place has been counted."""
        worker = None
        try:
            worker = _Worker()
        finally:
            with self._changed:
                self._num_starting -= 1
                if worker is not None:
                    self._all.add(worker)
                self._changed.notify()
        return worker

    def end(self, worker: _Worker) -> None:
        worker.end()
        with self._changed:
            self._all.discard(worker)
            self._changed.notify()


def _footprint(pid: int) -> int:
    """Bytes that a process takes; 0 where the system holds its limit by itself."""
    if _HOLDS_LIMITS:
        return 0
    found = (ctypes.c_uint64 * 12)()  # struct rusage_info_v0: ri_phys_footprint is the tenth
    libproc = ctypes.CDLL("/usr/lib/libproc.dylib")
    return 0 if libproc.proc_pid_rusage(pid, 0, ctypes.byref(found)) else int(found[9])


_pool = _Pool()


def _forget() -> None:
    """In a fork of this process, which must not talk over the same lines."""
    global _pool
    _pool.forget()
    _pool = _Pool()


os.register_at_fork(after_in_child=_forget)
atexit.register(lambda: _pool.close())
