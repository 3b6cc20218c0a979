"""Shows an answer: bare text for a pipe, plain lines for a dumb terminal, Markdown and dim thinking for a good one.

Only answers go to stdout where that is no terminal; thinking goes to stderr then. Knows streams and what may be shown; knows no model.
"""

from __future__ import annotations

import sys
import time
from typing import Literal

from mlxspec.cli import terminal
from mlxspec.cli.progress_bar import Waiting

Show = Literal["show", "hide"]
# rich's own assume a dark background
_STYLES = {
    "markdown.code": "cyan",
    "markdown.code_block": "cyan",
    "markdown.h1": "bold",
    "markdown.h2": "bold",
    "markdown.h3": "bold",
    "markdown.item.bullet": "none",
    "markdown.item.number": "none",
    "markdown.block_quote": "italic",
    "markdown.link": "none",
    "markdown.link_url": "underline",
}


class View:
    """A view that shows one answer after another as bare text. `begin` begins an answer, `think` and `say` receive its pieces, `end`
    ends it.

    show: "show" writes thinking as it arrives, "hide" only the number of its words. `thought` holds the thinking of the last answer.
    """

    def __init__(self, show: Show = "show") -> None:
        self.show = show
        self.thought = ""
        self._thought_since = 0.0
        self._is_thinking = False
        self._waiting = Waiting("")

    def begin(self) -> None:
        self.thought, self._is_thinking = "", False

    def think(self, text: str) -> None:
        if not self._is_thinking:
            self._is_thinking, self._thought_since = True, time.monotonic()
            self._waiting = Waiting("thinking")
            if self.show == "hide":
                self._waiting.__enter__()
        self.thought += text
        if self.show == "show":
            self.write_thought(text)
        else:
            self._waiting.tell(what=f"thinking: {_words(self.thought)}")

    def say(self, text: str) -> None:
        self._close_thought()
        self.write(text)

    def end(self) -> None:
        self._close_thought()
        self.write_end()

    def unfold(self) -> bool:
        """Write the thinking of the last answer. Returns False where there was none."""
        if not self.thought:
            return False
        self.write_thought(self.thought)
        self.end_thought()
        return True

    def _close_thought(self) -> None:
        if not self._is_thinking:
            return
        self._is_thinking = False
        self._waiting.end()
        if self.show == "show":
            self.end_thought()
        else:
            seconds = time.monotonic() - self._thought_since
            terminal.note(f"thought for {seconds:.0f} s, {_words(self.thought)} (/think show tells them)")

    # --- bare text; other views draw differently

    def write(self, text: str) -> None:
        terminal.say(text)

    def write_end(self) -> None:
        terminal.say("\n")

    def write_thought(self, text: str) -> None:
        shown = terminal.clean(text) if terminal.is_terminal(sys.stderr) else text
        print(terminal.dim(shown, sys.stderr), end="", file=sys.stderr, flush=True)

    def end_thought(self) -> None:
        print(file=sys.stderr, flush=True)


class PlainView(View):
    """A view for a terminal without styles, which puts thinking between the lines `[thinking]` and `[answer]`."""

    def __init__(self, show: Show = "show") -> None:
        super().__init__(show)
        self._said = False

    def write_thought(self, text: str) -> None:
        if not self._said:
            terminal.say("[thinking]\n")
            self._said = True
        terminal.say(text)

    def end_thought(self) -> None:
        terminal.say("\n[answer]\n")
        self._said = False


class MarkdownView(View):
    """A view for a terminal with styles, which draws Markdown as it arrives, and thinking in dim style before it."""

    def __init__(self, show: Show = "show") -> None:
        from rich.console import Console
        from rich.theme import Theme

        from mlxspec.cli.markdown import MarkdownStream

        super().__init__(show)
        colours: Literal["auto"] | None = "auto" if terminal.use_colour(sys.stdout) else None
        self._console = Console(
            file=sys.stdout, color_system=colours, highlight=False, emoji=False, theme=Theme(_STYLES)
        )
        self._new = MarkdownStream
        self._stream: MarkdownStream | None = None

    def begin(self) -> None:
        super().begin()
        terminal.say("\n")
        terminal.line_is_open(True)

    def write(self, text: str) -> None:
        if self._stream is None:
            self._stream = self._new(self._console)
        self._stream.push(terminal.clean(text))

    def write_end(self) -> None:
        if self._stream is not None:
            self._stream.end()
            self._stream = None
        terminal.line_is_open(False)

    def write_thought(self, text: str) -> None:
        terminal.say(terminal.dim(terminal.clean(text), sys.stdout), raw=True)

    def end_thought(self) -> None:
        terminal.say("\n\n")


def best_view(show: Show = "show") -> View:
    """Return the view that suits stdout. show: as in View."""
    if not terminal.is_terminal(sys.stdout):
        return View(show)
    return MarkdownView(show) if terminal.can_move(sys.stdout) else PlainView(show)


def _words(text: str) -> str:
    number = len(text.split())
    return f"{number:,} word{'' if number == 1 else 's'}"
