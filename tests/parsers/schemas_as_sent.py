"""JSON Schemas of tool parameters as clients send them: what pydantic, zod and hand-written tools give for everyday types."""

from __future__ import annotations

from typing import Any


def made(*needed: str, **members: Any) -> dict[str, Any]:
    """An object with these members, all required unless some are named."""
    return {"type": "object", "properties": members, "required": list(needed or members)}


_DEFS = {
    "$defs": {
        "Point": made(x={"type": "integer"}, y={"type": "number"}),
        "Color": {"type": "string", "enum": ["red", "blue"]},
        "Level": {"type": "integer", "enum": [1, 2, 3]},
        "Node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
            },
            "required": ["value"],
            "additionalProperties": False,
        },
    }
}
_TEXT = {"type": "string", "maxLength": 6}
SCHEMAS: dict[str, dict[str, Any]] = {
    "text": made(v=_TEXT),
    "several": made("a", a=_TEXT, b={"type": "integer"}, c={"type": "boolean"}),
    "no members": {"type": "object", "properties": {}},
    "closed": {**made(v={"type": "boolean"}), "additionalProperties": False},
    "nested model": {**made(v={"$ref": "#/$defs/Point"}), **_DEFS},
    "optional model": {**made(v={"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}), **_DEFS},
    "list of models": {**made(v={"type": "array", "items": {"$ref": "#/$defs/Point"}, "maxItems": 2}), **_DEFS},
    "recursive": {**made(v={"$ref": "#/$defs/Node"}), **_DEFS},
    "root reference": {"$ref": "#/$defs/Point", **_DEFS},
    "root all of": {"allOf": [{"$ref": "#/$defs/Point"}, made(z={"type": "integer"})], **_DEFS},
    "root any of": {"anyOf": [made(a={"type": "integer"}), made(b=_TEXT)]},
    "enum": made(v={"enum": ["red", "light blue"]}),
    "enum reference": {**made(v={"$ref": "#/$defs/Color"}), **_DEFS},
    "integer enum reference": {**made(v={"$ref": "#/$defs/Level"}), **_DEFS},
    "optional enum reference": {**made(v={"anyOf": [{"$ref": "#/$defs/Level"}, {"type": "null"}]}), **_DEFS},
    "all of a reference": {**made(v={"allOf": [{"$ref": "#/$defs/Point"}], "description": "d"}), **_DEFS},
    "reference with a limit": {**made(v={"$ref": "#/$defs/S", "maxLength": 2}), "$defs": {"S": {"type": "string"}}},
    "older definitions": {**made(v={"$ref": "#/definitions/P"}), "definitions": {"P": {"type": "integer"}}},
    "optional text": made(v={"anyOf": [_TEXT, {"type": "null"}], "default": None}),
    "text or null": made(v={"type": ["string", "null"], "maxLength": 4}),
    "text or number": made(v={"anyOf": [{"type": "integer"}, _TEXT]}),
    "literal": made(v={"type": "string", "const": "abc"}),
    "number literal": made(v={"const": 5}),
    "literals": made(v={"oneOf": [{"const": "aa"}, {"const": "bb"}]}),
    "enum or null": made(v={"enum": ["red", None]}),
    "the word null": made(v={"type": "string", "enum": ["null", "None"]}),
    "mixed enum": made(v={"enum": ["5", 5, True, None]}),
    "enum of objects": made(v={"enum": [{"a": 1}, [1, "x"]]}),
    "enum with an empty text": made(v={"enum": ["", "x"]}),
    "integer": made(v={"type": "integer", "minimum": 1, "maximum": 20}),
    "number": made(v={"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    "multiple": made(v={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50}),
    "safe integer": made(v={"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}),
    "older bound": made(v={"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 9}),
    "pattern": made(v={"type": "string", "pattern": "^[A-Z]{2}$"}),
    "pattern inside": made(v={"type": "string", "pattern": "\\d-\\d", "maxLength": 6}),
    "pattern of choices": made(v={"type": "string", "pattern": "^a$|^b{2}"}),
    "two patterns": made(v={"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "z$"}], "maxLength": 5}),
    "lengths": made(v={"type": "string", "minLength": 3, "maxLength": 5}),
    "date": made(v={"type": "string", "format": "date"}),
    "date and time": made(v={"type": "string", "format": "date-time"}),
    "time": made(v={"type": "string", "format": "time"}),
    "uuid": made(v={"type": "string", "format": "uuid"}),
    "email": made(v={"type": "string", "format": "email"}),
    "ipv4": made(v={"type": "string", "format": "ipv4"}),
    "uri": made(v={"type": "string", "format": "uri"}),
    "unknown formats": made(a={"type": "string", "format": "path", "maxLength": 3}, b={"type": "integer", "format": "int64"}),
    "list": made(v={"type": "array", "items": {"type": "integer"}}),
    "list of texts": made(v={"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 3}),
    "list of two": made(v={"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}),
    "tuple": made(v={"type": "array", "prefixItems": [{"type": "integer"}, _TEXT], "minItems": 2, "maxItems": 2}),
    "older tuple": made(v={"type": "array", "items": [{"type": "integer"}, _TEXT], "additionalItems": False}),
    "tuple and rest": made(v={"type": "array", "prefixItems": [_TEXT], "items": {"type": "integer"}, "minItems": 1, "maxItems": 4}),
    "nested lists": made(v={"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}, "maxItems": 2}),
    "any list": made(v={"type": "array", "maxItems": 2}),
    "map": made(v={"type": "object", "additionalProperties": {"type": "integer"}}),
    "map with some": made(v={"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 3}),
    "record": made(v={"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}}),
    "record of names": made(v={"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}}),
    "record of a pattern": made(v={"type": "object", "propertyNames": {"pattern": "^k[0-9]$"}, "additionalProperties": _TEXT}),
    "pattern properties": made(v={"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False}),
    "root map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "root map of texts": {"type": "object", "additionalProperties": _TEXT},
    "object with a rest": made(v={**made(a={"type": "integer"}), "additionalProperties": {"type": "boolean"}}),
    "required but not declared": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]},
    "free object": made(v={"type": "object"}),
    "anything": made(v={}),
    "no schema": {},
    "union of models": made(v={"anyOf": [made(k={"const": "a"}, n={"type": "integer"}), made(k={"const": "b"}, t=_TEXT)]}),
    "discriminated": made(v={"oneOf": [made(k={"const": "a"}), made(k={"const": "b"}, n={"type": "null"})]}),
    "one of types": made(v={"oneOf": [_TEXT, {"type": "integer"}, {"type": "array", "items": {"type": "null"}, "maxItems": 1}]}),
    "one of the two": {**made("a", a={"type": "boolean"}, b={"type": "boolean"}), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "deep": made(a=made(b=made(c=made(d=_TEXT)))),
    "annotations": {**made(v={"type": "integer", "title": "V", "examples": [1], "readOnly": True}), "$schema": "x", "title": "T"},
    "a property called type": made(type=_TEXT, properties={"type": "integer"}, required={"type": "boolean"}),
    "true and false": made("a", a=True, b=False),
}  # fmt: skip
