"""Markdown on a terminal while it is still being written. What has been printed is never touched again.

No line is drawn twice, so nothing flickers, a long answer costs no more than a short one, and a window may change its size at any time:
what comes later takes the new width. Prose appears by words, code and tables by lines. Links are spelled out, for an address that hides
behind a text is the model's to choose. Knows rich and Markdown; knows no model. Text must come without control characters.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline, escape
from rich.markdown import CodeBlock, Heading, Markdown
from rich.segment import Segment, Segments
from rich.style import Style
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from mlxspec.cli.blocks import Blocks, Line
from mlxspec.cli.inline import settle

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_WIDEST = 100  # columns; longer lines are hard to read
_CODE_WINDOW = 60  # lines that are looked at to colour the next
_REST = 15  # times as long as a rendering took, before the next one
_DIM = Style(dim=True)


def parser() -> MarkdownIt:
    """CommonMark and strikethrough, without what would hide some of the text (HTML, images, link references, indented code) or
    is no prose (rules)."""
    made = MarkdownIt("commonmark", {"html": False}).enable("strikethrough")
    made.inline.ruler.at("escape", _escape)
    return made.disable(["image", "reference", "lheading", "code", "hr", "html_block", "html_inline"])


def _escape(state: StateInline, silent: bool) -> bool:
    """As in CommonMark, but that no backslash is lost that begins a formula, `\\(` or `\\[`, or ends a line."""
    if state.src[state.pos] != "\\" or state.src[state.pos + 1 : state.pos + 2] not in set("()[]\n"):
        return escape(state, silent)
    if not silent:
        state.pending += "\\"
    state.pos += 1
    return True


class MarkdownStream:
    """Prints to `console` what `push` brings. `end` prints what is left and ends the line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._blocks = Blocks()
        self._parser = parser()
        self._prose: Prose | None = None
        self._code: list[str] = []
        self._column = 0  # how much of a line of code has been printed
        self._language = ""
        self._rows: list[str] = []
        self._widths: list[int] = []
        self._begun = False  # whether anything has been printed
        self._gap = False  # whether an empty line is due before the next block

    def push(self, text: str) -> None:
        for line in self._blocks.push(text):
            self._take(line)
        if self._prose is not None:
            self._prose.show()

    def end(self) -> None:
        for line in self._blocks.end():
            self._take(line)
        self._close()

    def _take(self, line: Line) -> None:
        if line.kind != "prose" or line.first:
            unfinished = self._prose is not None and self._prose.is_unfinished
            if not unfinished or line.kind != "prose":
                self._close(unless=line.kind)
        if line.kind == "blank":
            self._gap = self._begun
        elif line.kind == "prose":
            if self._prose is None:
                self._open(gap=line.text.startswith("#"))
                self._prose = Prose(self._console, self._parser, line.indent)
            self._prose.take(line)
        elif line.kind == "code":
            self._take_code(line)
        elif line.kind == "table":
            self._take_row(line)
        else:
            self._open()
            self._print(Text("─" * min(self._width, 40), _DIM))

    def _open(self, *, gap: bool = False) -> None:
        """A block begins: the empty line before it, if there is to be one."""
        if self._begun and (self._gap or gap):
            self._console.print()
        self._begun, self._gap = True, False

    def _close(self, unless: str = "") -> None:
        """The block that was open ends."""
        if self._prose is not None:
            self._prose.end()
            self._prose = None
        if self._rows and unless != "table":
            self._print_rows(self._rows)
            self._rows = []
        if unless != "table":
            self._widths = []

    # --- code

    def _take_code(self, line: Line) -> None:
        pad = " " * line.indent
        if line.first or line.last:
            if line.first:
                self._open()
                self._language = re.split("[`~]{3,}", line.text)[-1].strip().split(" ")[0]
                self._code = []
            self._print(Text(pad + line.text, _DIM))
            return
        shown = Text(pad).append_text(coloured([*self._code, line.text], self._language))
        if not line.whole:  # words of it that have ended
            place = shown.plain.rfind(" ") + 1
            if place > max(self._column, len(pad)):
                self._print(shown[self._column : place], end="")
                self._column = place
            return
        self._print(shown[self._column :])
        self._code, self._column = [*self._code, line.text][-_CODE_WINDOW:], 0

    # --- tables

    def _take_row(self, line: Line) -> None:
        if self._widths:
            self._print_rows([line.text])
            return
        self._rows.append(line.text)
        if len(self._rows) == 3 or (len(self._rows) == 2 and not _is_separator(self._rows[1])):
            rows, self._rows = self._rows, []
            self._print_rows(rows)

    def _print_rows(self, rows: Sequence[str]) -> None:
        if not self._begun or self._gap or not self._widths:
            self._open()
        if not self._widths and not (len(rows) > 1 and _is_separator(rows[1])):
            for text in rows:  # not a table after all
                self._print(Text(text))
            return
        cells = [_cells(row) for row in rows]
        heading = not self._widths
        if heading:
            self._widths = _column_widths([cells[0], *cells[2:]], self._width)
        for i, row in enumerate(cells):
            if heading and i == 1:
                self._print(Text("─" * (sum(self._widths) + 2 * len(self._widths) - 2), _DIM))
            else:
                self._print(self._row(row, bold=heading and i == 0))

    def _row(self, cells: Sequence[str], *, bold: bool) -> Table:
        grid = Table.grid(padding=(0, 2, 0, 0))
        for width in self._widths:
            grid.add_column(width=width, overflow="fold", style="bold" if bold else "")
        grid.add_row(*(_Markdown(c, self._parser) for c in cells[: len(self._widths)]))
        return grid

    @property
    def _width(self) -> int:
        return min(self._console.width - 1, _WIDEST)

    def _print(self, what: Text | Table, end: str = "\n") -> None:
        self._console.print(what, soft_wrap=isinstance(what, Text), end=end)


