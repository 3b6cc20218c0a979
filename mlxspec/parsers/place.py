"""Follows where the end of a Markdown text stands: at the beginning of a line, in code. What is said there of a call is no call."""

from __future__ import annotations

import re

_FENCE = re.compile(r"\s*(`{3,}|~{3,})(.*)")
_HEAD = 120  # characters of a line that may be a fence


class Place:
    """Feed it the text; however it is cut, the answers are the same."""

    def __init__(self) -> None:
        self._fence = ""  # that is open
        self._num_marks = 0  # runs of backticks in this paragraph
        self._begin_line()

    def _begin_line(self) -> None:
        self._head = ""
        self._ends_in_mark = False
        self.begins_line = True  # nothing but white space stands before it on its line

    def push(self, text: str) -> None:
        for number, part in enumerate(text.split("\n")):
            if number:
                self._end_line()
            if not part:
                continue
            self._head += part[: _HEAD - len(self._head)]
            self.begins_line = self.begins_line and part.isspace()
            self._num_marks += len(re.findall("`+", part)) - (self._ends_in_mark and part[0] == "`")
            self._ends_in_mark = part[-1] == "`"

    @property
    def is_code(self) -> bool:
        """Whether it is within backticks, or a fenced block."""
        return bool(self._fence) or self._num_marks % 2 == 1

    def _end_line(self) -> None:
        found = _FENCE.fullmatch(self._head)
        if found is not None and not self._fence and "`" not in found[2]:
            self._fence = found[1]
        elif found is not None and self._fence and found[1].startswith(self._fence) and not found[2].strip():
            self._fence = ""
        if found is not None or self.begins_line:
            self._num_marks = 0
        self._begin_line()
