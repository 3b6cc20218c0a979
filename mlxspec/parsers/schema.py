"""Reads a JSON Schema once, for the grammars and the parsers of every notation of tool calls.

A schema of a stranger is read once. The reading keeps what a grammar can hold, under references of its own, and lists every keyword that it
leaves out with its path. What a value may be is asked as `shapes`: references, allOf, anyOf, const, enum and lists of types are resolved
there. The grammar compiler reads the kept schema itself (`json`), so JSON Schema is written in no second form.

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

from mlxspec.errors import GrammarError
from mlxspec.parsers.patterns import usable_pattern

Json = Any
KINDS = ("string", "number", "integer", "boolean", "null", "object", "array")
_ALIASES = {
    "str": "string", "text": "string", "varchar": "string", "char": "string", "enum": "string",
    "int": "integer", "long": "integer", "short": "integer", "unsigned": "integer", "uint": "integer",
    "num": "number", "float": "number", "double": "number",
    "bool": "boolean", "binary": "boolean",
    "dict": "object", "list": "array", "arr": "array",
}  # fmt: skip
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uri uuid".split())
# by the kind of value that they speak of
_RULES: dict[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
}  # fmt: skip
_RULES["integer"] = _RULES["number"]
_NUMBERS = (
    *_RULES["number"],
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
)
# No grammar here holds these. Keywords that JSON Schema does not know say nothing about which values are valid.
_UNHELD = frozenset(
    "uniqueItems contains minContains maxContains not if then else dependentRequired dependentSchemas dependencies unevaluatedItems "
    "unevaluatedProperties $dynamicRef $recursiveRef".split()
)
_SAYS_NOTHING = frozenset("title description examples $comment type enum const".split())  # of names
_STYLE = (
    "whitespace_flexible",
    "whitespace_pattern",
    "item_separator",
    "key_separator",
)  # of the compiler's own settings
_MOST_PLACES, _MOST_SHAPES, _MOST_DEPTH = 20_000, 256, 64


@dataclass(frozen=True)
class Unheld:
    """A keyword that no grammar here can hold. path: where it stands, as `properties.a.items`; empty for the root."""

    path: str
    keyword: str

    @property
    def place(self) -> str:
        return f"{self.path}.{self.keyword}" if self.path else self.keyword


@dataclass(frozen=True)
class Shape:
    """One of the things that a value may be. kind: its JSON type. values: if it is one of these only, (); else rules holds the keywords
    of that type, kept ones, with subschemas in conjunction as a list behind `allOf`."""

    kind: str
    rules: Mapping[str, Json] = field(default_factory=dict)
    values: tuple[Json, ...] = ()


class Schema:
    """A schema that has been read. left_out: what is not held. Raises GrammarError for what is no schema at all: half a sentence that gives
    the path, for the caller's."""

    def __init__(self, schema: Json) -> None:
        self.left_out: list[Unheld] = []
        self._given = schema
        self._names: dict[str, str] = {}  # pointer -> name among `_defs`
        self._defs: dict[str, Json] = {}
        self._num_places = 0
        self._anchors: dict[str, Json] | None = None
        told = schema.get("x-guidance") if isinstance(schema, Mapping) else None
        self._style = {k: told[k] for k in _STYLE if k in told} if isinstance(told, Mapping) else {}
        self._shapes: dict[str, tuple[Shape, ...]] = {}
        try:
            self.root: Json = self._kept(schema, "", 0)
        except RecursionError as error:
            raise GrammarError("the schema is nested too deeply.") from error

    # --- what is asked

    def json(self, part: Json | None = None) -> dict[str, Json]:
        """A part of what is kept, the whole by default, with the definitions that it reaches, for the grammar compiler."""
        part = self.root if part is None else part
        found: dict[str, Json] = {}
        waiting = list(_references(part))
        while waiting:
            name = waiting.pop()
            if name not in found:
                found[name] = self._defs[name]
                waiting += _references(found[name])
        base = part if isinstance(part, dict) else {} if part is True else {"not": {}}
        style = {"x-guidance": self._style} if part is self.root and self._style else {}
        return {**base, **({"$defs": found} if found else {}), **style}

    def shapes(self, part: Json | None = None) -> tuple[Shape, ...]:
        """All that a value of a part of what is kept may be, the whole by default. Empty where nothing is valid. Raises GrammarError for
        alternatives without end."""
        part = self.root if part is None else part
        key = json.dumps(part, sort_keys=True)
        if key not in self._shapes:
            self._shapes[key] = tuple(self._alternatives(part, 0))
        return self._shapes[key]

    def kinds(self, part: Json | None = None) -> frozenset[str]:
        """JSON types of valid values. A schema that says nothing has all."""
        return frozenset(shape.kind for shape in self.shapes(part))

    def member(self, name: str) -> Json:
        """What is kept of the schema of a member of the root's objects; False where no object may have it, True where nobody says."""
        return conjunction([member_of(s.rules, name) for s in self.shapes() if s.kind == "object"] or [True])

    # --- reading

    def _kept(self, schema: Json, path: str, depth: int) -> Json:
        """The schema without what is not held, references renamed."""
        self._num_places += 1
        if depth > _MOST_DEPTH:
            raise GrammarError(f"the schema is nested too deeply at {_at(path)}.")
        if self._num_places > _MOST_PLACES:
            raise GrammarError(f"the schema has more than {_MOST_PLACES} parts.")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise GrammarError(f"the schema at {_at(path)} must be an object, not {_what(schema)}.")
        out: dict[str, Json] = {}
        for key in sorted(schema, key=lambda k: k == "propertyNames"):  # which goes by the others
            self._keep(str(key), schema, out, path, depth + 1)
        self._settle(out, path)
        return out

    def _keep(
        self, key: str, schema: Mapping[str, Json], out: dict[str, Json], path: str, depth: int
    ) -> None:
        value = schema[key]
        here = f"{path}.{key}" if path else key
        if key == "type":
            out[key] = self._types(value, here)
        elif key in ("enum", "const"):
            out["enum"] = self._values(value if key == "enum" else [value], here, out.get("enum"))
        elif key == "$ref":
            out[key] = f"#/$defs/{self._definition(value, here, depth)}"
        elif key in ("allOf", "anyOf", "oneOf"):
            out[key] = self._each(value, here, depth)
        elif key in ("properties", "patternProperties"):
            self._keep_members(key, value, out, here, depth)
        elif key == "required":
            names = self._list(value, here) if not isinstance(value, bool) else []
            out[key] = [n for n in dict.fromkeys(names) if isinstance(n, str)]
        elif key == "prefixItems" or (key == "items" and isinstance(value, list)):
            out["prefixItems"] = self._each(value, here, depth)
            if "additionalItems" in schema:
                out["items"] = self._kept(schema["additionalItems"], f"{path}.additionalItems", depth)
        elif key in ("items", "additionalProperties"):
            out[key] = self._kept(value, here, depth)
        elif key == "pattern":
            self._keep_pattern(value, out, path)
        elif key == "format":
            if value in FORMATS:
                out[key] = value
        elif key in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
            bound = "minimum" if key == "exclusiveMinimum" else "maximum"
            if value and bound in schema:
                out[key] = schema[bound]
        elif key in _NUMBERS:
            out[key] = self._number(value, here)
        elif key == "propertyNames":
            self._keep_names(value, schema, out, path)
        elif key in _UNHELD and not _changes_nothing(key, value, schema):
            self.left_out.append(Unheld(path, key))

    def _keep_members(self, key: str, value: Json, out: dict[str, Json], here: str, depth: int) -> None:
        if not isinstance(value, Mapping):
            raise GrammarError(f"the schema at {_at(here)} must be an object, not {_what(value)}.")
        kept = {str(k): self._kept(s, f"{here}.{k}", depth) for k, s in value.items()}
        if key == "properties":
            out[key] = {**out.get(key, {}), **kept}
            return
        for pattern, schema in kept.items():
            usable = usable_pattern(pattern)
            if usable is None:
                self.left_out.append(Unheld(here, pattern))
            else:
                out.setdefault(key, {})[usable] = schema

    def _each(self, schemas: Json, here: str, depth: int) -> list[Json]:
        return [self._kept(s, f"{here}.{i}", depth) for i, s in enumerate(self._list(schemas, here))]

    def _keep_pattern(self, value: Json, out: dict[str, Json], path: str) -> None:
        usable = usable_pattern(value) if isinstance(value, str) else None
        if usable is None:
            self.left_out.append(Unheld(path, "pattern"))
        elif usable:
            out["pattern"] = usable

    def _keep_names(self, value: Json, schema: Mapping[str, Json], out: dict[str, Json], path: str) -> None:
        """Names of a map: those of an enum become members, those of a pattern become patternProperties."""
        names = value if isinstance(value, Mapping) else {}
        listed = names.get("enum", [names["const"]] if "const" in names else None)
        told = names.keys() - _SAYS_NOTHING
        pattern = usable_pattern(names["pattern"]) if told == {"pattern"} and listed is None else None
        if value is True or (isinstance(value, Mapping) and not told and listed is None):
            return
        is_map = not schema.get("properties") and not schema.get("patternProperties")
        kept = out.get("additionalProperties", True)  # which has been read before
        if is_map and isinstance(listed, list) and not told:
            out["properties"] = {n: kept for n in listed if isinstance(n, str)}
        elif is_map and pattern is not None:
            out["patternProperties"] = {pattern: kept}
        else:
            self.left_out.append(Unheld(path, "propertyNames"))
            return
        out["additionalProperties"] = False

    def _settle(self, out: dict[str, Json], path: str) -> None:
        """Keywords that the compiler takes only together with others."""
        if "patternProperties" in out and out.get("additionalProperties") is not False:
            out.setdefault("additionalProperties", True)
        if out.get("additionalProperties") is False:
            out.setdefault("properties", {})
        optional = set(out.get("properties", {})) - set(out.get("required", []))
        num_required = len(set(out.get("required", [])))
        if out.get("minProperties", 0) <= num_required:
            out.pop("minProperties", None)
        most = out.get("maxProperties")
        is_closed = out.get("additionalProperties") is False and "patternProperties" not in out
        if most is not None and is_closed and most >= len(out.get("properties", {})):
            del out["maxProperties"]
        for key in ("minProperties", "maxProperties"):
            if key in out and (optional or "patternProperties" in out):
                del out[key]
                self.left_out.append(Unheld(path, key))
        if "oneOf" in out:
            self._settle_one_of(out, path)

    def _settle_one_of(self, out: dict[str, Json], path: str) -> None:
        """oneOf is anyOf where no value fits two of the parts. Else that exactly one fits is not held."""
        parts = out.pop("oneOf")
        out["anyOf" if "anyOf" not in out else "allOf"] = (
            parts if "anyOf" not in out else [*out.get("allOf", []), {"anyOf": parts}]
        )
        if not self._are_apart(parts):
            self.left_out.append(Unheld(path, "oneOf"))

    def _are_apart(self, parts: Sequence[Json]) -> bool:
        try:
            sets = [tuple(self._alternatives(part, 0)) for part in parts]
        except GrammarError:
            return False
        return all(
            _differ(a, b) for i, one in enumerate(sets) for two in sets[i + 1 :] for a in one for b in two
        )

    def _types(self, value: Json, here: str) -> list[str]:
        found = []
        for name in value if isinstance(value, list) else [value]:
            kind = _ALIASES.get(str(name).lower(), str(name).lower())
            if kind == "any":
                return list(KINDS)
            if not isinstance(name, str) or kind not in KINDS:
                raise GrammarError(
                    f"the schema at {_at(here)} names the type {_what(name)}, which JSON Schema does not know."
                )
            found.append(kind)
        return found

    def _values(self, value: Json, here: str, known: list[Json] | None) -> list[Json]:
        values = [v for v in self._list(value, here) if _is_json(v)]
        return values if known is None else [v for v in known if any(same(v, w) for w in values)]

    def _list(self, value: Json, here: str) -> list[Json]:
        if not isinstance(value, list | tuple):
            raise GrammarError(f"the schema at {_at(here)} must be a list, not {_what(value)}.")
        return list(value)

    def _number(self, value: Json, here: str) -> Json:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise GrammarError(f"the schema at {_at(here)} must be a number, not {_what(value)}.")
        return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value

    # --- references

    def _definition(self, pointer: Json, here: str, depth: int) -> str:
        """The name, among our definitions, of what a $ref points to, which is read when it is first met."""
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            raise GrammarError(
                f"the schema at {_at(here)} refers to {_what(pointer)}, which is not in this schema."
            )
        if pointer not in self._names:
            name = f"d{len(self._names)}"
            self._names[pointer] = name
            target = self._target(pointer, here)
            self._defs[name] = True  # until it is read: it may refer to itself
            self._defs[name] = self._kept(target, pointer.lstrip("#/").replace("/", "."), depth)
        return self._names[pointer]

    def _target(self, pointer: str, here: str) -> Json:
        if self._anchors is None:
            self._anchors = {"": self._given, **dict(_anchors(self._given, 0))}
        name, *parts = pointer[1:].split("/")
        try:
            found = self._anchors[unquote(name)]
            for part in parts:
                part = unquote(part).replace("~1", "/").replace("~0", "~")
                found = found[int(part)] if isinstance(found, list) else found[part]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise GrammarError(
                f"the schema at {_at(here)} refers to {_what(pointer)}, which is not in this schema."
            ) from error
        return found

    # --- shapes

    def _alternatives(self, part: Json, depth: int) -> list[Shape]:
        if depth > _MOST_DEPTH:
            raise GrammarError("the schema refers to itself without end.")
        if part is False:
            return []
        if part is True or not part:
            return [Shape(kind) for kind in KINDS if kind != "integer"]
        kinds = part.get("type", [k for k in KINDS if k != "integer"])
        kinds = [k for k in dict.fromkeys(kinds) if k != "integer" or "number" not in kinds]
        found = [Shape(k, {r: part[r] for r in _RULES.get(k, ()) if r in part}) for k in kinds]
        if "enum" in part:
            found = _enumerated(part["enum"], found)
        wholes = [self._defs[part["$ref"].rpartition("/")[2]]] if "$ref" in part else []
        for whole in [*wholes, *part.get("allOf", [])]:
            found = _both(found, self._alternatives(whole, depth + 1))
        if "anyOf" in part:
            options = [shape for s in part["anyOf"] for shape in self._alternatives(s, depth + 1)]
            found = _both(found, options)
        if len(found) > _MOST_SHAPES:
            raise GrammarError(f"the schema allows more than {_MOST_SHAPES} different forms of one value.")
        return found


