"""Writing for a person or a pipe: answers to stdout, everything else to stderr, dim where that shows.

Knows streams, colour and control characters; knows no engine. A model's text is somebody else's: on a terminal its control characters
are left out, so that no answer can move the cursor, set a title or fill the clipboard.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import stat
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

from mlxspec.errors import ConfigError

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")  # all but newline and tab
_LONGEST = 1500  # characters of one sentence
_held: list[str] = []  # lines of a trace that wait for the end of an answer's line
_is_open = False  # whether a line of an answer on stdout has not ended


def clean(text: str) -> str:
    """`text` without control characters other than newline and tab."""
    return _CONTROL.sub("", text)


def sentence(text: str) -> str:
    """`text` as one line without control characters, cut where it is absurdly long."""
    line = clean(" ".join(text.split()))
    return line if len(line) <= _LONGEST else line[: _LONGEST - 4] + " ..."


def is_terminal(stream: TextIO) -> bool:
    """Whether a person may be looking at `stream`."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def use_colour(stream: TextIO) -> bool:
    """A terminal that is not dumb, and NO_COLOR (no-color.org) is unset or empty."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def can_move(stream: TextIO) -> bool:
    """A terminal that is not dumb: a line on it can be written again."""
    return is_terminal(stream) and os.environ.get("TERM", "dumb") != "dumb"


def dim(text: str, stream: TextIO) -> str:
    """`text` as a remark, where `stream` can show that."""
    return f"\x1b[2m{text}\x1b[0m" if use_colour(stream) else text


def say(text: str, *, raw: bool = False) -> None:
    """Write a piece of an answer to stdout, at once. raw: the text is our own, escapes included."""
    sys.stdout.write(text if raw or not is_terminal(sys.stdout) else clean(text))
    sys.stdout.flush()
    if text:
        line_is_open(not text.endswith("\n"))


def line_is_open(is_open: bool) -> None:
    """Note whether stdout is in the middle of a line from now on. Where it is not, lines of a trace that waited are written."""
    global _is_open
    _is_open = is_open
    if not is_open:
        waiting, _held[:] = list(_held), []
        for text in waiting:
            note(text)


def trace(text: str) -> None:
    """Write a line of a trace to stderr. Where answer and trace share a terminal it waits until the answer's line has ended."""
    if _is_open and is_terminal(sys.stdout) and is_terminal(sys.stderr):
        _held.append(text)
    else:
        note(text)


def say_drafted(text: str, num_chars: int) -> None:
    """Write a model's text, its first `num_chars` characters in green where colour is used: they were drafted."""
    if num_chars and use_colour(sys.stdout):
        say(f"\x1b[32m{clean(text[:num_chars])}\x1b[0m{clean(text[num_chars:])}", raw=True)
    else:
        say(text)


def note(text: str) -> None:
    """Write a remark on the answer to stderr; on a terminal dim and broken between words."""
    for part in _lines(sentence(_as_typed(text))):
        note_as_is(part)


def note_row(name: str, text: str, width: int) -> None:
    """Write a row of a list to stderr, with the text after `width` columns unless the terminal is narrow; there broken between words."""
    is_narrow = is_terminal(sys.stderr) and shutil.get_terminal_size().columns <= 2 * width
    for part in _lines(f"{name:<{0 if is_narrow else width}} {text}", 2 if is_narrow else width + 1):
        note_as_is(part)


def _lines(line: str, indent: int = 0) -> list[str]:
    """`line` as lines that a terminal has room for. indent: of all but the first."""
    columns = shutil.get_terminal_size().columns
    if not is_terminal(sys.stderr) or len(line) < columns:
        return [line]
    wide, below = max(columns - 1, 20), " " * indent
    return textwrap.wrap(line, wide, subsequent_indent=below, break_long_words=False, break_on_hyphens=False)


def note_as_is(line: str) -> None:
    """Write one line to stderr, its spacing kept, dim on a terminal. Where it cannot be written, the answer still is."""
    with suppress(OSError):
        print(dim(clean(line), sys.stderr), file=sys.stderr, flush=True)


def complain(text: str) -> None:
    """Write a sentence about an error to stderr; on a terminal broken between words."""
    print("\n".join(_lines(f"mlxspec: error: {sentence(_as_typed(text))}")), file=sys.stderr, flush=True)


def _as_typed(text: str) -> str:
    """`text` with its commands as this one was called."""
    return text.replace("`mlxspec ", f"`{own_name()} ")


def own_name() -> str:
    """Return what to type to run this command again: `mlxspec`, or the script of a checkout that was called."""
    return sentence(os.environ.get("MLXSPEC_COMMAND", "")) or "mlxspec"


def prepare_streams() -> None:
    """Replace a stream that was closed at the start by one that discards; let a stdout that cannot spell a character show `?` instead."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (as long-lived as the process)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def takes_more(stream: TextIO) -> bool:
    """Whether a write to `stream` would not wait now for somebody who reads."""
    try:
        return bool(select.select((), (stream.fileno(),), (), 0)[1])
    except (OSError, ValueError, AttributeError):  # no file at all, as in a test
        return True


def discard_output(*streams: TextIO) -> None:
    """Discard what is still buffered in streams that no program reads any more, so that Python's own flush at exit stays quiet."""
    for stream in streams:
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        except (OSError, ValueError, AttributeError):
            pass


def stdin_is_piped() -> bool:
    """Whether stdin is a pipe or a file, so that what somebody put there is to be read."""
    if is_terminal(sys.stdin):
        return False
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # no file at all, as in a test
        return True
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def read_stdin() -> str:
    """All of stdin. The newline an editor or `echo` puts at the end is not part of it. Raises ConfigError unless it is UTF-8."""
    raw = getattr(sys.stdin, "buffer", None)
    if is_terminal(sys.stdin):
        note("Type the prompt; Ctrl-D at the beginning of a line ends it.")
    try:
        text = checked(sys.stdin.read() if raw is None else raw.read().decode("utf-8"), "The standard input")
    except UnicodeDecodeError as error:
        raise ConfigError("The standard input is not UTF-8 text.") from error
    return text.removesuffix("\n").removesuffix("\r")


def stdin_lines() -> Iterator[str]:
    """Lines of stdin as they come, line ends taken off. Raises ConfigError unless they are UTF-8."""
    try:
        for line in sys.stdin:
            yield line.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ConfigError("The standard input is not UTF-8 text.") from error


def checked(text: str, what: str) -> str:
    """`text` if it is whole Unicode. What is no UTF-8 arrives from the shell as lone surrogates; raises ConfigError for those."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is not UTF-8 text.") from error
    return text
