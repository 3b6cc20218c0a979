"""Reads the calls in the text between two tags, in Qwen's notations: JSON, and tags of their own.

A reader takes the whole text and returns its calls. It returns none of them while a string or a value is open, which more text may
close, and None where the text is anything but calls of declared tools. Common faults of models are corrected: a bracket too few or too
many, a comma too many, an end tag that is missing. A string, a number or a parameter that the text leaves open is never closed.
"""

from __future__ import annotations

import json
import re
from typing import Any

from mlxspec.parsers.tool_schemas import ToolSchemas
from mlxspec.parsers.values import convert, finite, loads

Calls = list[tuple[str, dict[str, Any]]]
_OPEN = "<tool_call>"
_TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*("?)|[{}\[\]]|,(?=\s*[}\]])', re.DOTALL)
_ESCAPES = re.compile(r'\\(u[0-9a-fA-F]{4}|["\\/bfnrt])|\\')
_CLOSING = {"{": "}", "[": "]"}


def read_json(text: str, schemas: ToolSchemas, *, is_closed: bool) -> Calls | None:
    """Return the calls of a text that is JSON objects with a name and arguments, one after the other. The list is empty while a string
    or bracket is open. Returns None where the text is anything but calls of declared tools. is_closed: a closing tag follows the
    text, so that missing brackets at its end are added."""
    decoder = json.JSONDecoder(strict=False, parse_float=finite, parse_constant=_refused)
    calls, text = Calls(), text.strip()
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            mended = _mended(text, closes=is_closed)
            if mended is None:
                return Calls()
            value, end = loads(mended), len(text)
        call = call_of(value)
        if call is None or call[0] not in schemas:
            return None
        calls.append(call)
        rest = text[end:].strip()
        is_over = not set(rest) - set("}] \n")  # a bracket too many
        text = "" if is_over else rest.removeprefix(_OPEN).lstrip()
    return calls or None


def call_of(value: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the arguments of a call that is a JSON object in one of the published forms; None for any other value."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name, arguments = (
        value.get("name", value.get("function")),
        value.get("arguments", value.get("parameters")),
    )
    arguments = loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not isinstance(arguments, dict | None):
        return None
    return name, arguments or {}


def _refused(name: str) -> Any:
    """Raise ValueError for NaN and Infinity, which JSON does not have."""
    raise ValueError(name)


def _mended(text: str, *, closes: bool) -> str | None:
    """Return JSON text with its brackets balanced, commas before closing brackets removed, and backslashes that escape nothing doubled.
    Returns None where a string is not closed, or a bracket is open at the end and `closes` is False. closes: add the closing brackets
    at the end."""
    stack: list[str] = []
    out, at = list[str](), 0
    for found in _TOKENS.finditer(text):
        token = found[0]
        out.append(text[at : found.start()])
        at = found.end()
        if token[0] == '"':
            if not found[1]:
                return None
            out.append(_ESCAPES.sub(lambda m: m[0] if m[1] else r"\\", token) if "\\" in token else token)
        elif token in _CLOSING:
            stack.append(_CLOSING[token])
            out.append(token)
        elif token in stack:
            while (closing := stack.pop()) != token:
                out.append(closing)
            out.append(token)
    out.append(text[at:])
    if stack and not closes:
        return None
    return "".join([*out, *reversed(stack)])


_HEAD = re.compile(r"<function=([^<>\n]*)(?:>|\n)")
_END = re.compile(r"</function>\s*(?=<function=|<tool_call>|$)")
_PARAMETER = re.compile(r"(?:(?<=\n)|^|(?<=</parameter>))[ \t]*<parameter=([^>\n]+?)(?:>|\n)")
_END_PARAMETER = "</parameter>"
_NESTED = re.compile(r"(?<=\n)[ \t]*<tool_call>\s*<function=.*?</tool_call>", re.DOTALL)
_ANOTHER = re.compile(r"\n[ \t]*<tool_call>\s*<function=")


def read_xml(text: str, schemas: ToolSchemas, *, is_closed: bool) -> Calls | None:
    """Return the calls of a text in Qwen's tags, `<function=NAME>` with parameters, one after the other. The list is empty while a call
    is open. Returns None where the text is anything but calls of declared tools.

    A value ends with its end tag, before the next parameter of the tool, or with the function. is_closed: a closing tag follows the
    text, so that the last function may lack its end tag, or its last parameter may, and not both.
    """
    calls, text = Calls(), text.strip()
    bare = _NESTED.sub(lambda m: "\0" * len(m[0]), text)  # a value may hold whole calls as text
    while text:
        head = _HEAD.match(text)
        name = "" if head is None else head[1].strip()
        if head is None or name not in schemas:
            return None
        end = _END.search(bare, head.end())
        stop = len(text) if end is None else end.start()
        if _ANOTHER.search(
            bare, head.end(), stop
        ):  # another call begins in it: nobody knows where this one ends
            return Calls()
        found = _parameters(name, text[head.end() : stop], bare[head.end() : stop], schemas)
        if found is None:
            return None
        arguments, is_open = found
        if (is_open and end is None) or (not is_closed and (is_open or end is None)):
            return Calls()
        calls.append((name, arguments))
        text = "" if end is None else text[end.end() :].lstrip().removeprefix(_OPEN).lstrip()
        bare = bare[len(bare) - len(text) :]
    return calls or None


def _parameters(name: str, text: str, bare: str, schemas: ToolSchemas) -> tuple[dict[str, Any], bool] | None:
    """Return the arguments in the text between a function's tags, and whether the last one's end tag is missing. Returns None where the
    text is no list of parameters. name: the tool. bare: the text with the calls that values contain blanked out."""
    heads: list[re.Match[str]] = []
    for head in _PARAMETER.finditer(bare):
        before = bare[max(0, head.start() - 200) : head.start()].rstrip()
        if not heads or before.endswith(_END_PARAMETER) or schemas.declares(name, head[1].strip()):
            heads.append(head)
    if bare[: heads[0].start() if heads else None].strip():
        return None
    arguments: dict[str, Any] = {}
    is_open = False
    for number, head in enumerate(heads):
        stop = heads[number + 1].start() if number + 1 < len(heads) else len(text)
        value, key = text[head.end() : stop], head[1].strip()
        kept = value.rstrip().removesuffix(_END_PARAMETER)
        is_open = len(kept) == len(value.rstrip())
        kept = value if is_open else kept
        arguments[key] = convert(kept.removeprefix("\n").removesuffix("\n"), schemas.kinds(name, key))
    return arguments, is_open