def conjunction(parts: Sequence[Json]) -> Json:
    """A schema that all of these hold for. The same ones give the same schema again, however often they are joined."""
    found: list[Json] = []
    for part in parts:
        for one in part["allOf"] if isinstance(part, dict) and part.keys() == {"allOf"} else [part]:
            if one is False:
                return False
            if one is not True and one != {} and not any(same(one, known) for known in found):
                found.append(one)
    return True if not found else found[0] if len(found) == 1 else {"allOf": found}


def member_of(rules: Mapping[str, Json], name: str) -> Json:
    """What the rules of an object say of a member."""
    own = rules.get("properties", {}).get(name)
    matched = [s for p, s in rules.get("patternProperties", {}).items() if re.search(p, name)]
    if own is None and not matched:
        return rules.get("additionalProperties", True)
    return conjunction([*([] if own is None else [own]), *matched])


def same(a: Json, b: Json) -> bool:
    """Equal as JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, str) or isinstance(b, str):
        return isinstance(a, str) and isinstance(b, str) and a == b
    return bool(a == b)


def kind_of(value: Json) -> str:
    """The JSON type of a value; of a whole number, integer."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    return {str: "string", float: "number", dict: "object", list: "array"}.get(type(value), "object")


def _enumerated(values: Sequence[Json], shapes: Sequence[Shape]) -> list[Shape]:
    """Those of the values that fit one of the shapes, by kind."""
    found: dict[str, list[Json]] = {}
    for value in values:
        kind = kind_of(value)
        if any(s.kind in (kind, "number" if kind == "integer" else kind) and _fits(value, s) for s in shapes):
            found.setdefault(kind, []).append(value)
    return [Shape(kind, {}, tuple(fitting)) for kind, fitting in found.items()]


