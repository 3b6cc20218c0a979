"""Puts a text on the clipboard with a program of the system, else with an escape sequence of the terminal (OSC 52)."""

from __future__ import annotations

import base64
import shutil
import subprocess
import sys

from mlxspec.cli import terminal
from mlxspec.errors import ConfigError

_PROGRAMS = (("pbcopy",), ("wl-copy",), ("xclip", "-selection", "clipboard"), ("xsel", "-ib"))
_LONGEST = 70_000  # bytes that terminals take


def copy(text: str) -> None:
    """Copy a text to the clipboard. Raises ConfigError where neither a program nor the terminal can do so."""
    data = text.encode("utf-8")
    for program in _PROGRAMS:
        if shutil.which(program[0]) is None:
            continue
        try:
            subprocess.run(program, input=data, timeout=5, check=True, stderr=subprocess.DEVNULL)
            return
        except (OSError, subprocess.SubprocessError):
            continue  # there, but without a display
    if not terminal.can_move(sys.stdout) or len(data) > _LONGEST:
        raise ConfigError("There is no clipboard here; /save keeps the conversation in a file.")
    terminal.say(f"\x1b]52;c;{base64.b64encode(data).decode('ascii')}\x07", raw=True)
