"""Writes for a person or a pipe: answers to stdout, everything else to stderr, in dim style where the terminal has it.

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
    """Return a text without control characters other than newline and tab."""
    return _CONTROL.sub("", text)


def sentence(text: str) -> str:
    """Return a text as one line without control characters, of at most _LONGEST characters."""
    line = clean(" ".join(text.split()))
    return line if len(line) <= _LONGEST else line[: _LONGEST - 4] + " ..."


def is_terminal(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def use_colour(stream: TextIO) -> bool:
    """Return whether to write colours to `stream`: it is a terminal that is not dumb, and NO_COLOR (no-color.org) is unset or empty."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def can_move(stream: TextIO) -> bool:
    """Return whether a line of `stream` can be rewritten: it is a terminal that is not dumb."""
    return is_terminal(stream) and os.environ.get("TERM", "dumb") != "dumb"


def dim(text: str, stream: TextIO) -> str:
    """Return a text in dim style, unchanged where `stream` does not show colours."""
    return f"\x1b[2m{text}\x1b[0m" if use_colour(stream) else text


def say(text: str, *, raw: bool = False) -> None:
    """Write a piece of an answer to stdout and flush it. raw: keep control characters, because mlxspec itself wrote the text."""
    sys.stdout.write(text if raw or not is_terminal(sys.stdout) else clean(text))
    sys.stdout.flush()
    if text:
        line_is_open(not text.endswith("\n"))


def line_is_open(is_open: bool) -> None:
    """Set whether stdout is in the middle of a line. Where it is not, the waiting lines of a trace are written."""
    global _is_open
    _is_open = is_open
    if not is_open:
        waiting, _held[:] = list(_held), []
        for text in waiting:
            note(text)


def trace(text: str) -> None:
    """Write a line of a trace to stderr. Where stdout and stderr are terminals, the line waits until the answer's line has ended."""
    if _is_open and is_terminal(sys.stdout) and is_terminal(sys.stderr):
        _held.append(text)
    else:
        note(text)


def say_drafted(text: str, num_chars: int) -> None:
    """Write a piece of an answer to stdout with its first `num_chars` characters, which were drafted, in green where colours are shown."""
    if num_chars and use_colour(sys.stdout):
        say(f"\x1b[32m{clean(text[:num_chars])}\x1b[0m{clean(text[num_chars:])}", raw=True)
    else:
        say(text)


def note(text: str) -> None:
    """Write a remark to stderr, on a terminal in dim style and wrapped between words."""
    for part in _lines(sentence(_as_typed(text))):
        note_as_is(part)


def note_row(name: str, text: str, width: int) -> None:
    """Write a row of a list to stderr: the name in `width` columns, then the text, wrapped between words. On a narrow terminal the name
    takes its own width."""
    is_narrow = is_terminal(sys.stderr) and shutil.get_terminal_size().columns <= 2 * width
    for part in _lines(f"{name:<{0 if is_narrow else width}} {text}", 2 if is_narrow else width + 1):
        note_as_is(part)


def _lines(line: str, indent: int = 0) -> list[str]:
    """Return a line wrapped between words to the width of the terminal on stderr; unchanged where stderr is no terminal. indent: columns
    before all lines but the first."""
    columns = shutil.get_terminal_size().columns
    if not is_terminal(sys.stderr) or len(line) < columns:
        return [line]
    wide, below = max(columns - 1, 20), " " * indent
    return textwrap.wrap(line, wide, subsequent_indent=below, break_long_words=False, break_on_hyphens=False)


def note_as_is(line: str) -> None:
    """Write one line to stderr with its spacing kept, on a terminal in dim style. A failure to write is ignored, so that the answer is
    not lost."""
    with suppress(OSError):
        print(dim(clean(line), sys.stderr), file=sys.stderr, flush=True)


def complain(text: str) -> None:
    """Write an error message to stderr, on a terminal wrapped between words."""
    print("\n".join(_lines(f"mlxspec: error: {sentence(_as_typed(text))}")), file=sys.stderr, flush=True)


def _as_typed(text: str) -> str:
    """Return a text in which commands in backquotes begin with the program's name as the user typed it."""
    return text.replace("`mlxspec ", f"`{own_name()} ")


def own_name() -> str:
    """Return what to type to run the program again: `mlxspec`, or the script of a checkout by which it was started."""
    return sentence(os.environ.get("MLXSPEC_COMMAND", "")) or "mlxspec"


def prepare_streams() -> None:
    """Replace standard streams that are closed by the null device, and make stdout and stderr write `?` for characters that they cannot
    encode."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (as long-lived as the process)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def takes_more(stream: TextIO) -> bool:
    """Return whether a write to `stream` would not block now."""
    try:
        return bool(select.select((), (stream.fileno(),), (), 0)[1])
    except (OSError, ValueError, AttributeError):  # no file at all, as in a test
        return True


def discard_output(*streams: TextIO) -> None:
    """Discard the buffered output of streams that no program reads any more, so that Python's own flush at exit does not fail."""
    for stream in streams:
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        except (OSError, ValueError, AttributeError):
            pass


def stdin_is_piped() -> bool:
    """Return whether stdin is a pipe or a file, whose text is to be read."""
    if is_terminal(sys.stdin):
        return False
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # no file at all, as in a test
        return True
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def read_stdin() -> str:
    """Return all of stdin without the newline at its end. Raises ConfigError unless it is UTF-8."""
    raw = getattr(sys.stdin, "buffer", None)
    if is_terminal(sys.stdin):
        note("Type the prompt; Ctrl-D at the beginning of a line ends it.")
    try:
        text = checked(sys.stdin.read() if raw is None else raw.read().decode("utf-8"), "The standard input")
    except UnicodeDecodeError as error:
        raise ConfigError("The standard input is not UTF-8 text.") from error
    return text.removesuffix("\n").removesuffix("\r")


def stdin_lines() -> Iterator[str]:
    """Yield the lines of stdin as they are read, without line ends. Raises ConfigError unless they are UTF-8."""
    try:
        for line in sys.stdin:
            yield line.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ConfigError("The standard input is not UTF-8 text.") from error


def checked(text: str, what: str) -> str:
    """Return the text. Raises ConfigError where it holds lone surrogates, as which bytes that are not UTF-8 arrive from the shell. what:
    name of the text, for the error."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is not UTF-8 text.") from error
    return text
