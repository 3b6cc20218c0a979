"""Parses tool calls written as call:NAME{key:value,...}, with marks around strings: Gemma 4 (`<|"|>`) and FunctionGemma (`<escape>`).

Keys have no quotes; lists and objects nest as in JSON. Strings are passed on while they are written.
"""

from __future__ import annotations

import json
import re

from mlxspec.parsers.call import TaggedCall
from mlxspec.parsers.values import escaped

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")


class GemmaCall(TaggedCall):
    """Feed it text from behind `call:` on."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self._mark = mark
        self._in_string = False
        self._depth = 0
        self._word = ""  # bare text: a key, a number, true, false, null

    def _go_on(self) -> bool:
        if self.name is None:
            name, tag = self._scanner.take(("{",))
            if tag is None:
                self._scanner.put_back(name)
                return False
            self.name, self._ready, self._depth = name.strip(), "{", 1
            return True
        if self._in_string:
            text, tag = self._scanner.take((self._mark,))
            self._ready += escaped(text)
            if tag:
                self._ready += '"'
                self._in_string = False
            return tag is not None
        bare, tag = self._scanner.take((self._mark, "{", "}", "[", "]", ",", ":"))
        self._word += bare
        if tag is None:
            return False
        self._punctuation(tag)
        return True

    def _punctuation(self, tag: str) -> None:
        if tag == ":":
            word = self._word.strip().strip('"')  # none where the key was written as a string
            self._ready += (json.dumps(word, ensure_ascii=False) if word else "") + ": "
            self._word = ""
            return
        self._ready += _literal(self._word)
        self._word = ""
        if tag == self._mark:
            self._ready += '"'
            self._in_string = True
            return
        self._ready += ", " if tag == "," else tag
        self._depth += (tag in "{[") - (tag in "}]")
        self.is_done = self._depth == 0


def _literal(word: str) -> str:
    """A bare word as JSON: what is no number, truth value or null is text."""
    word = word.strip()
    if not word or word in ("true", "false", "null") or _NUMBER.fullmatch(word):
        return word
    return json.dumps(word, ensure_ascii=False)