def _fits(value: Json, shape: Shape) -> bool:
    """Whether a value of the right type keeps to the rules that can be told of it by themselves."""
    rules = shape.rules
    if shape.values:
        return any(same(value, v) for v in shape.values)
    if isinstance(value, str):
        size = len(value)
        patterns = rules.get("pattern", ())
        patterns = [patterns] if isinstance(patterns, str) else patterns
        return rules.get("minLength", 0) <= size <= rules.get("maxLength", size) and all(
            re.search(p, value) for p in patterns
        )
    if isinstance(value, int | float) and not isinstance(value, bool):
        above = value >= rules.get("minimum", value) and value > rules.get("exclusiveMinimum", value - 1)
        below = value <= rules.get("maximum", value) and value < rules.get("exclusiveMaximum", value + 1)
        return bool(above and below)
    return True


def _both(one: Sequence[Shape], two: Sequence[Shape]) -> list[Shape]:
    """What is in both sets."""
    found = [shape for a in one for b in two if (shape := _meet(a, b)) is not None]
    unique: list[Shape] = []
    for shape in found:
        if shape not in unique:
            unique.append(shape)
    return unique


def _meet(a: Shape, b: Shape) -> Shape | None:
    if a.values or b.values:
        listed, other = (a, b) if a.values else (b, a)
        kinds = {a.kind, b.kind}
        is_alike = len(kinds) == 1 or kinds == {"integer", "number"}
        values = tuple(v for v in listed.values if is_alike and _fits(v, other))
        return Shape(listed.kind, {}, values) if values else None
    if a.kind != b.kind:
        return (
            Shape("integer", _joined(a.rules, b.rules)) if {a.kind, b.kind} == {"integer", "number"} else None
        )
    return Shape(a.kind, _joined(a.rules, b.rules))