class Prose:
    """One paragraph, heading, quote or item that grows: prints the words that are certain behind those it has printed."""

    def __init__(self, console: Console, parser: MarkdownIt, indent: int) -> None:
        self._console, self._parser, self._indent = console, parser, indent
        self._source = ""
        self._line = ""  # the unfinished line
        self._printed: list[str] = []  # lines of the layout, the last one still open
        self._width = 0
        self._not_before = 0.0

    @property
    def is_unfinished(self) -> bool:
        """Whether its last line is still growing."""
        return bool(self._line)

    def take(self, line: Line) -> None:
        if line.whole:
            self._source += line.text + "\n"
            self._line = ""
        else:
            self._line = line.text

    def show(self) -> None:
        """Print what has become certain, unless that was done just now."""
        if time.monotonic() < self._not_before:
            return
        text = self._source + self._line
        settled, place = settle(text)
        if settled != text:  # an opener became a character: so it stays
            self._source = settled[: len(settled) - len(self._line)] if self._source else ""
            self._line = settled[len(self._source) :] if self._line else self._line
        self._show(settled[:place])

    def end(self) -> None:
        self._show(self._source + self._line)
        self._console.print()

    def _show(self, source: str) -> None:
        started = time.monotonic()
        width = max(min(self._console.width - 1, _WIDEST) - self._indent, 20)
        lines = self._layout(source, width)
        if not lines:
            return
        texts = ["".join(s.text for s in line) for line in lines]
        place = self._place(texts, width)
        if place is None:  # another width, or another reading of the same text: go on in a new line
            # what was a character may be a mark now, but letters stay letters
            counts = str.isalnum if width == self._width else _is_seen
            place = _behind(texts, sum(counts(c) for t in self._printed for c in t), counts)
            if place is None:
                return
            self._console.print()
            self._printed, fresh = texts[: place[0] + 1], True
        else:
            fresh = not self._printed
        row, column = place
        for i in range(row, len(lines)):
            segments = _from(lines[i], column if i == row else 0)
            if i > row:
                self._console.print()
            if i > row or fresh:
                self._console.print(" " * self._indent, end="")
            self._console.print(Segments(segments), end="", crop=False, soft_wrap=True)
        self._printed, self._width = texts, width
        done = time.monotonic()
        self._not_before = done + _REST * (done - started)

    def _place(self, texts: Sequence[str], width: int) -> tuple[int, int] | None:
        """Row and column behind what is printed, if the layout continues it."""
        printed = self._printed
        if not printed:
            return 0, 0
        fits = (
            width == self._width and len(texts) >= len(printed) and texts[: len(printed) - 1] == printed[:-1]
        )
        if not fits or not texts[len(printed) - 1].startswith(printed[-1]):
            return None
        return len(printed) - 1, len(printed[-1])

    def _layout(self, source: str, width: int) -> list[list[Segment]]:
        """Lines of segments, without the blanks that rich fills them up with."""
        if not source.strip():
            return []
        options = self._console.options.update(width=width, height=None)
        lines = self._console.render_lines(_Markdown(source, self._parser), options, pad=False)
        trimmed = [_trimmed(line) for line in lines]
        while trimmed and not trimmed[-1]:
            trimmed.pop()
        while trimmed and not trimmed[0]:
            trimmed.pop(0)
        return trimmed


