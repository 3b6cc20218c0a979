"""Ends a server's process within seconds of SIGTERM or SIGINT, whatever its threads do.

The interpreter writes a signal's number to a pipe when the signal arrives, and a thread reads it. So a blocked main thread, for example
one that writes to a terminal that takes no output, does not delay the end.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

EXIT_SECONDS = 1.9
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def ending_on_signals(ask: Callable[[], object]) -> Iterator[None]:
    """Return a context in which the first SIGTERM or SIGINT calls `ask` in a separate thread, and ends the process EXIT_SECONDS later if
    it still runs. A second signal ends the process at once. Outside of the main thread it does nothing: the program that runs the
    server there must stop it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken, given = os.pipe()
    os.set_blocking(given, False)
    threading.Thread(target=_obey, args=(taken, ask), name="mlxspec-signals", daemon=True).start()
    before = signal.set_wakeup_fd(given, warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, _pass) for number in _SIGNALS}
    for number in _SIGNALS:
        signal.siginterrupt(number, False)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(given)


def exit_later(status: int) -> None:
    """End the process after EXIT_SECONDS with this exit status, unless it has ended before. Returns at once."""
    timer = threading.Timer(EXIT_SECONDS, lambda: os._exit(status))
    timer.daemon = True
    timer.start()


def _pass(*_: object) -> None:
    """Do nothing. It must be installed as a handler, because Python writes no signal to the wakeup pipe without one."""


def _obey(taken: int, ask: Callable[[], object]) -> None:
    is_asked = False
    while number := os.read(taken, 1):
        if number[0] not in _SIGNALS:
            continue
        if is_asked:
            os._exit(130)
        is_asked = True
        exit_later(0)
        with suppress(RuntimeError):  # the event loop has ended
            ask()
    os.close(taken)
