"""Parses tool calls written as call:NAME{key:value,...}, with marks around strings: Gemma 4 (`<|"|>`) and FunctionGemma (`<escape>`).

Keys have no quotes; lists and objects nest as in JSON. A string between marks is passed on while it is written. Any other value waits for
its end: models also write plain JSON, Python's words, or text without marks, and the tool's schema says what was meant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Set

from mlxspec.parsers.call import Call
from mlxspec.parsers.pieces import overlap
from mlxspec.parsers.tool_schemas import ToolSchemas
from mlxspec.parsers.values import convert, escaped, loads, writes_bare

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_KEY = re.compile(r"""\s*["']?([^\s:,{}\[\]"'<]+)["']?\s*:""")
_PART_OF_KEY = re.compile(r"""\s*["']?[^\s:,{}\[\]"'<]*["']?\s*""")
_OPENS, _CLOSES = "{[", "}]"


class GemmaCall(Call):
    """Feed it text from behind `call:` on."""

    def __init__(self, mark: str, schemas: ToolSchemas) -> None:
        super().__init__(schemas)
        self._mark = mark
        self._text = ""  # that waits
        self._key: str | None = None  # of the member being read
        self._in_string = False  # a marked one, directly behind its key
        self._read = _Reach()  # how far the text of a value has been looked at
        self._num_members = 0

    def push(self, text: str) -> str:
        self._text += text
        while not (self.is_done or self.is_broken) and self._go_on():
            pass
        rest, self._text = (self._text, "") if self.is_done or self.is_broken else ("", self._text)
        return rest

    def finish(self, *, cut: bool) -> str:
        return self.take_arguments()

    def _go_on(self) -> bool:
        """One element; False to wait for more text."""
        if self._named is None:
            return self._go_on_name()
        if self.name is None:
            return self._begin(self._named)
        if self._in_string:
            return self._go_on_string()
        if self._key is None:
            return self._go_on_key()
        return self._go_on_value(self._key)

    def _go_on_name(self) -> bool:
        name, brace, rest = self._text.partition("{")
        if brace:
            self._take_name(name.strip())
            if not self.is_broken:
                self._text = rest
                self._ready.append("{")
            return not self.is_broken
        self.is_broken = not any(known.startswith(name.strip()) for known in self._schemas)
        return False

    def _begin(self, name: str) -> bool:
        """A member or the end of the call must follow the brace. Anything else speaks of a call, and is none."""
        text = self._text.lstrip(" \n\t,")
        text = text[: len(text) - overlap(text, self._mark)].replace(self._mark, "", 2)
        if text.startswith("}") or _KEY.match(text):
            self.name = name
            return True
        self.is_broken = _PART_OF_KEY.fullmatch(text) is None
        return False

    def _go_on_key(self) -> bool:
        text = self._text.lstrip(" \n\t,")
        if text.startswith("}"):
            self._ready.append("}")
            self._text = text[1:]
            self._end()
            return True
        marked = text.startswith(self._mark)
        colon = text.find(":")
        if colon < 0 or (not marked and 0 <= text.find("}") < colon):
            if "}" in text and not marked:  # a word that is no member ends with the call
                self._text = text[text.index("}") :]
                return True
            return False
        self._key = text[:colon].replace(self._mark, "").strip().strip("\"'")
        self._text = text[colon + 1 :]
        self._ready.append(
            f"{', ' if self._num_members else ''}{json.dumps(self._key, ensure_ascii=False)}: "
        )
        self._num_members += 1
        self._read = _Reach()
        return True

    def _go_on_string(self) -> bool:
        inside, mark, rest = self._text.partition(self._mark)
        keep = 0 if mark else overlap(inside, self._mark)
        self._ready.append(escaped(inside[: len(inside) - keep]))
        self._text = rest if mark else inside[len(inside) - keep :]
        if mark:
            self._ready.append('"')
            self._in_string, self._key = False, None
        return bool(mark)

    def _go_on_value(self, key: str) -> bool:
        kinds = self._schemas.kinds(self.name or "", key)
        text = self._text.lstrip(" \n\t") if self._read.place == 0 else self._text
        self._text = text
        if self._read.place == 0 and (kinds is None or "string" in kinds):
            if text.startswith(self._mark):
                self._text, self._in_string = text[len(self._mark) :], True
                self._ready.append('"')
                return True
            if self._mark.startswith(text):  # or nothing has come
                return False
        end = self._read.end(
            text, self._mark, self._is_member, plain=kinds is not None and writes_bare(kinds)
        )
        if end is None:
            return False
        self._end_value(text[:end])
        self._text = text[end:]
        return True

    def _is_member(self, text: str) -> bool | None:
        """Whether a declared member's name stands here; None while too little has come to say."""
        found = _KEY.match(text)
        if found is None:
            return None if _PART_OF_KEY.fullmatch(text) else False
        return self._schemas.declares(self.name or "", found[1])

    def _end_value(self, text: str) -> None:
        kinds = self._schemas.kinds(self.name or "", self._key or "")
        value = value_of(text, self._mark, kinds)
        self._ready.append(json.dumps(value, ensure_ascii=False, allow_nan=False))
        self._key = None


