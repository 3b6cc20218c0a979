"""Text that spells a control token and is not meant as one: `<|im_end|>` in a message, a tool's result or a schema.

A chat template writes control tokens and the messages' text into one string, so a message could end its own turn or begin another's. Before
a template runs, every spelling of a control token in a message gets a mark inside. The tokenizer reads marked spellings as plain text, and
all others as the tokens that the template wrote. The mark is a noncharacter of Unicode, which no text for interchange holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MARK = "\ufdd1"
_ESCAPED = "\\ufdd1"  # as a template's filter may write it


class Spellings:
    """The spellings of a vocabulary's control tokens, to be found and marked in texts. names: the spellings."""

    def __init__(self, names: Sequence[str]) -> None:
        longest_first = sorted((n for n in names if len(n) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def are_in(self, text: str) -> bool:
        return self._pattern is not None and self._pattern.search(text) is not None

    def marked(self, value: Any) -> Any:
        """Return a message, or a part of one, with a mark inside each spelling of a control token in its texts. Texts under `role` are
        not marked."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self._pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], value)
        if isinstance(value, Mapping):
            return {k: v if k == "role" else self.marked(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(v) for v in value]
        return value

    def parts(self, text: str) -> list[tuple[str, bool]]:
        """Split a marked text at its control tokens. Returns (text without marks, whether it is a control token) for each part."""
        found, start = [], 0
        for token in self._pattern.finditer(text) if self._pattern is not None else ():
            found += [(text[start : token.start()], False), (token[0], True)]
            start = token.end()
        return [(unmarked(part), is_token) for part, is_token in [*found, (text[start:], False)] if part]


def unmarked(text: str) -> str:
    """Return a text without marks."""
    return text.replace(MARK, "")


def with_marks(rendered: str) -> str:
    """Return a rendered text in which each mark that a template's filter has escaped is a mark again."""
    return rendered.replace(_ESCAPED, MARK)
