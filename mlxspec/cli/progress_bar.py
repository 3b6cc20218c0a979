"""Shows on stderr what a command is doing while the user waits: on a terminal after one second, until the work is done; elsewhere long work
in lines.

Knows rich and stderr; knows no work.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mlxspec.cli import terminal

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from mlxspec.loading.progress import Step

_PATIENCE = 1.0  # seconds without a word


class Waiting:
    """A line on stderr about work that takes time, as a context manager: enter it, `tell` the progress, leave it. Several may be open at
    once; each has a line.

    what: a phrase on the work. total: amount of work, None where unknown. unit: what is counted; "bytes" are shown as sizes, and for
    these and for "tokens" the remaining time is shown. is_long: where lines cannot be rewritten, as in a pipe, print one at the
    beginning and at each tenth.
    """

    _board: Progress | None = None  # shared by all that are shown
    _num_shown = 0
    _lock = threading.RLock()

    def __init__(self, what: str, total: int | None = None, unit: str = "", *, is_long: bool = False) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._is_long = is_long and not terminal.can_move(sys.stderr)
        self._done = self._tenths = self._num_free = 0
        self._task: TaskID | None = None
        self._since = self._told_at = 0.0
        self._timer: threading.Timer | None = None
        self._is_over = False

    def __enter__(self) -> Waiting:
        self._since = time.monotonic()
        if terminal.can_move(sys.stderr):
            self._timer = threading.Timer(max(_PATIENCE, 0.0), self._show)
            self._timer.daemon = True
            self._timer.start()
        elif self._is_long:
            terminal.note(self._what)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def tell(
        self, done: int | None = None, total: int | None = None, what: str | None = None, num_free: int = 0
    ) -> None:
        """Update the line. done: amount of finished work; total, what: new values, None to keep them; num_free: the part of `done` that
        took no time."""
        with Waiting._lock:
            self._told_at, self._num_free = time.monotonic(), num_free
            self._done = self._done if done is None else done
            self._total = self._total if total is None else total
            self._what = self._what if what is None else what
            if self._task is not None and Waiting._board is not None:
                Waiting._board.update(self._task, **self._state())
            elif _PATIENCE < 0 and self._timer is not None:
                self._show()
            elif self._is_long and self._total and 10 * self._done // self._total > self._tenths:
                self._tenths = 10 * self._done // self._total
                terminal.note(f"{self._what}: {self._state()['counts']}")

    def end(self) -> None:
        """Remove the line, because the work is done. May be called twice."""
        with Waiting._lock:
            self._is_over = True
            if self._timer is not None:
                self._timer.cancel()
            if self._task is None or Waiting._board is None:
                return
            Waiting._board.remove_task(self._task)
            self._task = None
            Waiting._num_shown -= 1
            if not Waiting._num_shown:
                Waiting._board.stop()
                Waiting._board = None

    def _show(self) -> None:
        with Waiting._lock:
            if self._is_over or self._task is not None:
                return
            if Waiting._board is None:
                Waiting._board = _made()
                Waiting._board.start()
            self._task = Waiting._board.add_task(**self._state())
            Waiting._num_shown += 1

    def _state(self) -> dict[str, Any]:
        """Return the fields of the line's task for rich's progress bar."""
        counts, total = "", self._total or 0
        speed = (self._done - self._num_free) / max(self._told_at - self._since, 1e-3)
        rest = f", {(total - self._done) / speed:.0f} s left" if speed > 0 else ""
        if total and self._unit == "bytes":
            from mlxspec.loading.progress import amount

            counts = f"{amount(self._done)} of {amount(total)}{rest}"
        elif total:
            counts = f"{self._done:,} of {total:,} {self._unit}".rstrip()
            counts += f", {speed:,.0f} a second{rest}" if rest and self._unit == "tokens" else ""
        return {
            "description": terminal.sentence(self._what),
            "completed": self._done,
            "total": self._total,
            "counts": counts,
        }


@contextlib.contextmanager
def shown_progress() -> Iterator[None]:
    """Show the progress of downloads and conversions on stderr within the block."""
    from mlxspec.loading import progress

    with progress.watched_by(_watched):
        yield


@contextlib.contextmanager
def _watched(what: str, total: int) -> Iterator[Step]:
    done = 0

    def step(amount: int) -> None:
        nonlocal done
        done += amount
        wait.tell(done)

    with Waiting(what, total, "bytes") as wait:
        yield step


def _made() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
    from rich.text import Text

    class Bar(BarColumn):
        def render(self, task: Any) -> Any:
            return super().render(task) if task.total else Text()

    columns = (
        SpinnerColumn("line"),
        TextColumn("{task.description}", markup=False),
        Bar(24),
        TextColumn("{task.fields[counts]}", markup=False),
    )
    console = Console(file=sys.stderr, highlight=False)
    return Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
