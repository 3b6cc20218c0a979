"""A bar on stderr for work that says how far it has come; nothing where nobody looks on. Knows rich; knows no work."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlxspec.cli import terminal
from mlxspec.loading import progress

if TYPE_CHECKING:
    from rich.progress import Progress

_PATIENCE = 1.0  # seconds without a bar


@contextlib.contextmanager
def shown_progress() -> Iterator[None]:
    """Inside, long work is shown while it runs, if stderr is a terminal."""
    if not terminal.use_colour(sys.stderr):
        yield
        return
    with progress.watched_by(_bar):
        yield


@contextlib.contextmanager
def _bar(what: str, total: int) -> Iterator[progress.Step]:
    """The bar comes when a second has passed: what is quicker needs none."""
    started, done = time.monotonic(), 0
    bar: Progress | None = None

    def step(amount: int) -> None:
        nonlocal bar, done
        done += amount
        if bar is None and time.monotonic() - started > _PATIENCE:
            bar = _made()
            bar.add_task(terminal.sentence(what), total=total)
            bar.start()
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done)

    try:
        yield step
    finally:
        if bar is not None:
            bar.stop()


def _made() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(file=sys.stderr), transient=True)
