"""Writes one log line for each request, on stderr. Text from clients is escaped, and no prompt or answer is written.

A client decides how many lines there are, so their rate is bounded: LINES_AT_ONCE, then LINES_A_SECOND. A thread writes them, so that
nobody waits for whoever reads the log, and at most MOST_WAITING wait for it. The log says how many were left out, once it can.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

LINES_AT_ONCE = 500
LINES_A_SECOND = 20
MOST_WAITING = 500
_LONGEST = 1000  # characters of a line
_NOTE_SECONDS = 60.0


class Allowance:
    """A number that grows by `rate` a second up to `most`; `take` uses one up."""

    def __init__(self, most: float, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._rate, self._clock = most, rate, clock
        self._left, self._seen = most, clock()
        self._lock = threading.Lock()

    def take(self) -> bool:
        """False where nothing is left."""
        with self._lock:
            now = self._clock()
            self._left = min(self._most, self._left + (now - self._seen) * self._rate)
            self._seen = now
            is_left = self._left >= 1
            self._left -= is_left
            return is_left


class Writing:
    """A thread that writes, in order: pieces of work, of which at most `most` wait for it. num_left_out: pieces that nobody will see."""

    def __init__(self, most: int) -> None:
        self.num_left_out = self._num_told = 0
        self._queue: queue.Queue[Callable[[], object]] = queue.Queue(most)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, work: Callable[[], object]) -> None:
        """Queue a write. Never waits."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="mlxspec-log", daemon=True)
                self._thread.start()
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            self.leave_out()

    def leave_out(self) -> None:
        with self._lock:
            self.num_left_out += 1

    def line(self, text: str) -> None:
        """Write a line, in the thread, after the number of those that were left out since the last one. To the file itself, past Python's
        buffer: Python waits at its end for a thread that holds a buffer, and what a full disk refuses stays in one."""
        missing = self.num_left_out - self._num_told
        if missing:
            text = f"{text[:8]} ({missing} lines were left out: there were too many, or they could not be written.)\n{text}"
        try:
            number = sys.stderr.fileno()
        except (AttributeError, OSError, ValueError):  # a stream that is no file
            print(text, file=sys.stderr, flush=True)
        else:
            data = f"{text}\n".encode(errors="replace")
            while data:
                data = data[os.write(number, data) :]
        self._num_told += missing

    def flush(self, seconds: float) -> bool:
        """Wait until all is written, at most so long; whether it is."""
        done = self._queue.all_tasks_done
        with done:
            return done.wait_for(lambda: not self._queue.unfinished_tasks, seconds)

    def _loop(self) -> None:
        while True:
            work = self._queue.get()
            try:
                work()
            except (OSError, ValueError):  # serving goes on
                self.leave_out()
            self._queue.task_done()


_allowance = Allowance(LINES_AT_ONCE, LINES_A_SECOND)
writing = Writing(MOST_WAITING)
_noted: dict[str, float] = {}  # when each kind was last written


def line(text: str) -> None:
    """Log a line with the time. Control characters are shown as escapes, so that no client can write a line of its own, or to the
    terminal."""
    if _allowance.take():
        writing.put(partial(writing.line, f"{time.strftime('%H:%M:%S')} {escaped(text[:_LONGEST])}"))
    else:
        writing.leave_out()


def note(kind: str) -> None:
    """Write what happens to many requests, at most once a minute for each kind."""
    now = time.monotonic()
    if now - _noted.get(kind, -_NOTE_SECONDS) >= _NOTE_SECONDS:
        _noted[kind] = now
        line(f"{kind} (told at most once a minute; the answer's notices say more)")


def request(scope: Mapping[str, Any], status: int, seconds: float, said: str = "") -> None:
    """Log a request that has ended. said: the sentence that its client got, if any."""
    client = (scope.get("client") or ("-", 0))[0]
    tail = f" {said[:400]}" if said else ""
    line(f"{client} {scope['method']} {scope['path'][:200]} {status} {seconds * 1e3:.0f} ms{tail}")


def escaped(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def failure(error: BaseException) -> None:
    """Log an unexpected exception with its traceback."""
    for part in traceback.format_exception(error):
        for one in part.rstrip("\n").split("\n"):
            line(one)


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):  # a log must not end what it reports on
            line(record.getMessage())
            error = record.exc_info[1] if record.exc_info else None
            if error is not None:
                failure(error)


def take_over() -> None:
    """Turn warnings of the HTTP library, of the event loop and of the engine into lines of this log, so that their rate is bounded too."""
    for name in ("uvicorn.error", "asyncio", "mlxspec"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [_Lines(logging.WARNING)], False
