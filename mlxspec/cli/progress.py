"""One line that says what is being waited for, overwritten in place and gone when it is over; nothing where no terminal shows it.

Knows stderr; what is waited for is the caller's.
"""

from __future__ import annotations

import shutil
import sys
import time

from mlxspec.cli import terminal
from mlxspec.events import Event, PrefillEvent

_PATIENCE = 1.0  # seconds without a word
_BAR = 24  # columns


class StatusLine:
    """`show` a text in the line where the cursor stands; `clear` takes it away. Does nothing on a pipe or a dumb terminal."""

    def __init__(self) -> None:
        self._is_shown = False

    def show(self, text: str) -> None:
        if not terminal.can_move(sys.stderr):
            return
        width = shutil.get_terminal_size().columns - 1
        line = terminal.dim(terminal.sentence(text)[: max(width, 8)], sys.stderr)
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        self._is_shown = True

    def clear(self) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._is_shown = False


def bar(done: int, total: int) -> str:
    """`━━━━╌╌╌╌ 3,072 of 8,120`; plain characters where the terminal knows no others."""
    full, empty = ("━", "╌") if "utf" in (getattr(sys.stderr, "encoding", "") or "").lower() else ("#", "-")
    filled = _BAR * min(done, total) // max(total, 1)
    return f"{full * filled}{empty * (_BAR - filled)} {done:,} of {total:,}"


class PrefillProgress:
    """Shows how much of a prompt has been read, once that takes longer than a second, until anything else happens."""

    def __init__(self) -> None:
        self._status = StatusLine()
        self._since = time.monotonic()
        self._is_over = False

    def take(self, event: Event) -> None:
        if not isinstance(event, PrefillEvent):
            self.end()
        elif not self._is_over and time.monotonic() - self._since > _PATIENCE:
            self._status.show(f"reading the prompt {bar(event.num_done, event.num_total)} tokens")

    def end(self) -> None:
        self._is_over = True
        self._status.clear()
