"""Turns arguments that a model writes as bare text into JSON values, by the types that the tool's schema allows."""

from __future__ import annotations

import ast
import json
import math
import sys
from collections.abc import Mapping, Set
from typing import Any

from mlxspec.parsers.schema import kind_of

_NULLS = ("null", "none")


def writes_bare(kinds: Set[str]) -> bool:
    """Return whether Qwen's tags write a value of these JSON types as text without quotes: for strings, and for strings or null."""
    return "string" in kinds and kinds <= {"string", "null"}


def is_text(kinds: Set[str] | None) -> bool:
    """Return whether a value of these JSON types is always read as text, except null. kinds: None for a parameter that is not declared,
    whose value is text too."""
    return kinds is None or writes_bare(kinds)


def convert(text: str, kinds: Set[str] | None) -> Any:
    """Return a value that was written without quotes as one of these JSON types. A value that fits none of them is returned as the text,
    so that the client's own validation can explain the fault. kinds: None for a parameter that is not declared."""
    if text.strip().lower() in _NULLS and (kinds is None or "null" in kinds):
        return None
    if kinds is None or writes_bare(kinds):
        return text
    if "boolean" in kinds and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    if kinds & {"integer", "number"}:
        number = _number(text)
        if number is not None and ("number" in kinds or isinstance(number, int)):
            return number
    value = loads(text)
    fits = value is not None and (
        kind_of(value) in kinds or (kind_of(value) == "integer" and "number" in kinds)
    )
    return value if fits or (value is not None and "string" not in kinds) else text


def _number(text: str) -> int | float | None:
    try:
        value = float(text)
        if text.strip().lstrip("+-").isdigit():
            return int(text)
        if math.isfinite(value):
            return int(value) if value.is_integer() else value
        return finite(text) if any(c.isdigit() for c in text) else None
    except (ValueError, OverflowError):
        return None


def loads(text: str) -> Any:
    """Return the value of a text that is JSON, or a Python literal, which models write by mistake. Returns None for any other text, and
    for NaN and Infinity, which JSON does not have."""
    try:
        return json.loads(text, strict=False, parse_constant=_no_number, parse_float=finite)
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)
        return value
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _no_number(name: str) -> Any:
    raise ValueError(name)


def finite(text: str) -> float:
    """Return the number that a text spells; one beyond the largest float becomes the largest float."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def as_json(arguments: Mapping[str, Any]) -> str:
    """Return arguments as JSON text. Lone surrogates, which UTF-8 cannot encode, become replacement characters."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
