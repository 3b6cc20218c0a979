"""A line on stderr that says how many of how many are done, where a person looks on; nothing elsewhere. Knows numbers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from mlxspec.cli import terminal


@contextlib.contextmanager
def counted(what: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to be told (done, total); the line is gone at the end."""
    if not terminal.use_colour(sys.stderr):
        yield lambda done, total: None
        return

    def told(done: int, total: int) -> None:
        print(f"\r\x1b[2K\x1b[2m{what}: {done} of {total}\x1b[0m", end="", file=sys.stderr, flush=True)

    try:
        yield told
    finally:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
