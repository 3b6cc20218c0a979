"""Checks values against JSON schemas, in the part of the language that schemas.py uses, with errors that name the place.

Requests are checked with the schemas that /openapi.json publishes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mlxspec.server.errors import BadField

_NOUNS = {
    "string": "text",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def check(value: Any, schema: Mapping[str, Any], path: str = "") -> None:
    """Raises BadField with the first thing that is wrong."""
    if "anyOf" in schema:
        _any_of(value, _branches_for(value, schema, path), path)
        return
    kinds = _kinds(schema)
    if kinds and not any(_is(value, kind) for kind in kinds):
        raise BadField(path, f"{path or 'The body'} must be {_listed(kinds)}.")
    if "enum" in schema and not any(value == v and type(value) is type(v) for v in schema["enum"]):
        choices = ", ".join("null" if v is None else str(v) for v in schema["enum"])
        raise BadField(path, f"{path} must be one of {choices}.")
    if isinstance(value, str):
        _text(value, schema, path)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        _number(value, schema, path)
    elif isinstance(value, list):
        _list(value, schema, path)
    elif isinstance(value, dict):
        _object(value, schema, path)


def unknown(value: Any, schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every member of a checked value that the schema does not describe. Objects whose members the schema leaves free
    (a JSON schema, a table of biases) have none."""
    kind = "object" if isinstance(value, dict) else "array" if isinstance(value, list) else None
    fitting = [s for s in _branches_for(value, schema, path) if kind in _kinds(s)]
    if kind == "array":
        items = [s["items"] for s in fitting if "items" in s]
        for place, item in enumerate(value if items else ()):
            yield from unknown(item, _merged(items), f"{path}[{place}]")
    elif kind == "object":
        described = [s["properties"] for s in fitting if "properties" in s]
        dot = f"{path}." if path else ""
        for name, item in value.items() if described else ():
            known = [properties[name] for properties in described if name in properties]
            if known:
                yield from unknown(item, _merged(known), f"{dot}{name}")
            else:
                yield f"{dot}{name[:60]}", item


def _merged(schemas: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """One schema for what may follow any of them."""
    if len(schemas) == 1:
        return schemas[0]
    return {"anyOf": [branch for schema in schemas for branch in schema.get("anyOf", [schema])]}


def _branches_for(value: Any, schema: Mapping[str, Any], path: str) -> list[Mapping[str, Any]]:
    """The branches that a value may follow. Of an object with a discriminator, as OpenAPI calls it, one: that whose member of this name
    has the value's. Raises BadField where there is none."""
    branches = list(schema.get("anyOf", [schema]))
    if "discriminator" not in schema or not isinstance(value, dict):
        return branches
    name = schema["discriminator"]["propertyName"]
    default = schema["discriminator"].get("x-default")
    objects = [s for s in branches if name in s.get("properties", {})]
    found = [s for s in objects if value.get(name, default) in s["properties"][name]["enum"]]
    if not found:
        kinds = ", ".join(str(kind) for s in objects for kind in s["properties"][name]["enum"])
        raise BadField(f"{path}.{name}", f"{path}.{name} must be one of {kinds}.")
    return found[:1]


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    named = schema.get("type", [])
    return [named] if isinstance(named, str) else list(named)


def _any_of(value: Any, schemas: list[Mapping[str, Any]], path: str) -> None:
    """The branch of the value's own type says what is wrong; without one, all types are named."""
    fitting = [s for s in schemas if any(_is(value, kind) for kind in _kinds(s))]
    if not fitting:
        kinds = list(dict.fromkeys(kind for s in schemas for kind in _kinds(s)))
        raise BadField(path, f"{path} must be {_listed(kinds)}.")
    last: BadField | None = None
    for schema in fitting:
        try:
            check(value, schema, path)
            return
        except BadField as error:
            last = error
    if last is not None:
        raise last


def _is(value: Any, kind: str) -> bool:
    if kind == "integer":
        return _is(value, "number") and (isinstance(value, int) or value.is_integer())
    if kind == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    found = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}
    return isinstance(value, found[kind])


def _text(value: str, schema: Mapping[str, Any], path: str) -> None:
    if len(value) < schema.get("minLength", 0):
        raise BadField(path, f"{path} must not be empty.")
    if len(value) > schema.get("maxLength", len(value)):
        raise BadField(path, f"{path} must have at most {schema['maxLength']} characters.")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        raise BadField(path, f"{path} must match {schema['pattern']}.")


def _number(value: float, schema: Mapping[str, Any], path: str) -> None:
    low, high = schema.get("minimum"), schema.get("maximum")
    if (low is not None and value < low) or (high is not None and value > high):
        span = f"between {low} and {high}" if None not in (low, high) else f"at least {low}"
        raise BadField(path, f"{path} must be {span}.")
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        raise BadField(path, f"{path} must be above {schema['exclusiveMinimum']}.")


def _list(value: list[Any], schema: Mapping[str, Any], path: str) -> None:
    if len(value) < schema.get("minItems", 0):
        raise BadField(
            path, f"{path} must have at least {schema['minItems']} item{'s' * (schema['minItems'] > 1)}."
        )
    if len(value) > schema.get("maxItems", len(value)):
        raise BadField(path, f"{path} must have at most {schema['maxItems']} items.")
    if "items" in schema:
        for place, item in enumerate(value):
            check(item, schema["items"], f"{path}[{place}]")


def _object(value: dict[str, Any], schema: Mapping[str, Any], path: str) -> None:
    dot = f"{path}." if path else ""
    for name in schema.get("required", ()):
        if name not in value:
            raise BadField(f"{dot}{name}", f"{dot}{name} is missing.")
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    if len(value) > schema.get("maxProperties", len(value)):
        raise BadField(path, f"{path} must have at most {schema['maxProperties']} members.")
    for name, item in value.items():
        if name in properties:
            check(item, properties[name], f"{dot}{name}")
        elif others is False:
            raise BadField(path, f"{path or 'The body'} must not have {name[:60]!r}.")
        elif isinstance(others, Mapping):
            if "propertyNames" in schema:
                check(name, schema["propertyNames"], f"a name in {path}")
            check(item, others, f"{dot}{name[:60]}")


def _listed(kinds: list[str]) -> str:
    names = [_NOUNS[kind] for kind in kinds]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
