"""Writes one log line for each request, on stderr. Text from clients is escaped, and no prompt or answer is written.

Clients cause the lines, so their rate is limited: LINES_AT_ONCE, then LINES_A_SECOND. A thread writes them, so that no request waits for
a slow reader of the log, and at most MOST_WAITING lines wait for the thread. A later line has the number of those that were left out.
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
    """A limit of a rate: a number that grows by `rate` a second up to `most`, and that `take` decreases by one. Thread-safe."""

    def __init__(self, most: float, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._rate, self._clock = most, rate, clock
        self._left, self._seen = most, clock()
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take one from the number, and return True; return False where less than one is left."""
        with self._lock:
            now = self._clock()
            self._left = min(self._most, self._left + (now - self._seen) * self._rate)
            self._seen = now
            is_left = self._left >= 1
            self._left -= is_left
            return is_left


class Writing:
    """A thread that runs writes to the log in order. At most `most` writes wait for it; further ones are dropped. num_left_out: the
    number of lines that were dropped or could not be written."""

    def __init__(self, most: int) -> None:
        self.num_left_out = self._num_told = 0
        self._queue: queue.Queue[Callable[[], object]] = queue.Queue(most)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, work: Callable[[], object]) -> None:
        """Queue a write, or drop it where the queue is full. Returns at once."""
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
        """Write a line to stderr, preceded by the number of lines that were left out since the last one. Called in the writing thread.
        It writes to the file descriptor, not to Python's buffer: at its end Python waits for a thread that holds a buffer, and text
        that a full disk refuses would stay in the buffer."""
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
        """Wait until all queued lines are written, at most this number of seconds. Returns whether they are."""
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
    """Log a line with the time. Control characters are written as escapes, so that a client's text cannot begin a line or control the
    terminal."""
    if _allowance.take():
        writing.put(partial(writing.line, f"{time.strftime('%H:%M:%S')} {escaped(text[:_LONGEST])}"))
    else:
        writing.leave_out()


def note(kind: str) -> None:
    """Log a sentence that applies to many requests, at most once a minute. kind: the sentence."""
    now = time.monotonic()
    if now - _noted.get(kind, -_NOTE_SECONDS) >= _NOTE_SECONDS:
        _noted[kind] = now
        line(f"{kind} (told at most once a minute; the answer's notices say more)")


def request(scope: Mapping[str, Any], status: int, seconds: float, said: str = "") -> None:
    """Log a request that has ended. scope: its ASGI scope; status: its HTTP status; seconds: its duration; said: the error that its
    client received, if any."""
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
    """Send the warnings of uvicorn, of asyncio and of mlxspec to this log, so that their rate is limited too."""
    for name in ("uvicorn.error", "asyncio", "mlxspec"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [_Lines(logging.WARNING)], False
