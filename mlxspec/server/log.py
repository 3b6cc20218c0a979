"""One line a request, on stderr. What clients send is escaped, and no prompt or answer is ever written."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any


def line(text: str) -> None:
    """A line with the time. Control characters are shown as escapes: nobody writes a line of their own, or to the terminal."""
    stamp = time.strftime("%H:%M:%S")
    with suppress(OSError):  # where nobody reads any more, serving goes on
        print(f"{stamp} {escaped(text)}", file=sys.stderr, flush=True)


def request(scope: Mapping[str, Any], status: int, seconds: float, said: str = "") -> None:
    """A request that has ended. `said`: what its client was told, if anything."""
    client = (scope.get("client") or ("-", 0))[0]
    tail = f" {said[:400]}" if said else ""
    line(f"{client} {scope['method']} {scope['path'][:200]} {status} {seconds * 1e3:.0f} ms{tail}")


def escaped(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def failure(error: BaseException) -> None:
    """An exception that nobody expected, with its traceback."""
    for part in traceback.format_exception(error):
        for one in part.rstrip("\n").split("\n"):
            line(one)
