"""Reads the calls in Gemma's notation: call:NAME{key:value,...}, with marks around strings: Gemma 4 (`<|"|>`), FunctionGemma (`<escape>`).

Keys have no quotes; lists and objects nest as in JSON. Models also write plain JSON, Python's words, or text without marks. Such a value
is read by the types that the tool's schema allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from functools import partial
from typing import Any

from mlxspec.parsers.readers import Calls
from mlxspec.parsers.tool_schemas import ToolSchemas
from mlxspec.parsers.values import convert, loads, writes_bare

CALL = "call:"
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_KEY_FORM = r"""\s*(?:{0})?["']?([^\s:,{{}}\[\]"'<](?:[^:,{{}}\[\]"'<\n]*[^\s:,{{}}\[\]"'<])?)["']?\s*(?:{0})?\s*:\s*"""
_KEY = re.compile(_KEY_FORM.format(""))
_SPACES = re.compile(r"[\s,]*")
_QUOTED = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|' + r"'[^'\\]*(?:\\.[^'\\]*)*'", re.DOTALL)
_CLOSING = {"{": "}", "[": "]"}
_LONGEST_NEST = 200


def read_gemma(text: str, schemas: ToolSchemas, mark: str) -> Calls | None:
    """Return the calls of a text in Gemma's notation, `call:NAME{key:value,...}`, one after the other. The list is empty while a value
    is open. Returns None where the text is anything but calls of declared tools. mark: the text that encloses strings."""
    calls, text = Calls(), text.strip()
    while text:
        name, brace, rest = text.removeprefix(CALL).partition("{")
        name = name.strip()
        if not text.startswith(CALL) or not brace or name not in schemas:
            return None
        found = _members(rest, mark, name, schemas)
        if not found:
            return None if found is None else Calls()
        calls.append((name, found[0]))
        text = rest[found[1] :].lstrip()
    return calls or None


def _members(
    text: str, mark: str, name: str, schemas: ToolSchemas
) -> tuple[dict[str, Any], int] | tuple[()] | None:
    """Return the arguments in `text`, which begins after the opening brace, and the index after the closing brace. Returns () where the
    text ends inside the arguments, None where it is no list of members. name: the called tool."""
    found: dict[str, Any] = {}
    at = 0
    while True:
        at = _SPACES.match(text, at).end()  # type: ignore[union-attr]
        if text.startswith("}", at):
            return found, at + 1
        head = re.compile(_KEY_FORM.format(re.escape(mark))).match(text, at)
        if head is None:
            return () if at == len(text) else None
        kinds = schemas.kinds(name, head[1])
        at = head.end()
        if text.startswith(mark, at) and (kinds is None or "string" in kinds):
            end = text.find(mark, at + len(mark))
            if end < 0:
                return ()
            found[head[1]], at = text[at + len(mark) : end], end + len(mark)
            continue
        is_plain = kinds is not None and writes_bare(kinds)
        end = _end(text, at, mark, partial(_declares, text, name=name, schemas=schemas) if is_plain else None)
        if end < 0:
            return ()
        found[head[1]], at = _value_of(text[at:end], mark, kinds), end


def _declares(text: str, at: int, *, name: str, schemas: ToolSchemas) -> bool:
    """Return whether the text at index `at` is a key that the tool `name` declares as a parameter."""
    found = _KEY.match(text, at)
    return found is not None and schemas.declares(name, found[1])


def _end(text: str, start: int, mark: str, ends: Callable[[int], bool] | None) -> int:
    """Return the index at which the value ends that starts at index `start`; -1 where it is not closed. ends: called with the index
    after a comma outside brackets; returns whether this comma ends the value. None: every such comma does."""
    stack: list[str] = []
    at = start
    while at < len(text):
        char = text[at]
        if text.startswith(mark, at):
            at = text.find(mark, at + len(mark)) + len(mark)
            if at < len(mark):
                return -1
            continue
        if char in "\"'" and _begins_value(text, start, at, bool(stack)):
            found = _QUOTED.match(text, at)
            if found is None:
                return -1
            at = found.end()
            continue
        if not stack and (char == "}" or (char == "," and (ends is None or ends(at + 1)))):
            return at
        if char in _CLOSING and (stack or at == start):
            stack.append(_CLOSING[char])
        elif char in "}]" and stack:
            stack.pop()
        at += 1
    return -1


def _begins_value(text: str, start: int, at: int, is_nested: bool) -> bool:
    """Return whether a quote at index `at` opens a string: at the beginning of the value, or after a bracket, comma or colon where
    is_nested, the place is inside a list or an object. start: the index at which the value begins."""
    while at > start and text[at - 1].isspace():
        at -= 1
    return at == start or (is_nested and text[at - 1] in "[{,:")


def _value_of(text: str, mark: str, kinds: Set[str] | None) -> Any:
    """Return the Python value of a text in Gemma's notation, as JSON, or without quotes. kinds: JSON types that the schema allows; None
    where they are not known."""
    text = text.strip()
    if mark not in text:
        plain = re.sub(r",(\s*[\]}])", r"\1", text)
        value = loads(plain) if plain[:1] in _CLOSING or plain[:1] in "\"'" else None
        if value is not None:
            return value
    if text[:1] in _CLOSING or text.startswith(mark):
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


def _nested(text: str, at: int, mark: str, depth: int) -> tuple[Any, int]:
    """Return the value that begins at index `at`, and the index after the value. depth: the number of lists and objects around it.
    Raises ValueError or IndexError where the text is no complete value."""
    if depth > _LONGEST_NEST:
        raise ValueError("nested too deeply")
    at = _skip(text, at)
    if text.startswith(mark, at):
        end = text.index(mark, at + len(mark))
        return text[at + len(mark) : end], end + len(mark)
    if text[at] in "\"'":
        found = _QUOTED.match(text, at)
        if found is None:
            raise ValueError("a string without an end")
        return loads(found[0]) if loads(found[0]) is not None else found[0][1:-1], found.end()
    if text[at] == "[":
        items: list[Any] = []
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
        members: dict[str, Any] = {}
        at = _skip(text, at + 1)
        while text[at] != "}":
            quoted = _QUOTED.match(text, at)
            colon = text.index(":", at if quoted is None else quoted.end())
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


def _word(word: str) -> Any:
    """Return the value of a text without quotes: a number, a truth value or None where it spells one, else the text itself."""
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if _NUMBER.fullmatch(word):
        value = loads(word)
        return word if value is None else value
    return word
