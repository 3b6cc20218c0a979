"""A growing Markdown text as blocks of lines: prose, code, tables, rules. A block is settled by how its first line begins.

Every item of a list is a block of its own, and every indented block keeps its indent, so no block depends on those before it. Lines
that have not ended are handed on only where it is certain what they begin. Knows lines; renders nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["blank", "prose", "code", "table", "rule"]

_MARKS = re.compile(r" *(?:(?:[-*+]|\d{1,9}[.)])\s+)+")  # of items, one within the other
_MARK = re.compile(r"[-*+]?|\d{1,9}[.)]?")
_FENCE = re.compile(
    r"( *)(?:(?:[-*+]|\d{1,9}[.)])\s+)*(`{3,}|~{3,})([^`]*)$"
)  # an item may be code and nothing else
_ITEM = re.compile(r" *(?:[-*+]|\d{1,9}[.)])(?=\s)")
_HEADING = re.compile(r" {0,3}#{1,6}\s")
_RULE = re.compile(r" {0,3}(?:-\s*){3,}$| {0,3}(?:\*\s*){3,}$| {0,3}(?:_\s*){3,}$")
_QUOTE = re.compile(r" *>")
_TABLE = re.compile(r" *\|")
_PLAIN = re.compile(r" *[^\s`~#>*+|_\-\d=]")  # a line beginning so can only be prose
_WIDEST_INDENT = 16


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line, or the beginning of one. `first`: it begins a block. `text` has the block's indent taken off; in code it is the line itself.

    A code block's first line has its fence as `text`, behind the marks of an item if it is one, and its last the fence, with `last` set.
    """

    kind: Kind
    text: str
    first: bool = False
    last: bool = False
    indent: int = 0
    whole: bool = True


class Blocks:
    """Feed it text; it hands out lines. A line that is not whole is handed out again, longer, by the next call."""

    def __init__(self) -> None:
        self._line = ""
        self._kind: Kind = "blank"
        self._fence = ""
        self._indent = 0
        self._is_quote = False
        self._begun: bool | None = None  # whether the unfinished line that was handed out began a block

    def push(self, text: str) -> Iterator[Line]:
        *whole, self._line = (self._line + text).split("\n")
        for line in whole:
            yield self._take(line)
        if self._line and self._is_certain(self._line):
            yield self._take(self._line, whole=False)

    def end(self) -> Iterator[Line]:
        """The last line, if the text did not end with one."""
        if self._line:
            line, self._line = self._line, ""
            yield self._take(line)

    def _is_certain(self, line: str) -> bool:
        """Whether more characters cannot make something else of the line."""
        if self._kind == "code":
            return not self._fence.startswith(line.lstrip()[:1])
        if self._begun is not None or _PLAIN.match(line):
            return True
        if not line.strip():
            return False
        bare, marks = line.lstrip(), _MARKS.match(line)
        rest = line[marks.end() :] if marks else bare
        if marks and _MARK.fullmatch(rest):  # there may be one more
            return False
        if rest and rest[0] in "`~":  # three of them begin a fence
            return not rest.startswith(3 * rest[0]) and bool(rest.strip(rest[0]))
        mark = bare[0]
        if mark in "-*_=":  # nothing but them is a rule
            return bool(bare.replace(mark, "").strip())
        return mark != "|" and bool(re.match(r"\S+\s+\S", bare))

    def _take(self, line: str, *, whole: bool = True) -> Line:
        if self._begun is not None:  # its kind is settled
            found = Line(
                kind=self._kind, text=self._cut(line), first=self._begun, indent=self._indent, whole=whole
            )
        else:
            found = self._settled(line, whole)
        self._begun = None if whole else found.first
        if whole and _HEADING.match(line) and found.kind == "prose":
            self._kind = "blank"  # a heading is one line
        return found

    def _settled(self, line: str, whole: bool) -> Line:
        if self._kind == "code":
            return self._code(line, whole)
        fence = _FENCE.match(line)
        if fence and whole:
            self._kind, self._fence, self._indent = "code", fence[2], len(fence[1])
            return Line(kind="code", text=line.strip(), first=True, indent=self._indent)
        if not line.strip():
            self._kind = "blank"
            return Line(kind="blank", text="")
        if _RULE.match(line) and whole:
            self._kind = "blank"
            return Line(kind="rule", text=line.strip(), first=True)
        kind: Kind = "table" if _TABLE.match(line) else "prose"
        is_quote = bool(_QUOTE.match(line))
        begins = bool(_ITEM.match(line) or _HEADING.match(line)) or is_quote != self._is_quote
        first = begins or kind != self._kind
        if first:
            self._indent = min(len(line) - len(line.lstrip(" ")), _WIDEST_INDENT)
        self._kind, self._is_quote = kind, is_quote
        return Line(kind=kind, text=self._cut(line), first=first, indent=self._indent, whole=whole)

    def _code(self, line: str, whole: bool) -> Line:
        bare = line.strip()
        if bare and set(bare) == {self._fence[0]} and len(bare) >= len(self._fence):
            self._kind = "blank"
            return Line(kind="code", text=self._cut(line).rstrip(), last=True, indent=self._indent)
        return Line(kind="code", text=self._cut(line), indent=self._indent, whole=whole)

    def _cut(self, line: str) -> str:
        """Without the block's indent, or what there is of it."""
        return line[min(self._indent, len(line) - len(line.lstrip(" "))) :]
