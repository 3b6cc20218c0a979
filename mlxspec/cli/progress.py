"""One line that says what is being waited for, overwritten in place and gone when it is over; nothing where no terminal shows it.

Knows stderr; what is waited for is the caller's.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mlxspec.cli import terminal
from mlxspec.events import Event

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
    """Shows how much of a prompt has been read, once that takes longer than a second."""

    def __init__(self, status: StatusLine | None = None) -> None:
        self._status = status or StatusLine()
        self._since = time.monotonic()

    def take(self, event: Event) -> bool:
        """Whether the event was about reading a prompt. Any other one takes the line away."""
        total = getattr(event, "num_total", None)
        if total is None:
            self._status.clear()
            return False
        done = getattr(event, "num_done", 0)
        if done < total and time.monotonic() - self._since > _PATIENCE:
            self._status.show(f"reading the prompt {bar(done, total)} tokens")
        elif done >= total:
            self._status.clear()
        return True


@contextmanager
def loading(name: str) -> Iterator[None]:
    """While a model is being loaded: its name, the time and the memory in use, once that takes longer than a second."""
    if not terminal.can_move(sys.stderr):
        yield
        return
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(name, over), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _watch(name: str, over: threading.Event) -> None:
    from mlxspec.cli.stats_line import size

    status, started = StatusLine(), time.monotonic()
    if over.wait(_PATIENCE):
        return
    while not over.wait(0.2):
        if _others_draw():
            continue
        mlx = sys.modules.get("mlx.core")
        memory = getattr(mlx, "get_active_memory", None)
        used = "" if memory is None else f", {size(memory())}"
        status.show(f"loading {name} ... {time.monotonic() - started:.0f} s{used}")
    status.clear()


def _others_draw() -> bool:
    """Whether a download shows bars of its own."""
    bars = getattr(getattr(sys.modules.get("tqdm.std"), "tqdm", None), "_instances", ())
    return bool(len(bars)) or "HF_DEBUG" in os.environ
