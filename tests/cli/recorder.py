"""A command in a pseudo-terminal whose screen is kept as a person would see it. Knows keys and screens; knows nothing of the command.

Needs the package pyte, which emulates the terminal.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import pyte

SECONDS = 120.0  # how long a slow machine may take for anything


DIM = "808080"  # the colour that stands for a dim default


class Screen(pyte.HistoryScreen):
    """pyte's, which knows no dim text."""

    def select_graphic_rendition(self, *attributes: int, **settings: bool) -> None:
        super().select_graphic_rendition(*attributes, **settings)
        if 2 in attributes and self.cursor.attrs.fg == "default":
            self.cursor.attrs = self.cursor.attrs._replace(fg=DIM)


class Recorder:
    """Runs `command` until closed. `screen` is what is seen now; lines that left it are in `screen.history.top`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        columns: int = 90,
        rows: int = 30,
        seconds: float = SECONDS,
    ) -> None:
        self.screen = Screen(columns, rows, history=5000, ratio=0.5)
        self.screen.write_process_input = (
            self._reply
        )  # answers to the command's questions, as a terminal gives them
        self._stream = pyte.Stream(self.screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._seconds = seconds
        self.received = b""
        self._handle, theirs = pty.openpty()
        self._set_size(columns, rows)
        self._process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._handle)

    def type(self, keys: str | bytes) -> None:
        os.write(self._handle, keys if isinstance(keys, bytes) else keys.encode())

    def paste(self, text: str) -> None:
        self.type(f"\x1b[200~{text}\x1b[201~")

    def interrupt(self) -> None:
        self.type(b"\x03")

    def end(self, number: int) -> None:
        """Send this signal."""
        self._process.send_signal(number)

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        self._set_size(columns, rows)
        os.killpg(self._process.pid, signal.SIGWINCH)

    def text(self) -> str:
        """The screen and what scrolled off above it, blanks at the ends of lines left out."""
        above = ["".join(line[x].data for x in sorted(line)) for line in self.screen.history.top]
        return "\n".join(line.rstrip() for line in [*above, *self.screen.display]).rstrip("\n")

    def wait_for(self, seen: str | Callable[[str], bool], *, after: int = 0) -> str:
        """Watch until `seen` is in the text behind its first `after` characters, or is true of it. Raises AssertionError with the screen
        when it takes too long."""
        until = time.monotonic() + self._seconds
        while True:
            text = self.text()[after:]
            if seen in text if isinstance(seen, str) else seen(text):
                return text
            if not self._read(until):
                raise AssertionError(f"waited in vain for {seen!r}; the screen:\n{self.text()}")

    def settle(self, quiet: float = 0.4) -> str:
        """Watch until nothing new has come for so many seconds."""
        while self._read(time.monotonic() + quiet):
            pass
        return self.text()

    def wait(self) -> int:
        """The exit code, once the command has ended."""
        until = time.monotonic() + self._seconds
        while self._read(until):
            pass
        return self._process.wait(self._seconds)

    def _read(self, until: float) -> bool:
        """Take in what comes next; False at the end of output or of the time."""
        left = until - time.monotonic()
        if left <= 0 or not select.select([self._handle], [], [], left)[0]:
            return False
        try:
            data = os.read(self._handle, 65536)
        except OSError:  # Linux says so when nobody writes any more
            return False
        self.received += data
        self._stream.feed(self._decoder.decode(data))
        return bool(data)

    def _reply(self, text: str) -> None:
        os.write(self._handle, text.encode())

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._handle, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _take_terminal() -> None:
    """The child's terminal becomes its controlling one, so that Ctrl-C reaches it as a signal."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
