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
    """Return whether Qwen's tags write a value of these JSON types as text without quotes: text, or text or null."""
    return "string" in kinds and kinds <= {"string", "null"}


def is_text(kinds: Set[str] | None) -> bool:
    """Return whether a value is text whatever it looks like, except null. That of a parameter that is not declared (None) is text too."""
    return kinds is None or writes_bare(kinds)


def convert(text: str, kinds: Set[str] | None) -> Any:
    """Convert a value that was written without quotes to one of these JSON types. One that fits none of them stays text, since the
    caller's own validation explains more."""
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
    """Read JSON, or Python's spelling of it, which models mix up. Returns None for neither, and for NaN and Infinity, which JSON does
    not have."""
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
    """Return a finite number: one beyond the largest float becomes the largest."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def as_json(arguments: Mapping[str, Any]) -> str:
    """Return arguments as JSON text. Halves of characters, which UTF-8 does not have, become the sign for what is none."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
