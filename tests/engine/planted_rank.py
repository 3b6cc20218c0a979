"""The `mlxspec` command as a rank with a fault in it: `python -m tests.engine.planted_rank FAULT ARGUMENTS`. Faults of the start are there
at once, the others from the signal SIGUSR1 on."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mlxspec.cli.main import main
from mlxspec.engine.engine import Engine
from mlxspec.engine.ranks import line, peers
from mlxspec.engine.request import Request

_planted = threading.Event()
_lines: list[line.Line] = []


def _replace(owner: type, name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _watched(init: Any) -> Any:
    def begin(self: line.Line, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        _lines.append(self)

    return begin


def _hang(step: Any) -> Any:
    """The thread that computes stands still; the process lives."""

    def hang(self: Engine, *args: Any) -> None:
        while _planted.is_set():
            time.sleep(0.1)
        step(self, *args)

    return hang


def _raise(step: Any) -> Any:
    def fail(self: Engine, *args: Any) -> None:
        if _planted.is_set():
            raise MemoryError("the planted fault")
        step(self, *args)

    return fail


def _flip(accept: Any) -> Any:
    """Another token than the one that was sampled."""

    def flipped(self: Request, tokens: list[int], **more: Any) -> Any:
        if _planted.is_set():
            tokens = [(tokens[0] + 1) % 256, *tokens[1:]]
        return accept(self, tokens, **more)

    return flipped


def _other_version(versions: Any) -> Any:
    return lambda: versions() | {"mlx": "0.0.1"}


def _cut_line() -> None:
    for each in _lines:
        for peer in each._peers.values():
            peer.connection.shutdown(socket.SHUT_RDWR)


def _cut_ring() -> None:
    """Close every TCP connection of this process that is not the line's."""
    own = {peer.connection.getsockname()[1] for each in _lines for peer in each._peers.values()}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            if found.family == socket.AF_INET and found.getsockname()[1] not in own:
                found.getpeername()  # raises where it is none
                found.shutdown(socket.SHUT_RDWR)


def run() -> int:
    fault, arguments = sys.argv[1], sys.argv[2:]
    _replace(line.Line, "__init__", _watched)
    if fault == "version":
        peers._versions = _other_version(peers._versions)
    elif fault == "hangs":
        _replace(Engine, "_advance", _hang)
    elif fault == "raises":
        _replace(Engine, "_advance", _raise)
    elif fault == "differs":
        _replace(Request, "accept", _flip)

    def plant(number: int, frame: object) -> None:
        _planted.set()
        cut = {"line": _cut_line, "ring": _cut_ring}.get(fault)
        if cut is not None:
            threading.Thread(target=cut, daemon=True).start()

    signal.signal(signal.SIGUSR1, plant)
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run())
