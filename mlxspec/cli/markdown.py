"""Markdown on a terminal while it is still being written, drawn by rich.

A block of the text (a paragraph, a list, a table, code) is final once the next block has begun. Final blocks are printed once and are not
touched again. The block that still grows is drawn below them by rich.live, at most as tall as the window: of a taller one its last lines
are shown until it is final. Links show their address, because an address behind a text would be the model's to choose.

Knows rich and Markdown; knows no model. Text must come without control characters.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline, escape
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.segment import Segment
from rich.syntax import Syntax
from rich.text import Text

_WIDEST = 100  # columns; longer lines are hard to read
_REST = 15  # times as long as a drawing took, before the next one


def parser() -> MarkdownIt:
    """Return a parser of CommonMark with tables and strikethrough. HTML, images and link references are plain text, because they would
    hide parts of the answer."""
    made = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    made.inline.ruler.at("escape", _escape)
    return made.disable(["image", "reference", "lheading", "html_block", "html_inline"])


def _escape(state: StateInline, silent: bool) -> bool:
    r"""Read a backslash as CommonMark does, but keep a backslash that begins a formula, `\(` or `\[`, or that ends a line. Returns
    whether there was one to read (a rule of markdown-it)."""
    if state.src[state.pos] != "\\" or state.src[state.pos + 1 : state.pos + 2] not in set("()[]\n"):
        return escape(state, silent)
    if not silent:
        state.pending += "\\"
    state.pos += 1
    return True


class MarkdownStream:
    """A writer that draws Markdown on `console` while the text grows. `push` adds text; `end` prints the rest and ends the line."""

    def __init__(self, console: Console) -> None:
        self._console, self._parser = console, parser()
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="visible",
        )
        self._growing = ""  # source of the blocks that are not final
        self._begun = False  # whether a block has been printed
        self._not_before = 0.0

    def push(self, text: str) -> None:
        self._growing += text
        self._live.start()
        if "\n" in text:
            self._print_final()
        if (started := time.monotonic()) >= self._not_before:
            lines = self._layout(self._growing)
            room = max(self._console.height - 2, 1)
            self._live.update(_joined(lines[-room:]), refresh=True)
            done = time.monotonic()
            self._not_before = done + _REST * (done - started)

    def end(self) -> None:
        self._print(self._growing)
        self._growing = ""
        self._live.stop()

    def _print_final(self) -> None:
        """Print the blocks that further text cannot change, and remove them from the growing text: all blocks of whole lines but the
        last."""
        lines = self._growing.splitlines(keepends=True)
        whole = len(lines) if self._growing.endswith("\n") else len(lines) - 1
        blocks = _blocks(self._parser.parse("".join(lines[:whole])))
        if len(blocks) > 1:
            start = blocks[-1][0].map[0]
            final, self._growing = "".join(lines[:start]), "".join(lines[start:])
            self._print(final)

    def _print(self, source: str) -> None:
        self._live.update("")
        if lines := self._layout(source):
            self._console.print(_joined(lines), end="\n", soft_wrap=True, crop=False)
            self._begun = True

    def _layout(self, source: str) -> list[list[Segment]]:
        """Return Markdown as lines of styled segments, without blanks at the ends of lines and with an empty line before each block
        except the first of the answer."""
        options = self._console.options.update(width=min(self._console.width - 1, _WIDEST), height=None)
        lines: list[list[Segment]] = []
        for block in _blocks(self._parser.parse(source)):
            drawn = [_trimmed(x) for x in self._console.render_lines(_Markdown(block), options, pad=False)]
            filled = [i for i, line in enumerate(drawn) if line]
            if filled:
                lines += [[]] * bool(lines or self._begun) + drawn[filled[0] : filled[-1] + 1]
        return lines


def _blocks(tokens: Sequence[Any]) -> list[list[Any]]:
    """Return the parser's tokens grouped by outermost block."""
    blocks: list[list[Any]] = []
    for token in tokens:
        if not token.level and token.nesting >= 0:
            blocks.append([])
        blocks[-1].append(token)
    return blocks


class _Heading(Heading):
    LEVEL_ALIGN: ClassVar[dict[str, Any]] = {}  # all to the left


class _Rule(MarkdownElement):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("─" * min(options.max_width, 40), "dim")


class _Code(CodeBlock):
    """A code block, drawn between the fences that open and close it, so that a copy of it is Markdown again."""

    fence, info = "", ""

    @classmethod
    def create(cls, markdown: Markdown, token: Any) -> Any:
        made: Any = super().create(markdown, token)
        made.fence, made.info = token.markup, token.info
        return made

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.fence:
            yield Text(self.fence + self.info, "dim")
        if code := str(self.text).rstrip():
            yield Syntax(code, self.lexer_name, theme="ansi_dark", background_color="default", word_wrap=True)
        if self.fence:
            yield Text(self.fence, "dim")


class _Markdown(Markdown):
    """A Markdown object of rich that is made from tokens of `parser`."""

    elements: ClassVar[dict[str, Any]] = {
        **Markdown.elements,
        "heading_open": _Heading,
        "fence": _Code,
        "code_block": _Code,
        "hr": _Rule,
    }

    def __init__(self, tokens: Sequence[Any]) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = list(tokens)


def _joined(lines: Sequence[Sequence[Segment]]) -> Text:
    """Return lines of segments as one text with line breaks."""
    return Text("\n", end="").join(
        Text.assemble(*((s.text, s.style or "") for s in line), end="") for line in lines
    )


def _trimmed(line: Sequence[Segment]) -> list[Segment]:
    segments = [s for s in line if s.text and not s.control]
    while segments:
        if text := segments[-1].text.rstrip():
            segments[-1] = Segment(text, segments[-1].style)
            break
        segments.pop()
    return segments
