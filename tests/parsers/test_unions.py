"""Sixty unions as frameworks write them, in every notation: what the grammar allows is valid, and what may overlap is named."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from planting import catches
from test_call_grammars import STYLES, grammar_of, read, tool, walk

from mlxspec.parsers.schema import Schema


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_CAT = _object(kind={"const": "cat", "type": "string"}, lives={"type": "integer", "minimum": 1, "maximum": 9})
_DOG = _object(kind={"const": "dog", "type": "string"}, name={"type": "string", "maxLength": 3})
_BIRD = _object(kind={"enum": ["hen", "owl"]}, flies={"type": "boolean"})
_BRANCHES: dict[str, list[dict[str, Any]]] = {
    "two": [_CAT, _DOG],
    "three": [_CAT, _DOG, _BIRD],
    "kinds": [
        {"type": "string", "maxLength": 4},
        {"type": "integer", "minimum": 0, "maximum": 9},
        {"type": "null"},
    ],
    "values": [{"const": 1}, {"enum": ["a", "b"]}],
    "keys": [_object(a={"type": "boolean"}), _object(b={"type": "boolean"})],
}
_WORDS = ("oneOf", "anyOf")
_WAYS = ("inline", "reference", "anchor")
_PLACES = ("member", "list")


def union(branches: str, word: str, way: str, place: str) -> dict[str, Any]:
    """A tool's parameters that hold a union."""
    parts = _BRANCHES[branches]
    names = [f"B{i}" for i in range(len(parts))]
    definitions = {
        n: {**p, **({"$anchor": n.lower()} if way == "anchor" else {})}
        for n, p in zip(names, parts, strict=True)
    }
    said: list[Any] = {
        "inline": parts,
        "reference": [{"$ref": f"#/$defs/{n}"} for n in names],
        "anchor": [{"$ref": f"#{n.lower()}"} for n in names],
    }[way]
    value: dict[str, Any] = {word: said}
    if branches in ("two", "three") and way == "reference":
        value["discriminator"] = {"propertyName": "kind"}
    held = {"type": "array", "items": value, "minItems": 1, "maxItems": 2} if place == "list" else value
    return {**_object(pet=held), **({} if way == "inline" else {"$defs": definitions})}


UNIONS = {"-".join(named): union(*named) for named in itertools.product(_BRANCHES, _WORDS, _WAYS, _PLACES)}


def check(style: str, name: str, seed: int) -> None:
    schema = UNIONS[name]
    text = walk(style, grammar_of(style, schema), seed)
    ((called, given),) = read(style, text, tool(schema))
    assert called == "f"
    errors = [e.message for e in Draft202012Validator(schema).iter_errors(json.loads(given))]
    assert not errors, (text, errors)


def test_there_are_sixty() -> None:
    assert len(UNIONS) == 60


@catches(
    "the branches of a union are not written",
    "mlxspec.parsers.schema:_LISTS",
    lambda right: ("allOf", "anyOf", "prefixItems"),
    case="two-oneOf-inline-member",
    errors=(Exception,),
)
@pytest.mark.parametrize(("name", "style"), [(name, STYLES[i % 4]) for i, name in enumerate(UNIONS)])
def test_a_call_with_a_union_is_valid(name: str, style: str) -> None:
    check(style, name, 1)
    assert Schema(UNIONS[name]).left_out == []


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", UNIONS)
def test_six_calls_with_a_union_are_valid(name: str, style: str) -> None:
    for seed in range(2, 8):
        check(style, name, seed)


@pytest.mark.parametrize(
    ("branches", "is_certain"),
    [
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"type": "string", "pattern": "^a$"}, {"type": "string", "pattern": "^b$"}], False),
        ([_object(a={"type": "string"}), {"type": "object", "properties": {"a": {"type": "string"}}}], False),
        ([{"type": "object", "properties": {"k": {"const": c}}} for c in "ab"], False),
        ([{"type": "object", "properties": {"k": {"const": c}}, "required": ["k"]} for c in "ab"], True),
        ([_object(a={"type": "string"}), _object(a={"type": "integer"})], True),
        ([_CAT, {"type": "string"}], True),
    ],
)
def test_branches_that_may_overlap_are_named(branches: list[Any], is_certain: bool) -> None:
    found = [u.place for u in Schema(_object(v={"oneOf": branches})).left_out]
    assert found == ([] if is_certain else ["properties.v.oneOf"])


def test_a_discriminator_tells_branches_apart_that_do_not_require_it() -> None:
    branches = [{"type": "object", "properties": {"k": {"const": c, "default": c}}} for c in "ab"]
    schema = {"oneOf": branches, "discriminator": {"propertyName": "k"}}
    assert Schema(_object(v=schema)).left_out == []