def _joined(a: Mapping[str, Json], b: Mapping[str, Json]) -> dict[str, Json]:
    """Rules that hold where both do."""
    out = dict(a)
    for key, value in b.items():
        if key not in a:
            out[key] = value
        elif key in ("properties", "patternProperties"):
            out[key] = {
                **a[key],
                **{k: conjunction([a[key][k], s]) if k in a[key] else s for k, s in value.items()},
            }
        elif key == "required":
            out[key] = list(dict.fromkeys([*a[key], *value]))
        elif key in ("items", "additionalProperties"):
            out[key] = conjunction([a[key], value])
        elif key == "prefixItems":
            longest = max(len(a[key]), len(value))
            out[key] = [conjunction([s[i] for s in (a[key], value) if i < len(s)]) for i in range(longest)]
        elif key in ("pattern", "format", "multipleOf"):
            both = [*_as_list(a[key]), *_as_list(value)]
            out[key] = both[0] if all(v == both[0] for v in both) else both
        else:
            out[key] = max(a[key], value) if "min" in key.lower() else min(a[key], value)
    for one, two in ((a, b), (b, a)):  # what one leaves to "all other members" holds for the other's members
        rest = one.get("additionalProperties", True)
        if rest is not True:
            for name in two.get("properties", {}):
                if name not in one.get("properties", {}):
                    out["properties"] = {
                        **out["properties"],
                        name: conjunction([out["properties"][name], rest]),
                    }
    return out


