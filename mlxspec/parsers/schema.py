"""Reads a JSON Schema once, for the grammars and the parsers of every notation of tool calls.

The compiler, llguidance, enforces the keywords that it can, and lists the others. This module walks the schema only: references get
names of their own, patterns get the compiler's syntax, and keywords that cannot be enforced are listed with their paths. `shapes` are
the plain forms of a value, without references and alternatives, as the notations that are not JSON need them.

Dialect: 2020-12, with the older spellings that clients still send (definitions, items as a list, exclusiveMinimum as a boolean).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher

from mlxspec.errors import GrammarError
from mlxspec.parsers.patterns import usable_pattern

Json = Any
KINDS = ("string", "number", "integer", "boolean", "null", "object", "array")
_ANY = tuple(k for k in KINDS if k != "integer")
_ALIASES = {"str": "string", "text": "string", "varchar": "string", "char": "string", "enum": "string", "int": "integer", "long": "integer",
            "short": "integer", "unsigned": "integer", "uint": "integer", "num": "number", "float": "number", "double": "number",
            "bool": "boolean", "binary": "boolean", "dict": "object", "list": "array", "arr": "array"}  # fmt: skip
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uri uuid".split())
_UNHELD = frozenset(
    "uniqueItems contains minContains maxContains not if then else dependentRequired dependentSchemas dependencies unevaluatedItems "
    "unevaluatedProperties propertyNames $dynamicRef $recursiveRef".split()
)
_RULES = frozenset(
    "minLength maxLength pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf properties required "
    "additionalProperties patternProperties minProperties maxProperties items prefixItems minItems maxItems".split()
)
_SAYS_NOTHING = frozenset("title description examples $comment type".split())  # of names, which are strings
_LISTS, _MAPS, _PARTS = (
    ("allOf", "anyOf", "oneOf", "prefixItems"),
    ("properties", "patternProperties"),
    ("items", "additionalProperties"),
)
_STYLE = ("whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator")
_INT64 = 2**63 - 1024  # the largest number that 64 bits hold, as a float: the compiler reads bounds so
_MOST_PLACES, _MOST_SHAPES, _MOST_DEPTH = 20_000, 256, 64


@dataclass(frozen=True)
class Unheld:
    """A keyword of a schema that no grammar can enforce. path: the place of the schema that has it, like `properties.a.items`; empty for
    the root."""

    path: str
    keyword: str

    @property
    def place(self) -> str:
        return f"{self.path}.{self.keyword}" if self.path else self.keyword


@dataclass(frozen=True)
class Shape:
    """A plain form that a value may have: one JSON type, without references and alternatives. kind: the JSON type. rules: the schema
    keywords that apply. values: if not empty, the value is one of these, and `rules` is empty."""

    kind: str
    rules: Mapping[str, Json] = field(default_factory=dict)
    values: tuple[Json, ...] = ()


class Schema:
    """A JSON schema, read for grammars and parsers. left_out: its keywords that cannot be enforced. Raises GrammarError for a value that
    is no valid schema."""

    def __init__(self, schema: Json) -> None:
        self.left_out: list[Unheld] = []
        self._given, self._num_places = schema, 0
        self._unions: list[
            tuple[str, list[Json], str]
        ] = []  # path, branches and discriminator of what was oneOf
        self._names: dict[str, str] = {}
        self._defs: dict[str, Json] = {}
        told = schema.get("x-guidance") if isinstance(schema, Mapping) else None
        self._style = {k: told[k] for k in _STYLE if k in told} if isinstance(told, Mapping) else {}
        try:
            self.root: Json = self._kept(schema, "", 0)
        except RecursionError as error:
            raise GrammarError("the schema is nested too deeply.") from error
        if self.root is False:
            raise GrammarError("no value is valid for the schema.")
        for path, parts, by in self._unions:
            pairs = ((a, b) for i, a in enumerate(parts) for b in parts[:i])
            if not all(self._excludes(a, b, by, 0) for a, b in pairs):
                self.left_out.append(Unheld(path, "oneOf"))
        if isinstance(self.root, dict):
            text = json.dumps({**self.json(), "x-guidance": {"lenient": True}})
            wrong, said = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(text))
            if not wrong:
                self.left_out += [Unheld("", "minProperties")] * ("Properties" in " ".join(said))

    # --- what is asked

    def json(self, part: Json | None = None) -> dict[str, Json]:
        """Return a part of the schema, with the definitions that it refers to, as a JSON schema for the grammar compiler. part: None for
        the whole schema."""
        part = self.root if part is None else part
        found, waiting = dict[str, Json](), list(_references(part))
        while waiting:
            name = waiting.pop()
            if name not in found:
                found[name] = self._defs[name]
                waiting += _references(found[name])
        base = part if isinstance(part, dict) else {} if part is True else {"not": {}}
        style = {"x-guidance": {"lenient": True, **self._style}} if part is self.root else {}
        return {**base, **({"$defs": found} if found else {}), **style}

    def shapes(self, part: Json | None = None) -> tuple[Shape, ...]:
        """Return all plain forms that a value of a part of the schema may have; empty where no value is valid. part: None for the whole
        schema. Raises GrammarError where there are too many forms, or the schema refers to itself without end."""
        found = [
            Shape(k, *_rules(p, k))
            for p in self._plain(self.root if part is None else part, 0)
            for k in _kinds(p)
        ]
        return tuple(s for s in found if s.values != (None, None))  # none of the values is of the type

    def kinds(self, part: Json | None = None) -> frozenset[str]:
        return frozenset(shape.kind for shape in self.shapes(part))

    def member(self, name: str) -> Json:
        return conjunction([member_of(s.rules, name) for s in self.shapes() if s.kind == "object"] or [True])

    # --- reading

    def _kept(self, schema: Json, path: str, depth: int) -> Json:
        self._num_places += 1
        if depth > _MOST_DEPTH or self._num_places > _MOST_PLACES:
            raise GrammarError(
                f"the schema is nested too deeply, or has too many parts, at {path[:200] or 'its root'}."
            )
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise GrammarError(
                f"the schema at {path[:200] or 'its root'} must be an object, not {str(schema)[:80]}."
            )
        out: dict[str, Json] = {}
        if "oneOf" in schema and "anyOf" in schema:
            one = {k: schema[k] for k in ("oneOf", "discriminator") if k in schema}
            rest = {k: v for k, v in schema.items() if k not in one}
            schema = {**rest, "allOf": [*schema.get("allOf", ()), one]}
        for key, value in _with_names(schema).items():
            here = f"{path}.{key}" if path else str(key)
            try:
                if key == "type":
                    names = [
                        _ALIASES.get(str(n).lower(), str(n).lower())
                        for n in (value if isinstance(value, list) else [value])
                    ]
                    if unknown := [n for n in names if n not in (*KINDS, "any")]:
                        raise GrammarError(
                            f"the schema at {here} names the type {unknown[0]!r}, which JSON Schema does not know."
                        )
                    out[key] = list(_ANY) if "any" in names else names
                elif key in ("enum", "const"):
                    if key == "enum" and not isinstance(value, list):
                        raise TypeError(value)
                    out["enum"] = list(value) if key == "enum" else [value]
                elif key == "$ref" and isinstance(value, str) and not value.startswith("#"):
                    self.left_out.append(Unheld(path, key))  # of another document
                elif key == "$ref":
                    out[key] = f"#/$defs/{self._definition(value, here, depth)}"
                elif key in _LISTS or (key == "items" and isinstance(value, list)):
                    parts = [self._kept(s, f"{here}.{i}", depth + 1) for i, s in enumerate(value)]
                    if key == "oneOf":  # branches that exclude each other mean the same as anyOf
                        by = schema.get("discriminator")
                        name = by.get("propertyName") if isinstance(by, Mapping) else None
                        self._unions.append((path, parts, name if isinstance(name, str) else ""))
                    out[{"items": "prefixItems", "oneOf": "anyOf"}.get(key, key)] = parts
                    if key == "items" and "additionalItems" in schema:
                        out["items"] = self._kept(schema["additionalItems"], f"{path}.additionalItems", depth)
                elif key in _MAPS:
                    out[key] = {k: self._kept(s, f"{here}.{k}", depth + 1) for k, s in value.items()}
                elif key in _PARTS:
                    out[key] = self._kept(value, here, depth + 1)
                elif key == "pattern":
                    if usable := usable_pattern(value):
                        out[key] = usable
                    elif usable is None:
                        self.left_out.append(Unheld(path, key))
                elif key == "required":
                    out[key] = [
                        n
                        for n in dict.fromkeys(value if isinstance(value, list) else ())
                        if isinstance(n, str)
                    ]
                elif key in _RULES and (key != "format" or value in FORMATS):
                    if key != "format" and not _is_number(value, key):
                        raise TypeError(value)
                    out[key] = value
                elif key in _UNHELD and not _is_neutral(key, value, schema):
                    self.left_out.append(Unheld(path, key))
            except (TypeError, AttributeError) as error:
                raise GrammarError(f"the schema at {here} cannot be {str(value)[:80]}.") from error
        if "integer" in out.get("type", ()) and "number" not in out["type"] and "enum" not in out:
            # no client reads more; a model may write digits without end
            least, most = (
                any(k in out for k in (f"exclusive{e}", e.lower())) for e in ("Minimum", "Maximum")
            )
            out |= ({} if least else {"minimum": -_INT64}) | ({} if most else {"maximum": _INT64})
        patterns = {p: usable_pattern(p) for p in out.get("patternProperties", ())}
        self.left_out += [
            Unheld(f"{path}.patternProperties", p) for p, usable in patterns.items() if usable is None
        ]
        if patterns:
            out["patternProperties"] = {
                u: out["patternProperties"][p] for p, u in patterns.items() if u is not None
            }
        return out

    def _definition(self, pointer: Json, here: str, depth: int) -> str:
        """Return the name, in the definitions that this object keeps, of the schema that a `$ref` points to. The schema is read at its
        first use. here: the path of the reference, for errors."""
        if pointer not in self._names:
            found = self._given
            try:
                if pointer != "#" and not pointer.startswith("#/"):
                    found = _anchored(found, pointer.removeprefix("#"))
                for part in pointer.removeprefix("#").split("/")[1:]:
                    part = unquote(part).replace("~1", "/").replace("~0", "~")
                    found = found[int(part)] if isinstance(found, list) else found[part]
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                raise GrammarError(
                    f"the schema at {here} refers to {str(pointer)[:80]!r}, which is not in this schema."
                ) from error
            self._names[pointer] = name = f"d{len(self._names)}"
            self._defs[name] = True  # until it is read: it may refer to itself
            self._defs[name] = self._kept(found, pointer.lstrip("#/").replace("/", "."), depth + 1)
        return self._names[pointer]

    def _excludes(self, one: Json, two: Json, by: str, depth: int) -> bool:
        """Return whether it is certain that no value is valid for both schemas. by: the name of the member by which objects are
        distinguished (the `discriminator`), whether or not it is required; empty where the schema names none."""
        if depth > 3:
            return False
        try:
            return all(self._differ(a, b, by, depth) for a in self.shapes(one) for b in self.shapes(two))
        except GrammarError:
            return False

    def _differ(self, a: Shape, b: Shape, by: str, depth: int) -> bool:
        if a.kind != b.kind and {a.kind, b.kind} != {"integer", "number"}:
            return True
        if a.values and b.values:
            return not any(same(v, w) for v in a.values for w in b.values)
        if a.kind != "object" or a.values or b.values:
            return False
        for own, other in ((a.rules, b.rules), (b.rules, a.rules)):
            for name in dict.fromkeys([*own.get("required", ()), by] if by else own.get("required", ())):
                is_free = name in other.get("required", ()) or name == by
                theirs = member_of(other, name)
                if theirs is False or (
                    is_free and self._excludes(member_of(own, name), theirs, "", depth + 1)
                ):
                    return True
        return False

    def _plain(self, part: Json, depth: int) -> list[dict[str, Json]]:
        """Return a part of the schema as a list of alternatives, none of which has `$ref`, `allOf`, `anyOf` or `oneOf` at its top.
        Raises GrammarError where there are too many."""
        if depth > _MOST_DEPTH:
            raise GrammarError("the schema refers to itself without end.")
        if part is False:
            return []
        part = {} if part is True else part
        found = [{k: v for k, v in part.items() if k not in ("$ref", *_LISTS[:3])}]
        groups = [[self._defs[part["$ref"].rpartition("/")[2]]]] if "$ref" in part else []
        groups += [[p] for p in part.get("allOf", ())] + [part[k] for k in ("anyOf", "oneOf") if k in part]
        for group in groups:
            options = [o for p in group for o in self._plain(p, depth + 1)]
            found = [m for a in found for b in options if (m := _merged(a, b)) is not None]
            if len(found) > _MOST_SHAPES:
                raise GrammarError(
                    f"the schema allows more than {_MOST_SHAPES} different forms of one value."
                )
        return found


def _merged(a: Mapping[str, Json], b: Mapping[str, Json]) -> dict[str, Json] | None:
    """Return the schema of the values that are valid for both schemas; None where they have no type in common."""
    out = {**a, **b}
    for key in a.keys() & b.keys():
        one, two = a[key], b[key]
        if key == "type":
            out[key] = [k for k in one if k in two or (k == "integer" and "number" in two)] or [
                k for k in two if k == "integer" and "number" in one
            ]
            if not out[key]:
                return None
        elif key == "enum":
            out[key] = [v for v in one if any(same(v, w) for w in two)]
        elif key in _MAPS:
            out[key] = {**one, **two, **{k: conjunction([one[k], two[k]]) for k in one.keys() & two.keys()}}
        elif key == "required":
            out[key] = list(dict.fromkeys([*one, *two]))
        elif key in ("pattern", "format", "multipleOf"):
            both = [v for given in (one, two) for v in (given if isinstance(given, list) else [given])]
            out[key] = both if any(v != both[0] for v in both) else both[0]
        elif key == "prefixItems":
            out[key] = [
                conjunction([s[i] for s in (one, two) if i < len(s)]) for i in range(max(len(one), len(two)))
            ]
        elif key in _PARTS:
            out[key] = conjunction([one, two])
        elif "min" in key.lower() or "max" in key.lower():
            out[key] = (max if "min" in key.lower() else min)(one, two)
    return out


def _anchored(part: Json, name: str) -> Json:
    """Return the part of a schema that has the `$anchor` `name`. Raises KeyError where no part has it."""
    waiting = [part]
    while waiting:
        found = waiting.pop()
        if isinstance(found, Mapping):
            if found.get("$anchor") == name:
                return found
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found
    raise KeyError(name)


def _with_names(schema: Mapping[str, Json]) -> Mapping[str, Json]:
    """Return the schema with `propertyNames` that is a list of names, or a pattern, rewritten as `properties` or `patternProperties`,
    which a grammar can enforce. Any other schema is returned unchanged."""
    names = schema.get("propertyNames")
    if not isinstance(names, Mapping) or {"properties", "patternProperties"} & schema.keys():
        return schema
    said = {k: v for k, v in names.items() if k not in _SAYS_NOTHING}
    value = schema.get("additionalProperties", True)
    rest = {k: v for k, v in schema.items() if k not in ("propertyNames", "additionalProperties")}
    if said.keys() == {"enum"} and isinstance(said["enum"], list):
        listed = {name: value for name in said["enum"] if isinstance(name, str)}
        return {**rest, "properties": listed, "additionalProperties": False}
    if said.keys() == {"pattern"} and isinstance(said["pattern"], str) and usable_pattern(said["pattern"]):
        return {**rest, "patternProperties": {said["pattern"]: value}, "additionalProperties": False}
    return schema


def _is_number(value: Json, key: str) -> bool:
    """Return whether `value` is allowed for the keyword `key`, which sets a bound. Older schemas have `exclusiveMinimum: true`."""
    if isinstance(value, bool):
        return key.startswith("exclusive")
    return isinstance(value, int | float) and math.isfinite(value)


def _is_neutral(key: str, value: Json, schema: Mapping[str, Json]) -> bool:
    """Return whether the keyword `key`, which cannot be enforced, excludes no value in this schema."""
    if key in ("then", "else", "minContains", "maxContains"):
        return ("contains" if "Contains" in key else "if") not in schema
    if key == "if":
        return not {"then", "else"} & schema.keys()
    if key == "propertyNames" and isinstance(value, Mapping):
        return not value.keys() - _SAYS_NOTHING
    neutral = {"uniqueItems": (False, None), "not": (False,), "contains": ()}
    return value in neutral.get(key, (True, None, {}, []))


def _kinds(part: Mapping[str, Json]) -> list[str]:
    kinds = part.get("type", _ANY)
    if "enum" in part:
        told = {kind_of(v) for v in part["enum"]}
        kinds = [k for k in dict.fromkeys(kinds) if k in told] + ["integer"] * (
            "integer" in told and "number" in kinds and "integer" not in kinds
        )
    return [k for k in dict.fromkeys(kinds) if k != "integer" or "number" not in kinds or "enum" in part]


def _rules(part: Mapping[str, Json], kind: str) -> tuple[dict[str, Json], tuple[Json, ...]]:
    if "enum" in part:
        return {}, tuple(v for v in part["enum"] if kind_of(v) == kind)
    return {k: v for k, v in part.items() if k in _RULES}, ()


def conjunction(parts: Sequence[Json]) -> Json:
    """Return a schema whose valid values are those that are valid for all of these schemas."""
    if any(part is False for part in parts):
        return False
    found: list[Json] = []
    for part in parts:
        for one in part["allOf"] if isinstance(part, dict) and part.keys() == {"allOf"} else [part]:
            if one is not True and one != {} and one not in found:
                found.append(one)
    return True if not found else found[0] if len(found) == 1 else {"allOf": found}


def member_of(rules: Mapping[str, Json], name: str) -> Json:
    """Return the schema of the member `name` of an object. rules: the keywords of the object's own schema."""
    own = rules.get("properties", {}).get(name)
    matched = [s for p, s in rules.get("patternProperties", {}).items() if re.search(p, name)]
    return (
        rules.get("additionalProperties", True)
        if own is None and not matched
        else conjunction([*([] if own is None else [own]), *matched])
    )


def same(a: Json, b: Json) -> bool:
    """Return whether two values are equal in JSON: 1 equals 1.0, and 1 does not equal true."""
    return bool(a == b) and json.dumps(a, sort_keys=True, default=str).replace(".0", "") == json.dumps(
        b, sort_keys=True, default=str
    ).replace(".0", "")


def kind_of(value: Json) -> str:
    """Return the JSON type of a Python value; a whole number, 1.0 included, is an `integer`."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    return {str: "string", float: "number", dict: "object", list: "array"}.get(type(value), "object")


def _references(part: Json) -> Iterator[str]:
    """Yield the names of the definitions that a schema refers to."""
    if isinstance(part, list):
        for each in part:
            yield from _references(each)
    elif isinstance(part, dict):
        for key, value in part.items():
            if key == "$ref" and isinstance(value, str):
                yield value.rpartition("/")[2]
            elif key != "enum":
                yield from _references(list(value.values()) if key in _MAPS else value)
