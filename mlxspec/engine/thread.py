"""One long-lived thread, in which engines run one after the other.

MLX keeps a stream, and without a GPU a thread, for every thread that has used it, and never gives them back. A process that loads models
again and again therefore runs all of them in one thread. Knows jobs and their end; knows no engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import mlx.core as mx


class EngineThread:
    """Runs jobs in the order in which they come. The thread starts with the first job and is a daemon."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], None], threading.Event] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="mlxspec-engine", daemon=True)
        self._is_started = self._is_closed = False

    def run(self, job: Callable[[], None]) -> threading.Event:
        """Queue a job, which must not raise. The event is set when it has ended."""
        if self._is_closed:
            raise RuntimeError("the engine's thread has been closed")
        ended = threading.Event()
        self._jobs.put((job, ended))
        if not self._is_started:
            self._is_started = True
            self._thread.start()
        return ended

    @property
    def is_current(self) -> bool:
        """Whether the caller is a job."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """End the thread behind the jobs that are queued. Closing twice does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._jobs.put(None)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end of a closed thread. Returns whether it has ended."""
        if self._is_started and not self.is_current:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while (queued := self._jobs.get()) is not None:
            job, ended = queued
            del queued
            try:
                job()
            finally:
                del job
                ended.set()
        # streams belong to the thread that made them; left to the end of the process they abort it
        getattr(mx, "clear_streams", lambda: None)()
