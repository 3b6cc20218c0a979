"""Turns arguments that a model writes as bare text into JSON values, by the tool's schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

_ALIASES = {
    "str": "string", "text": "string", "varchar": "string", "char": "string", "enum": "string",
    "int": "integer", "long": "integer", "short": "integer", "unsigned": "integer", "uint": "integer",
    "num": "number", "float": "number", "double": "number",
    "bool": "boolean", "binary": "boolean",
    "dict": "object", "list": "array", "arr": "array",
}  # fmt: skip


class ToolTypes:
    """Types of the parameters of an OpenAI request's tools."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping):
                parameters = function.get("parameters")
                properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
                name = str(function.get("name"))
                self._parameters[name] = properties if isinstance(properties, Mapping) else {}

    def of(self, function: str, parameter: str) -> frozenset[str] | None:
        """JSON types a parameter may have; empty where its schema says none; None for a parameter that nobody declared."""
        properties = self._parameters.get(function)
        if properties is None or parameter not in properties:
            return None
        return frozenset(_types(properties[parameter]))


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    found = {_ALIASES.get(str(t).lower(), str(t).lower()) for t in _listed(named)}
    for key in ("anyOf", "oneOf", "allOf"):
        for part in _listed(schema.get(key)):
            found |= _types(part)
    if not found and isinstance(schema.get("enum"), list):
        found = {"string"} if all(isinstance(v, str) for v in schema["enum"]) else set()
    return found


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def is_text(types: frozenset[str] | None) -> bool:
    """Whether a value is text whatever it looks like, `null` left aside; so is one of a parameter that nobody declared."""
    return types is None or (bool(types) and types <= {"string", "null"})


def convert(text: str, types: frozenset[str] | None) -> Any:
    """A value written as bare text. What does not fit its type stays text: the caller's validation will say so better."""
    if text.lower() == "null":
        return None
    if is_text(types):
        return text
    types = types or frozenset()
    if "boolean" in types and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    if types & {"integer", "number"}:
        number = _number(text)
        if number is not None and ("number" in types or isinstance(number, int)):
            return number
    value = _literal(text)
    if isinstance(value, (dict, list)):
        return value
    if types and "string" not in types and value is not None:
        return value
    return text


def _number(text: str) -> int | float | None:
    try:
        value = float(text)
        return (
            int(text) if text.strip().lstrip("+-").isdigit() else int(value) if value.is_integer() else value
        )
    except (ValueError, OverflowError):
        return None


def _literal(text: str) -> Any:
    """JSON, or Python's spelling of it, which models mix up; None for neither."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)
        return value
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def escaped(text: str) -> str:
    """Text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
