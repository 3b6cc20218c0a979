"""A bar on stderr for work that says how far it has come; nothing where nobody looks on. Knows rich; knows no work."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from mlxspec.cli import terminal
from mlxspec.loading import progress


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
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(terminal.sentence(what), total=total)
        yield lambda done: bar.advance(task, done)
