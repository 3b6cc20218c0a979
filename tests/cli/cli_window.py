"""A terminal in memory: what a person sees after what a program has written. Skips whoever imports it where pyte is missing."""

from __future__ import annotations

import io

import pytest

pyte = pytest.importorskip("pyte", reason="needs an emulated terminal")

OURS = r"\x1b\[([\d;]*m|2K|1A|\?25[lh])|\r"  # styles, and the moves with which rich.live draws a growing block again


class Window(io.StringIO):
    """`text` is what a person sees, with what has left the window above it."""

    encoding = "utf-8"

    def __init__(self, width: int, height: int) -> None:
        super().__init__()
        self.screen = pyte.HistoryScreen(width, height, history=5000, ratio=0.5)
        self.screen.set_mode(20)  # a line feed begins a line, as terminals are set
        self._stream = pyte.Stream(self.screen)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._stream.feed(text)
        return super().write(text)

    @property
    def text(self) -> str:
        lines = ["".join(row[i].data for i in range(self.screen.columns)) for row in self.screen.history.top]
        return "\n".join(line.rstrip() for line in [*lines, *self.screen.display]).rstrip() + "\n"
