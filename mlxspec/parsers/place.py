"""Follows the position of the end of a Markdown text: at the beginning of a line, in a fenced block, in a code span.

Fences are CommonMark's: three or more backticks or tildes, also in lists and quotes, which end a fence with them. An open fence may
never be closed; the caller decides what follows from this.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_HEAD = 160  # characters of a line that are looked at
_QUOTE = re.compile(r"[ ]*>[ ]?")
_ITEM = re.compile(r"[ ]*(?:[-*+]|\d{1,9}[.)])(?:[ ]{1,4}(?=\S)|[ ]*$)")
_OPENS = re.compile(r"[ ]*(`{3,}(?=[^`]*$)|~{3,})")
_RUNS = re.compile("`+|[^`]+")


class _Fence(NamedTuple):
    """An open fenced code block. mark: the backticks or tildes that opened it. quotes: the number of block quotes around it; indent: the
    column at which the text of the list item around it begins. It ends with a line that is in fewer quotes, or less indented."""

    mark: str
    quotes: int
    indent: int


class Place:
    """The position of the end of a Markdown text relative to fenced code blocks, code spans and line beginnings. `push` adds text; how
    the text is divided into parts makes no difference."""

    def __init__(self) -> None:
        self.fence: _Fence | None = None  # that is open
        self.num_closed = 0  # fences that were closed, and did not end with the block that held them
        self._span = 0  # backticks that opened a code span in this paragraph
        self._run = 0  # backticks at the end of the text
        self._items: tuple[int, ...] = ()  # where the text of the list items begins that hold the line before
        self._begin_line()

    def _begin_line(self) -> None:
        self._head = ""
        self.begins_line = True  # nothing but white space stands before it on its line

    def push(self, text: str) -> None:
        for number, part in enumerate(text.split("\n")):
            if number:
                self.end_line()
            if not part:
                continue
            self._head += part[: _HEAD - len(self._head)]
            self.begins_line = self.begins_line and part.isspace()
            self._count(part)

    def _count(self, part: str) -> None:
        """Count the backticks of a part of a line, to follow code spans: a run of backticks closes the span that a run of the same
        length opened."""
        for found in _RUNS.findall(part):
            if found[0] == "`":
                self._run += len(found)
            else:
                self._end_run()

    def _end_run(self) -> None:
        self._span, self._run = _after(self._span, self._run), 0

    @property
    def in_fence(self) -> bool:
        """Return whether the current line is inside an open fenced code block."""
        fence = self.fence
        if fence is None or not self.begins_line:
            return fence is not None
        return not fence.quotes and len(self._head) >= fence.indent

    @property
    def in_code(self) -> bool:
        """Return whether the end of the text is in an open fenced code block, or after the opening backticks of a code span that is not
        yet closed."""
        return self.in_fence or _after(self._span, self._run) != 0

    def end_line(self) -> None:
        """End the current line: open or close fenced code blocks by it."""
        self._end_run()
        line, fence = self._head.rstrip(), self.fence
        if fence is not None:
            inside = _without_quotes(line, fence.quotes)
            held = inside is not None and (
                not inside.strip() or len(inside) - len(inside.lstrip(" ")) >= fence.indent
            )
            if inside is None or not held:
                self.fence = fence = None
            elif set(inside.strip()) == {fence.mark[0]} and len(inside.strip()) >= len(fence.mark):
                self.fence, self.num_closed = None, self.num_closed + 1
        if fence is None:
            quotes, self._items, rest = _blocks(line, self._items)
            found = _OPENS.match(rest)
            self.fence = None if found is None else _Fence(found[1], quotes, max(self._items, default=0))
        if fence is not None or self.fence is not None or self.begins_line:
            self._span = 0
        self._begin_line()


def _after(span: int, run: int) -> int:
    """Return the number of backticks of the code span that is open after a run of backticks; 0 for none. span: the same number before
    the run; run: the length of the run."""
    if not run:
        return span
    return run if not span else 0 if span == run else span


def _without_quotes(line: str, num: int) -> str | None:
    """Return a line without the `>` marks of `num` block quotes; None where it has fewer."""
    for _ in range(num):
        found = _QUOTE.match(line)
        if found is None:
            return None
        line = line[found.end() :]
    return line


def _blocks(line: str, items: tuple[int, ...]) -> tuple[int, tuple[int, ...], str]:
    """Return the number of block quotes around a line, the columns at which the text of the list items around it begins, and the rest of
    the line. items: the columns of the line before."""
    quotes = at = 0
    if line.strip():
        lead = len(line) - len(line.lstrip(" "))
        items = tuple(item for item in items if item <= lead)
    while True:
        quote, item = _QUOTE.match(line), _ITEM.match(line)
        if quote is not None:
            quotes, at, items, line = quotes + 1, 0, (), line[quote.end() :]
        elif item is not None and item.end() < len(line):
            at, line = at + item.end(), line[item.end() :]
            items = (*items, at)
        else:
            return quotes, items, line