class _Reach:
    """How far a value's text has been looked at, so that no character is looked at twice. stack: brackets that are open."""

    def __init__(self) -> None:
        self.place = 0
        self._stack: list[str] = []
        self._quote = ""  # what closes the string that is open

    def end(self, text: str, mark: str, is_member, *, plain: bool) -> int | None:  # type: ignore[no-untyped-def]
        """Where the value ends, None while it goes on. plain: it is text, which may hold commas: one ends it before a member only."""
        while self.place < len(text):
            rest = len(text) - self.place
            char = text[self.place]
            if self._quote:
                if text.startswith(self._quote, self.place):
                    self.place += len(self._quote)
                    self._quote = ""
                elif self._quote != mark and char == "\\":
                    if rest < 2:
                        return None
                    self.place += 2
                elif self._quote == mark and rest < len(mark) and mark.startswith(text[self.place :]):
                    return None
                else:
                    self.place += 1
                continue
            if text.startswith(mark, self.place):
                self._quote = mark
                self.place += len(mark)
            elif rest < len(mark) and mark.startswith(text[self.place :]):
                return None
            elif char in "\"'" and self._begins_value(text):
                self._quote = char
                self.place += 1
            elif not self._stack and char == ",":
                follows = is_member(text[self.place + 1 :]) if plain else True
                if follows is None:
                    return None
                if follows:
                    return self.place
                self.place += 1
            elif not self._stack and char == "}":
                return self.place
            else:
                if char in _OPENS and (self._stack or self.place == 0):
                    self._stack.append(char)
                elif char in _CLOSES and self._stack:
                    self._stack.pop()
                self.place += 1
        return None

    def _begins_value(self, text: str) -> bool:
        """Whether a quote here opens a string: it stands at the beginning, or behind a bracket, a comma or a colon of a list or object."""
        before = text[: self.place].rstrip()
        return not before or (bool(self._stack) and before[-1] in "[{,:")


def value_of(text: str, mark: str, kinds: Set[str] | None) -> object:
    """A value in Gemma's notation, in JSON's, or bare. kinds: JSON types that the schema allows, None where nobody says."""
    text = text.strip()
    if mark not in text:
        plain = re.sub(r",(\s*[\]}])", r"\1", text)
        value = loads(plain) if plain[:1] in _OPENS or plain[:1] in "\"'" else None
        if value is not None:
            return value
    if text[:1] in _OPENS or text.startswith(mark):
        try:
            value, end = _nested(text, 0, mark, 0)
            if not text[end:].strip():
                return (
                    value
                    if not isinstance(value, str) or kinds is None or "string" in kinds
                    else convert(value, kinds)
                )
        except (ValueError, IndexError):
            pass
    text = text.replace(mark, "")
    if kinds is not None:
        return convert(text, kinds)
    return _word(text)


def _nested(text: str, at: int, mark: str, depth: int) -> tuple[object, int]:
    """The value at a place, and where it ends. Raises ValueError for what is none."""
    if depth > 200:
        raise ValueError("nested too deeply")
    at = _skip(text, at)
    if text.startswith(mark, at):
        end = text.index(mark, at + len(mark))
        return text[at + len(mark) : end], end + len(mark)
    if text[at] in "\"'":
        found = re.compile(r'"(?:[^"\\]|\\.)*"|' + r"'(?:[^'\\]|\\.)*'", re.S).match(text, at)
        if found is None:
            raise ValueError("a string without an end")
        return loads(found[0]) if loads(found[0]) is not None else found[0][1:-1], found.end()
    if text[at] == "[":
        items: list[object] = []
        at = _skip(text, at + 1)
        while text[at] != "]":
            item, at = _nested(text, at, mark, depth + 1)
            items.append(item)
            at = _skip(text, at)
            if text[at] == ",":
                at = _skip(text, at + 1)
            elif text[at] != "]":
                raise ValueError("a list without commas")
        return items, at + 1
    if text[at] == "{":
        members: dict[str, object] = {}
        at = _skip(text, at + 1)
        while text[at] != "}":
            colon = text.index(":", at)
            key = text[at:colon].replace(mark, "").strip().strip("\"'")
            members[key], at = _nested(text, colon + 1, mark, depth + 1)
            at = _skip(text, at)
            if text[at] == ",":
                at = _skip(text, at + 1)
            elif text[at] != "}":
                raise ValueError("an object without commas")
        return members, at + 1
    found = re.compile(r"[^,\]}]*").match(text, at)
    word = "" if found is None else found[0]
    return _word(word.strip()), at + len(word)


def _skip(text: str, at: int) -> int:
    while text[at].isspace():
        at += 1
    return at


def _word(word: str) -> object:
    """A bare word: what is no number, truth value or null is text."""
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if _NUMBER.fullmatch(word):
        value = loads(word)
        return word if value is None else value
    return word
