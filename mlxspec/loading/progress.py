"""Reports the progress of long work to a watcher, such as a progress bar.

The work says how much there is and when a part is done. Without a watcher nothing happens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

Step = Callable[[int], None]
Watcher = Callable[[str, int], AbstractContextManager[Step]]

_watchers: list[Watcher] = []


@contextlib.contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Report progress to `watcher` within the block. For each piece of work, `watcher(what, total)` is entered as a context manager, and
    the function that it yields is called with the bytes of each part that is done."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.pop()


@contextlib.contextmanager
def steps(what: str, total: int) -> Iterator[Step]:
    """Announce a piece of work of `total` bytes to the watcher. Yields a function to call with the bytes of each part that is done.
    what: a phrase that names the work."""
    if not _watchers:
        yield lambda _: None
        return
    with _watchers[-1](what, total) as step:
        yield step


def amount(num_bytes: int) -> str:
    """Return a number of bytes in decimal units with three digits: "8.8 MB", "19.3 GB"."""
    value = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