class _Heading(Heading):
    LEVEL_ALIGN: ClassVar[dict[str, Any]] = {}  # all to the left


class _Code(CodeBlock):
    """Code within a quote, with the line that opens it, as code that stands alone has."""

    opening = ""

    @classmethod
    def create(cls, markdown: Markdown, token: Any) -> Any:
        made: Any = super().create(markdown, token)
        made.opening = token.markup + token.info
        return made

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.opening, _DIM)
        if code := str(self.text).rstrip():
            yield Syntax(code, self.lexer_name, theme="ansi_dark", background_color="default", word_wrap=True)


class _Markdown(Markdown):
    """rich's Markdown of tokens that were parsed our way."""

    elements: ClassVar[dict[str, Any]] = {**Markdown.elements, "heading_open": _Heading, "fence": _Code}

    def __init__(self, source: str, parser: MarkdownIt) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = parser.parse(source)


def coloured(lines: Sequence[str], language: str) -> Text:
    """The last of `lines` of code, coloured where the language is known."""
    syntax = Syntax("", language or "text", theme="ansi_dark", background_color="default")
    found = syntax.highlight("\n".join(lines) + "\n").split("\n")
    last = found[min(len(lines), len(found)) - 1]
    return last if last.plain == lines[-1] else Text(lines[-1])


def _trimmed(line: Iterable[Segment]) -> list[Segment]:
    segments = [s for s in line if s.text and not s.control]
    while segments:
        text = segments[-1].text.rstrip()
        if text:
            segments[-1] = Segment(text, segments[-1].style)
            break
        segments.pop()
    return segments


def _from(line: Iterable[Segment], column: int) -> list[Segment]:
    """The segments of a line behind its first `column` characters."""
    found = []
    for segment in line:
        text = segment.text[column:]
        column = max(0, column - len(segment.text))
        if text:
            found.append(Segment(text, segment.style))
    return found


def _is_seen(character: str) -> bool:
    return not character.isspace()


def _behind(texts: Sequence[str], num: int, counts: Callable[[str], bool]) -> tuple[int, int] | None:
    """Row and column behind so many characters that count; None if there is none behind them."""
    for row, text in enumerate(texts):
        for column, character in enumerate(text):
            if counts(character):
                if num == 0:
                    return row, column
                num -= 1
    return None


def _cells(row: str) -> list[str]:
    bare = row.strip().removeprefix("|").removesuffix("|")
    return [c.replace("\0", "|").strip() for c in bare.replace("\\|", "\0").split("|")]


def _is_separator(row: str) -> bool:
    return "-" in row and not set(row) - set("|-: ")


def _column_widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """From the heading and one row: room for half as much again, if there is any."""
    num = max(1, len(rows[0]))
    wanted = [max(len(r[i]) if i < len(r) else 0 for r in rows) * 3 // 2 + 2 for i in range(num)]
    room = max(width - 2 * num, 4 * num)
    if sum(wanted) <= room:
        return wanted
    return [max(4, w * room // sum(wanted)) for w in wanted]
