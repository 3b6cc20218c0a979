"""A long-lived thread that runs jobs one after the other: engines, or accesses to files.

MLX keeps a stream, and without a GPU a thread, for every thread that has used it, and never frees them. A process that loads models again
and again therefore runs all of them in one thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from mlxspec.platform import device

_Job = tuple[Callable[[], None], threading.Event]
_log = logging.getLogger("mlxspec")


class JobThread:
    """A thread that runs jobs one after the other in the order of their arrival, urgent ones first. It starts with the first job and is
    a daemon."""

    def __init__(self, name: str = "mlxspec-engine") -> None:
        self._changed = threading.Condition()
        self._urgent: deque[_Job] = deque()
        self._others: deque[_Job] = deque()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._is_started = self._is_closed = self._is_busy = False

    def run(self, job: Callable[[], None], *, is_urgent: bool = False) -> threading.Event:
        """Queue a job, and return the event that is set when the job has ended. is_urgent: whether it runs before all jobs that are not
        urgent. An exception of the job is logged. Raises RuntimeError after `close`."""
        if self._is_closed:
            raise RuntimeError("the thread has been closed")
        ended = threading.Event()
        with self._changed:
            (self._urgent if is_urgent else self._others).append((job, ended))
            self._changed.notify_all()
        if not self._is_started:
            self._is_started = True
            self._thread.start()
        return ended

    @property
    def is_idle(self) -> bool:
        """Return whether no job is queued or running."""
        return not (self._urgent or self._others or self._is_busy)

    @property
    def is_current(self) -> bool:
        """Return whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """End the thread after the queued jobs. Closing twice does nothing."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def join(self, timeout: float | None = None) -> bool:
        """Wait, for at most `timeout` seconds, for the end of a closed thread; return whether it has ended."""
        if self._is_started and not self.is_current:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while (queued := self._next()) is not None:
            job, ended = queued
            del queued
            try:
                job()
            except Exception as error:
                _log.warning("A job failed (%s: %s).", type(error).__name__, error)
            finally:
                del job
                ended.set()
        device.clear_streams()

    def _next(self) -> _Job | None:
        with self._changed:
            self._is_busy = False
            self._changed.wait_for(lambda: self._urgent or self._others or self._is_closed)
            self._is_busy = bool(self._urgent or self._others)
            return (self._urgent or self._others).popleft() if self._is_busy else None
