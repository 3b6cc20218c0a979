"""Writes one log line for each request, on stderr. Text from clients is escaped, and no prompt or answer is written.

A client decides how many lines there are, so their rate is bounded: LINES_AT_ONCE, then LINES_A_SECOND. The log says how many were left
out.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

LINES_AT_ONCE = 500
LINES_A_SECOND = 20
_LONGEST = 1000  # characters of a line


class Allowance:
    """A number that grows by `rate` a second up to `most`; `take` uses one up."""

    def __init__(self, most: float, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._rate, self._clock = most, rate, clock
        self._left, self._seen = most, clock()
        self._lock = threading.Lock()
        self._num_refused = 0

    def take(self) -> int | None:
        """None where nothing is left; else how often that was so since the last time it was not."""
        with self._lock:
            now = self._clock()
            self._left = min(self._most, self._left + (now - self._seen) * self._rate)
            self._seen = now
            if self._left < 1:
                self._num_refused += 1
                return None
            self._left -= 1
            refused, self._num_refused = self._num_refused, 0
            return refused


_allowance = Allowance(LINES_AT_ONCE, LINES_A_SECOND)


def line(text: str) -> None:
    """A line with the time. Control characters are shown as escapes: nobody writes a line of their own, or to the terminal."""
    left_out = _allowance.take()
    if left_out is None:
        return
    stamp = time.strftime("%H:%M:%S")
    lines = [f"{stamp} ({left_out} lines were left out: there were too many.)"] if left_out else []
    lines.append(f"{stamp} {escaped(text[:_LONGEST])}")
    with suppress(OSError):  # where nobody reads any more, serving goes on
        print("\n".join(lines), file=sys.stderr, flush=True)


def request(scope: Mapping[str, Any], status: int, seconds: float, said: str = "") -> None:
    """A request that has ended. `said`: what its client was told, if anything."""
    client = (scope.get("client") or ("-", 0))[0]
    tail = f" {said[:400]}" if said else ""
    line(f"{client} {scope['method']} {scope['path'][:200]} {status} {seconds * 1e3:.0f} ms{tail}")


def escaped(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def failure(error: BaseException) -> None:
    """An exception that nobody expected, with its traceback."""
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
    """Warnings of the HTTP library, of the event loop and of the engine become lines of this log, so that their rate is bounded too."""
    for name in ("uvicorn.error", "asyncio", "mlxspec"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [_Lines(logging.WARNING)], False
