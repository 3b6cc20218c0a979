"""Holds back keys that are typed during an answer or a load until the next prompt, so that they do not appear in the answer. Ctrl-C works.

Knows termios where there is one; elsewhere nothing happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from mlxspec.cli import terminal


@contextmanager
def no_echo(stream: TextIO) -> Iterator[None]:
    """Keep the terminal of `stream` from showing typed keys and from gathering them into lines, within the block."""
    try:
        import termios
    except ImportError:
        yield
        return
    if not terminal.is_terminal(stream):
        yield
        return
    try:
        handle = stream.fileno()
        before = termios.tcgetattr(handle)
    except (termios.error, OSError, ValueError):
        yield
        return
    quiet = [*before]
    quiet[3] = before[3] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH  # Ctrl-C throws no keys away
    with suppress(termios.error):
        termios.tcsetattr(handle, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(handle, termios.TCSADRAIN, before)
