"""Parses tool calls written as one JSON object, {"name": ..., "arguments": {...}}: Qwen 2.5 and 3, Hermes.

The arguments are passed on as the model writes them, character by character. The parser finds where a value ends. Whether the value is
valid JSON is left to the reader.
"""

from __future__ import annotations

import json

_ARGUMENTS = ("arguments", "parameters")


class JsonCall:
    """Feed it text from the opening brace on. `name` is known before `take_arguments` gives anything.

    is_done: the object is complete. is_broken: this is no such object; the caller shows the text as it stands.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = self.is_broken = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None  # of the member being read, at depth 1
        self._in_value = False
        self._text: list[str] = []  # of the string or value being read
        self._is_object: bool | None = None  # whether that value is one; None before anything but white space
        self._arguments: list[str] = []  # that have not been given out
        self._had_arguments = False

    def push(self, text: str) -> str:
        """Returns what stands behind the object, if it ended."""
        for place, char in enumerate(text):
            self._step(char)
            if self.is_done or self.is_broken:
                return text[place + 1 :]
        return ""

    def take_arguments(self) -> str:
        """Arguments since the last time. At the end of a call without any: an empty object."""
        if self.name is None:
            return ""
        ready, self._arguments = "".join(self._arguments), []
        if self.is_done and not self._had_arguments:
            self._had_arguments = True
            return "{}"
        return ready

    def _step(self, char: str) -> None:
        if self._depth == 0:
            self._depth = 1
            self.is_broken = char != "{"
        elif self._in_string:
            self._string(char)
        elif char == '"':
            self._in_string = True
            self._take(char)
        elif char in "{[":
            self._depth += 1
            self._take(char)
        elif char in "}]":
            if self._depth == 1:
                self._end_member()
                self.is_done = True
                self.is_broken = self.name is None or char != "}"
                self._depth = 0
                return
            self._take(char)
            self._depth -= 1
        elif self._depth == 1 and char == ":" and not self._in_value:
            self._key, self._text, self._in_value = _string("".join(self._text)), [], True
        elif self._depth == 1 and char == ",":
            self._end_member()
        else:
            self._take(char)

    def _string(self, char: str) -> None:
        self._take(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False

    def _take(self, char: str) -> None:
        """One more character of a key or value. Arguments that are an object are handed on at once. Any other value waits for its end: text
        that holds an object, or nothing, is common."""
        if self._in_value and self._is_object is None and not char.isspace():
            self._is_object = char == "{"
        if self._is_object and self._key in _ARGUMENTS:
            self._had_arguments = True
            self._arguments.append(char)
        else:
            self._text.append(char)

    def _end_member(self) -> None:
        if self._key == "name":
            self.name = _string("".join(self._text))
        elif self._key in _ARGUMENTS and not self._is_object:
            inner = _string("".join(self._text))
            if inner is not None and _is_object(inner):
                self._had_arguments = True
                self._arguments.append(inner)
        self._key, self._text, self._in_value, self._is_object = None, [], False, None


def _string(text: str) -> str | None:
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
