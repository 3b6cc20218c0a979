"""Handles signals that end a command: Ctrl-C during an answer, which ends the answer between two rounds, so that the engine is never left
in the middle of one; and SIGTERM and SIGHUP during work that must clean up.

Knows signals; knows no engine. Only the main thread can take signals; elsewhere this does nothing.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from mlxspec.cli import terminal


class Ended(BaseException):
    """A signal that ends the process, as an exception. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def clearing_away() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise Ended within the block, so that its cleanup runs. A signal that was ignored before stays ignored."""
    ours = []
    if threading.current_thread() is threading.main_thread():
        ours = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # while it is cleared away
    raise Ended(number)


class Interrupt:
    """A context manager that handles Ctrl-C. The first Ctrl-C only sets `asked`, so that the answer can be ended between two rounds. A
    second one raises KeyboardInterrupt, and so does the first where stdout is blocked because nothing reads it."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None
        self._is_ours = False

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._take)
            self._is_ours = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, self._before)
            self._is_ours = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.asked or not terminal.takes_more(sys.stdout):
            raise KeyboardInterrupt
        self.asked = True
