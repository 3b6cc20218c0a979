"""Reads what a person types: with history, several lines, completion and safe paste where the terminal can; line by line where not.

Enter sends; Alt-Enter, or a backslash at the end, begins a new line. What is pasted never sends itself and is never a command. Knows keys
and files of history; knows no model and no command but their names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mlxspec.cli import terminal
from mlxspec.platform import folders

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History

PROMPT = "> "
CONTINUED = "… "
_PASTES_ARE_MARKED = (
    "\x1b[?2004h"  # by the terminal: what is pasted during an answer comes into the editor, and is not sent
)
_MOST_HISTORY = 4 << 20  # bytes; a longer file begins anew, the old one kept beside it

# A command's argument: the words it may be, or "path"
Completions = Mapping[str, Callable[[], Sequence[str]]]


class Typed(NamedTuple):
    """A text that the user typed. may_command: whether it may be a command, which pasted texts and texts of several lines may not."""

    text: str
    may_command: bool = True


class PlainReader:
    """A reader of lines without an editor. It shows its prompt on stdout where that is a terminal, else on stderr."""

    def read(self) -> Typed:
        """Read one text, which a backslash at the end of a line continues, and return it. Raises EOFError at the end of input,
        KeyboardInterrupt for Ctrl-C."""
        lines = [self._line(PROMPT)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line(".. "))
        return Typed("\n".join(lines), may_command=len(lines) == 1)

    def _line(self, prompt: str) -> str:
        if terminal.is_terminal(sys.stdout):
            return input(prompt)
        print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")


class LineEditor:
    """A reader of texts with prompt_toolkit's editor. completions: by command, a function that returns its possible arguments. history:
    the file that keeps typed texts, None to keep them for this run only."""

    def __init__(self, completions: Completions, history: Path | None) -> None:
        from prompt_toolkit import PromptSession

        self._pasted_slash = False
        self._completions = completions
        self._session: PromptSession[str] = PromptSession(
            history=kept_history(history),
            completer=_completer(completions),
            complete_while_typing=self._is_command,
            multiline=True,
            key_bindings=self._keys(),
            prompt_continuation=lambda width, number, soft: CONTINUED,
            reserve_space_for_menu=5,
            enable_suspend=True,
        )

    def read(self) -> Typed:
        """Read one text with the editor and return it. Raises EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C."""
        self._pasted_slash = False
        text = self._session.prompt([("bold ansicyan", PROMPT)])
        terminal.say(_PASTES_ARE_MARKED, raw=True)  # the session has ended that
        return Typed(text, may_command=not self._pasted_slash and "\n" not in text)

    @property
    def _is_command(self) -> Any:
        from prompt_toolkit.filters import Condition

        return Condition(lambda: self._session.default_buffer.text.startswith("/") and not self._pasted_slash)

    def _keys(self) -> Any:
        from prompt_toolkit.completion import CompleteEvent
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.keys import Keys

        keys = KeyBindings()

        @keys.add("enter")
        def _(event: Any) -> None:
            buffer = event.current_buffer
            if buffer.text.endswith("\\") and buffer.document.is_cursor_at_the_end:
                buffer.delete_before_cursor(1)
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def _(event: Any) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("tab")
        def _(event: Any) -> None:
            """Complete the word at once, so that keys typed after it find the completed word."""
            buffer = event.current_buffer
            if buffer.complete_state:
                buffer.complete_next()
                return
            found = list(
                buffer.completer.get_completions(buffer.document, CompleteEvent(completion_requested=True))
            )
            if len(found) == 1:
                buffer.apply_completion(found[0])
            elif found:
                buffer.start_completion(insert_common_part=True)

        @keys.add(Keys.BracketedPaste)
        def _(event: Any) -> None:
            text = event.data.replace("\r\n", "\n").replace("\r", "\n")
            buffer = event.current_buffer
            self._pasted_slash = (self._pasted_slash and bool(buffer.text)) or (
                not buffer.document.text_before_cursor and text.startswith("/")
            )
            buffer.insert_text(terminal.clean(text))

        return keys


def _completer(completions: Completions) -> Any:
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    class Commands(Completer):
        """A completer of the names of commands and of their arguments."""

        def get_completions(self, document: Document, complete_event: Any) -> Iterable[Completion]:
            text = document.text
            if not text.startswith("/") or "\n" in text:
                return
            name, blank, rest = text[1:].partition(" ")
            if not blank:
                yield from (Completion(n, -len(name)) for n in completions if n.startswith(name))
                return
            words = completions.get(name, tuple)()
            if "path" in words:
                yield from PathCompleter(expanduser=True).get_completions(Document(rest), complete_event)
            begun = rest.rpartition(",")[2] if name == "draft" else rest
            yield from (
                Completion(w, -len(begun)) for w in words if w.startswith(begun) and w not in (begun, "path")
            )

    return Commands()


def kept_history(path: Path | None) -> History:
    """Return a history that is kept in a file which only its owner can read; a history in memory where path is None or the file cannot
    be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if path is None:
        return InMemoryHistory()

    class Private(FileHistory):
        def store_string(self, string: str) -> None:
            if string == terminal.clean(string):
                try:
                    super().store_string(string)
                except (OSError, UnicodeEncodeError):  # a full disk does not end a conversation
                    return

    try:
        if path.exists() and path.stat().st_size > _MOST_HISTORY:
            path.replace(path.with_suffix(".old"))
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        path.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return Private(str(path))


def history_file() -> Path | None:
    """Return the path of the file that keeps the texts typed in chats, None where the cache folder cannot be used."""
    folder, notice = folders.private_folder("history")
    return None if notice else folder / "chat"


def best_reader(completions: Completions, *, keeps: bool = True) -> PlainReader | LineEditor:
    """Return an editor where stdin and stdout are terminals that can move the cursor, else a plain reader. keeps: whether typed texts
    are kept for later chats."""
    if terminal.can_move(sys.stdin) and terminal.can_move(sys.stdout):
        return LineEditor(completions, history_file() if keeps else None)
    return PlainReader()
