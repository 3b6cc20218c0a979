"""Parses tool calls written as one JSON object, {"name": ..., "arguments": {...}}: Qwen 2.5 and 3, Hermes.

Where brackets are missing before the closing tag, they are closed. A string, a number or a member that the text leaves open is never
closed: the call is none then.
"""

from __future__ import annotations

import json
import re

from mlxspec.parsers.call import Call
from mlxspec.parsers.tool_schemas import ToolSchemas
from mlxspec.parsers.values import loads

_ARGUMENTS = ("arguments", "parameters")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:u[0-9a-fA-F]{4}|["\\/bfnrt])')
_PART_OF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SCALAR = re.compile(r"[-+.\w]+")
_SPACE = " \n\r\t"
_CLOSE = "</tool_call>"


class JsonText:
    """One JSON value, checked while it comes. ready: what has come of it and can be closed at any time. is_done: it is complete; is_broken:
    what came next is no JSON, and `closing` ends it."""

    def __init__(self) -> None:
        self.ready: list[str] = []
        self.is_done = self.is_broken = False
        self._stack: list[str] = []
        self._wants = "value"  # value, first (a value or the end), key, first-key, colon, next (comma or end)
        self._held = ""  # white space and punctuation that no value has followed yet
        self._in_string = self._is_key = False
        self._scalar = ""

    def push(self, text: str) -> str:
        """Returns what was not taken: behind the value, from where it is broken, or an incomplete escape or word, to be pushed again."""
        at = 0
        while at < len(text) and not (self.is_done or self.is_broken):
            taken = self._in_text(text, at) if self._in_string else self._token(text, at)
            if taken == at and not (self.is_done or self.is_broken):
                break
            at = taken
        return text[at:]

    def _in_text(self, text: str, at: int) -> int:
        plain = _PLAIN.match(text, at)
        if plain is not None:
            self.ready.append(plain[0])
            return plain.end()
        if text[at] == '"':
            self.ready.append('"')
            self._in_string = False
            self._wants = "colon" if self._is_key else "next"
            self.is_done = not self._stack
            return at + 1
        if text[at] != "\\":  # a control character, which JSON wants escaped
            self.ready.append(json.dumps(text[at])[1:-1])
            return at + 1
        escape = _ESCAPE.match(text, at)
        if escape is not None:
            self.ready.append(escape[0])
            return escape.end()
        part = _PART_OF_ESCAPE.match(text, at)
        if part is not None and part.end() == len(text):
            return at  # more of it has to come
        self.ready.append("\\\\")  # a backslash that escapes nothing
        return at + 1

    def _token(self, text: str, at: int) -> int:
        char = text[at]
        if char in _SPACE:
            self._held += char
            return at + 1
        if (
            self._wants in ("value", "first")
            and char not in ",:}"
            and not (char == "]" and self._wants == "value")
        ):
            return self._value(text, at)
        if (
            char in "}]"
            and self._wants in ("next", "first", "first-key")
            and self._stack
            and self._stack[-1] == char
        ):
            self._give(char)
            self._stack.pop()
            self._wants, self.is_done = "next", not self._stack
        elif char == "," and self._wants == "next" and self._stack:
            self._held += char
            self._wants = "key" if self._stack[-1] == "}" else "value"
        elif (
            char in "}]"
            and self._wants in ("key", "value")
            and self._stack
            and self._stack[-1] == char
            and "," in self._held
        ):
            self._held = self._held.replace(",", "", 1)  # a comma too many
            self._wants = "next"
            return at
        elif char == ":" and self._wants == "colon":
            self._held += char
            self._wants = "value"
        elif char == '"' and self._wants in ("key", "first-key"):
            self._give(char)
            self._in_string = self._is_key = True
        else:
            self.is_broken = True
            return at
        return at + 1

    def _value(self, text: str, at: int) -> int:
        char = text[at]
        if char == '"':
            self._give(char)
            self._in_string, self._is_key = True, False
        elif char in "{[":
            self._give(char)
            self._stack.append("}" if char == "{" else "]")
            self._wants = "first-key" if char == "{" else "first"
        elif char == "]":
            self._give(char)
            self._stack.pop()
            self._wants, self.is_done = "next", not self._stack
        else:
            scalar = _SCALAR.match(text, at)
            if scalar is None:
                self.is_broken = True
                return at
            if scalar.end() == len(text):
                return at  # it may go on
            if not self._is_scalar(scalar[0]):
                self.is_broken = True
                return at
            self._give(scalar[0])
            self._wants, self.is_done = "next", not self._stack
            return scalar.end()
        return at + 1

    @staticmethod
    def _is_scalar(text: str) -> bool:
        return text in ("true", "false", "null") or (text[:1] in "-0123456789" and loads(text) is not None)

    def _give(self, text: str) -> None:
        self.ready.append(self._held + text)
        self._held = ""

    def closing(self) -> str | None:
        """The brackets that make the value complete; None where more than brackets is missing."""
        is_open = self._in_string or self._wants in ("key", "colon", "value")
        return None if is_open else "".join(reversed(self._stack))


class JsonCall(Call):
    """Feed it text from the opening brace on."""

    def __init__(self, schemas: ToolSchemas) -> None:
        super().__init__(schemas)
        self._text = ""  # that waits
        self._began = False
        self._key: str | None = None
        self._wants = "key"  # key, colon, value, next
        self._value: JsonText | None = None
        self._had_arguments = False
        self._is_streamed = (
            False  # the value is the first object of arguments, which is given out as it comes
        )

    def push(self, text: str) -> str:
        self._text += text
        while self._text and not self.is_done and not self.is_broken and self._go_on():
            pass
        self._begin()
        if self.is_done or self.is_broken:
            rest, self._text = self._text, ""
            return rest
        return ""

    def finish(self, *, cut: bool) -> str:
        return self.take_arguments()

    def _begin(self) -> None:
        """The call has a name once its arguments have a member, or are complete: `{...}` is said of calls."""
        has_begun = self._value is None or not self._is_streamed or len(self._value.ready) > 1
        if self.name is None and self._had_arguments and has_begun and not self.is_broken:
            self.name = self._named

    def take_arguments(self) -> str:
        if self.name is not None and self._value is not None and self._is_streamed:
            self._ready += self._value.ready
            self._value.ready = []
        return super().take_arguments()

    def _go_on(self) -> bool:
        if self._value is not None:
            return self._go_on_value(self._value)
        text = self._text.lstrip(_SPACE)
        self._text = text
        if not text:
            return False
        if not self._began:
            self._began, self.is_broken = True, text[0] != "{"
            self._text = text[1:] if not self.is_broken else text
        elif self._wants == "key" and text[0] == '"':
            self._value = JsonText()
        elif self._wants == "colon" and text[0] == ":":
            self._wants, self._text = "value", text[1:]
        elif self._wants == "value" and text[0] not in ",}":
            self._value = JsonText()
            if self._key in _ARGUMENTS and text[0] == "{" and not self._had_arguments:
                self._had_arguments = self._is_streamed = True
        elif self._wants in ("next", "key") and text[0] == ",":
            self._wants, self._text = "key", text[1:]
        elif self._wants in ("next", "key") and text[0] == "}":
            self._text = text[1:]
            self._close()
            self.is_whole = self.is_done
        else:
            self._break()
            return False
        return True

    def _go_on_value(self, value: JsonText) -> bool:
        rest = value.push(self._text)
        is_new = len(rest) < len(self._text)
        self._text = rest
        if value.is_broken:
            self._break()
            return False
        if not value.is_done:
            return is_new and bool(rest)
        if self._wants == "key":
            self._key, self._wants = loads("".join(value.ready)), "colon"
        else:
            self._take_member("".join(value.ready))
        self._value = None
        return True

    def _take_member(self, text: str) -> None:
        if self._is_streamed:
            self._ready.append(text)
        elif self._key in _ARGUMENTS and not self._had_arguments:
            inner = loads(text)
            inner = loads(inner) if isinstance(inner, str) else inner
            if isinstance(inner, dict):
                self._had_arguments = True
                self._ready.append(json.dumps(inner, ensure_ascii=False))
        elif self._key == "name":
            found = loads(text)
            if isinstance(found, str):
                self._take_name(found)
        self._key, self._wants, self._is_streamed = None, "next", False

    def _break(self) -> None:
        """What has come is no JSON. Before the closing tag, missing brackets are closed."""
        text = self._text.lstrip()
        if text.startswith(_CLOSE) and (self._value is not None or self._wants == "next"):
            self._close()
        else:
            self.is_broken = not _CLOSE.startswith(text)

    def _close(self) -> None:
        """The object ends here. It is a call if it has a name and leaves nothing but brackets open."""
        self.name = self._named
        closing = "" if self._value is None else self._value.closing()
        self.is_broken = (
            self.name is None or closing is None or (self._value is not None and not self._is_streamed)
        )
        if self.is_broken or closing is None:
            return
        if self._value is not None:
            self._ready += [*self._value.ready, closing]
        elif not self._had_arguments:
            self._ready.append("{}")
        self._had_arguments, self._value, self.is_done = True, None, True