def _as_list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else [value]


def _differ(a: Shape, b: Shape) -> bool:
    """Whether no value is of both forms."""
    met = _meet(a, b)
    if met is None or (a.values and b.values and not met.values):
        return True
    if met.kind != "object":
        return False
    needed = set(met.rules.get("required", []))
    for rules, other in ((a.rules, b.rules), (b.rules, a.rules)):
        for name in needed & set(rules.get("required", [])):
            if member_of(other, name) is False:
                return True
    for name in needed:
        one, two = (
            p if isinstance(p, dict) else {} for p in (member_of(a.rules, name), member_of(b.rules, name))
        )
        if "enum" in one and "enum" in two and not any(same(v, w) for v in one["enum"] for w in two["enum"]):
            return True
        kinds = [{"number" if k == "integer" else k for k in part.get("type", KINDS)} for part in (one, two)]
        if not kinds[0] & kinds[1]:
            return True
    return False


def _changes_nothing(key: str, value: Json, schema: Mapping[str, Json]) -> bool:
    """Whether a keyword that is not held excludes no value."""
    if key in ("uniqueItems", "unevaluatedProperties", "unevaluatedItems"):
        return value in (False, None) if key == "uniqueItems" else value in (True, None, {})
    if key in ("then", "else"):
        return "if" not in schema
    if key == "if":
        return "then" not in schema and "else" not in schema
    if key in ("dependentRequired", "dependentSchemas", "dependencies"):
        return not value
    if key in ("minContains", "maxContains"):
        return "contains" not in schema
    return False


def _references(part: Json) -> Iterator[str]:
    """Names of the definitions that a kept schema refers to, by keyword; values of an enum are no schemas."""
    if isinstance(part, list):
        for each in part:
            yield from _references(each)
    elif isinstance(part, dict):
        for key, value in part.items():
            if key == "$ref" and isinstance(value, str):
                yield value.rpartition("/")[2]
            elif key in ("properties", "patternProperties"):
                yield from _references(list(value.values()))
            elif key != "enum":
                yield from _references(value)


def _anchors(schema: Json, depth: int) -> Iterator[tuple[str, Json]]:
    if depth > _MOST_DEPTH:
        return
    if isinstance(schema, Mapping):
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(key), str):
                yield schema[key], schema
        for key, value in schema.items():
            if key not in ("enum", "const", "default", "examples"):
                yield from _anchors(value, depth + 1)
    elif isinstance(schema, list):
        for each in schema:
            yield from _anchors(each, depth + 1)


def _is_json(value: Json) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _at(path: str) -> str:
    return path[:200] or "its root"


def _what(value: Json) -> str:
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
