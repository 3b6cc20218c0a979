"""Writes a grammar, in llguidance's Lark, of the tool calls that a request allows.

There is one writer for each notation: JSON, Qwen's tags, Gemma's braces. The values that a parameter may have are taken from schema.py,
which reads the tool's schema. For values that a notation writes as JSON the grammar contains the schema itself. `tokens` holds the tags
that are special tokens of the vocabulary. A grammar names those by id; all other tags are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlxspec.errors import GrammarError
from mlxspec.parsers.formats import ChatFormat
from mlxspec.parsers.patterns import FORMATS, slashed, whole
from mlxspec.parsers.schema import Json, Schema, Shape, member_of
from mlxspec.parsers.tool_schemas import ToolSchemas
from mlxspec.parsers.values import writes_bare

MAX_CALLS = 8  # of one answer that must call
_MOST_RULES = 50_000
_MOST_LENGTH = 100_000  # characters that a length of a bare text is counted to
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_END = "\n</parameter>\n"
_TAG = "(?s:.*)(<\\/parameter>|<\\/function>|<parameter=)(?s:.*)"  # a parser might see the end there
_TAG_KEY = r"[^\s<>=\"'][^\s<>=\"']{0,63}"
_GEMMA_KEY = r"[A-Za-z_][A-Za-z0-9_.-]{0,63}"


def calls_grammar(
    form: ChatFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    tokens: Mapping[str, int],
    several: bool,
    lead: str = "",
    is_opened: bool = False,
    loose: dict[str, str] | None = None,
    otherwise: Mapping[str, Any] | None = None,
    schemas: ToolSchemas | None = None,
    texts: Mapping[str, str] | None = None,
) -> str:
    """Return a grammar, in llguidance's Lark, of an answer that is one call of one of these tools, or 1 to MAX_CALLS calls where
    `several`.

    tools: in OpenAI's form. tokens: ids of the tags that are special tokens, by tag. lead: text before the first call. is_opened: any
    text may precede the first opening tag. loose: the tools whose calls may have any arguments: name -> sentence for the client. The
    function adds each tool whose schema cannot be written; where loose is None it raises GrammarError instead. otherwise: a JSON schema
    in the form that `Schema.json` returns; the answer may be a value of this schema instead of calls. schemas: the schemas of the tools;
    None to read them here. texts: Lark grammars by tool name, for tools whose only argument is a text `input`, in a notation that writes
    texts unchanged. Raises GrammarError where the chat template takes no tools.
    """
    schemas = ToolSchemas(tools) if schemas is None else schemas
    tags = form.call_tags
    if tags is None:
        raise GrammarError("This model's chat template takes no tools.")
    writer = _WRITERS["gemma" if tags.mark else str(form.tools)](tokens, tags.mark or "")
    bodies = []
    for name in dict.fromkeys(str(t["function"]["name"]) for t in tools):
        if loose and name in loose:
            bodies.append(writer.call(name, Schema({"type": "object"})))
            continue
        try:
            lark = (texts or {}).get(name)
            bodies.append(writer.call(name, schemas.of(name)) if lark is None else writer.custom(name, lark))
        except (GrammarError, RecursionError) as error:
            said = (
                str(error)
                if isinstance(error, GrammarError)
                else f"The parameters of the tool {name} are nested too deeply."
            )
            if loose is None:
                raise GrammarError(said) from error
            loose[name] = f"calls of {name} may have any arguments: {said}"
            bodies.append(writer.call(name, Schema({"type": "object"})))
    between = "" if tags.mark else '"\\n"'
    head = writer.text(tags.open)
    if is_opened:
        ahead = writer.rule("/(?s:.*)/", tags.open)
        head = f"({head} | {ahead})" if tags.open in tokens else ahead
    call = writer.rule(f"{head} ({' | '.join(bodies)}) {writer.text(tags.close)}")
    more = f" ({between} {call}){{0,{MAX_CALLS - 1}}}" if several else ""
    start = f"{writer.text(lead)} {call}{more}".lstrip()
    if otherwise is not None:
        start = f"{writer.rule(start)} | {writer.json(otherwise)}"
    return "\n".join([f"start: {start}", *writer.rules])


class _Writer:
    """A writer of the rules of one grammar; each subclass writes the calls of one notation. tokens: ids of the tags that are special
    tokens, by tag. mark: the text that encloses strings in Gemma's notation, else empty."""

    def __init__(self, tokens: Mapping[str, int], mark: str) -> None:
        self._tokens, self._mark = tokens, mark
        self.rules: list[str] = []
        self._num_rules = 0
        self._known: dict[str, str] = {}  # of a value's schema, or of a rule's text -> the rule

    def call(self, name: str, schema: Schema) -> str:
        raise NotImplementedError

    def custom(self, name: str, lark: str) -> str:
        """Return the name of the rule of a call of the tool `name` whose only argument is a text `input` that follows the Lark grammar
        `lark`."""
        raise NotImplementedError

    def nested(self, lark: str) -> str:
        """Add a rule that holds a complete Lark grammar with rules of its own, and return the name of the added rule. Raises
        GrammarError where a line of `lark` is a closing brace alone."""
        if any(line.strip() == "}" for line in lark.splitlines()):
            raise GrammarError("A grammar of a custom tool has a line that is a closing brace alone.")
        return self.rule(f"%lark {{\n{lark}\n}}")

    def new_name(self) -> str:
        self._num_rules += 1
        if self._num_rules > _MOST_RULES:
            raise GrammarError(
                "The parameters of these tools are too many, or too intricate, for a required call."
            )
        return f"r{self._num_rules - 1}"

    def rule(self, body: str, suffix: str = "") -> str:
        """Return the name of the rule with this body, which is added unless an equal rule exists. suffix: if given, the rule is one
        lexeme that ends with the first occurrence of this text."""
        text = f"[suffix={json.dumps(suffix)}]: {body}" if suffix else f": {body}"
        if text not in self._known:
            self._known[text] = self.new_name()
            self.rules.append(self._known[text] + text)
        return self._known[text]

    def terminal(self, terms: Sequence[str]) -> str:
        """Return the name of a terminal that matches a text if all of these terms match the text. The terminal is added unless an equal
        one exists."""
        text = " & ".join(terms)
        if text not in self._known:
            self._known[text] = self.new_name().upper()
            self.rules.append(f"{self._known[text]}: {text}")
        return self._known[text]

    def text(self, text: str) -> str:
        """Return the grammar's expression for exactly this text: quoted literals, and special tokens by id."""
        for tag, number in self._tokens.items():
            if tag in text:
                before, _, after = text.partition(tag)
                parts = [self.text(before), f"<[{number}]>", self.text(after)]
                return " ".join(p for p in parts if p)
        return json.dumps(text, ensure_ascii=False) if text else ""

    def json(self, schema: Mapping[str, Any]) -> str:
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': _STYLE})}")

    def value(self, schema: Schema, part: Json, where: str) -> str:
        """Return the name of the rule of a value that is valid for `part`, a part of the schema. A schema that refers to itself gives a
        rule that refers to its own name. where: the value's name in errors."""
        key = json.dumps(part, sort_keys=True)
        if '"$ref"' in key:  # to this schema's own definitions
            key = f"{id(schema)} {key}"
        if key not in self._known:
            name = self._known[key] = self.new_name()
            self.rules.append(f"{name}: {self._value(schema, part, where)}")
        return self._known[key]

    def _value(self, schema: Schema, part: Json, where: str) -> str:
        raise NotImplementedError


class _JsonWriter(_Writer):
    def call(self, name: str, schema: Schema) -> str:
        head = json.dumps({"name": name}, ensure_ascii=False)[:-1] + ', "arguments": '
        _objects(schema, name)
        kept = schema.json()
        is_plain = not {"$ref", "allOf", "anyOf"} & kept.keys()
        if is_plain and "properties" in kept:
            properties = {name: part for name, part, _ in _members(kept)}
            kept = {"additionalProperties": False, **kept, "properties": properties}
        kept = {**kept, "type": ["object"]} if is_plain else _only_objects(kept)
        return self.rule(f'{self.text(chr(10) + head)} {self.json(kept)} "}}\\n"')


class _TagWriter(_Writer):
    """A writer of grammar rules for calls in Qwen's tags. The rules allow a value without quotes where its schema allows strings, or
    strings and null, and nothing else; any other value is JSON."""

    def call(self, name: str, schema: Schema) -> str:
        forms = [self._members(schema, shape) for shape in _objects(schema, name)]
        return self.rule(
            f'{self.text(f"{chr(10)}<function={name}>{chr(10)}")} ({" | ".join(forms)}) "</function>\\n"'
        )

    def custom(self, name: str, lark: str) -> str:
        head = self.text(f"\n<function={name}>\n<parameter=input>\n")
        return self.rule(f'{head} {self.nested(lark)} {self.text(_END)} "</function>\\n"')

    def _members(self, schema: Schema, shape: Shape) -> str:
        if shape.values:
            found = [
                self.rule(" ".join([*(self._constant(k, v) for k, v in value.items()), '""']))
                for value in shape.values
            ]
            return self.rule(" | ".join(found))
        parts = []
        for key, part, required in _members(shape.rules):
            if not required and not schema.shapes(part):
                continue
            opening = f"<parameter={key}>\n"
            if any(c in key for c in "<>\n"):
                raise GrammarError(
                    f"The parameter {key[:80]!r} cannot be written in this model's tool format."
                )
            member = self.rule(f"{self.text(opening)} {self.value(schema, part, key)}")
            parts.append(member if required else f"{member}?")
        for key_term, part in _free_members(shape, _TAG_KEY):
            member = self.rule(
                f'"<parameter=" {self.terminal(key_term)} ">\\n" {self.value(schema, part, "a value")}'
            )
            parts.append(_repeated(member, *_counts(shape)))
        return self.rule(" ".join([*parts, '""']))

    def _constant(self, key: str, value: Json) -> str:
        return self.text(f"<parameter={key}>\n{json.dumps(value, ensure_ascii=False)}{_END}")

    def _value(self, schema: Schema, part: Json, where: str) -> str:
        shapes = schema.shapes(part)
        if not shapes:
            raise GrammarError(f"No value is valid for the parameter {where}.")
        if not writes_bare(schema.kinds(part)):
            return f"{self.json(schema.json(part))} {self.text(_END)}"
        return " | ".join(self._bare(shape, where) for shape in shapes)

    def _bare(self, shape: Shape, where: str) -> str:
        if shape.values or shape.kind == "null":
            texts = ["null" if v is None else str(v) for v in shape.values or (None,)]
            for text in texts:
                if any(tag in text for tag in ("</parameter>", "</function>", "<parameter=")):
                    raise GrammarError(
                        f"A value of the parameter {where} spells a tag of this model's tool format."
                    )
            return " | ".join(self.text(text + _END) for text in texts)
        return self.rule(" & ".join([*_terms(shape), f"~{slashed(_TAG)}"]), _END)


class _GemmaWriter(_Writer):
    """A writer of calls in Gemma's braces: keys without quotes, strings between marks, lists and objects as in JSON without spaces."""

    def call(self, name: str, schema: Schema) -> str:
        forms = [self._object(schema, shape) for shape in _objects(schema, name)]
        return self.rule(f"{self.text(f'call:{name}')} ({' | '.join(forms)})")

    def custom(self, name: str, lark: str) -> str:
        head = self.text(f"call:{name}{{input:{self._mark}")
        return self.rule(f"{head} {self.nested(lark)} {self.text(self._mark + '}')}")

    def _value(self, schema: Schema, part: Json, where: str) -> str:
        shapes = schema.shapes(part)
        if not shapes:
            raise GrammarError(f"No value is valid for the parameter {where}.")
        return " | ".join(self._shape(schema, shape) for shape in shapes)

    def _shape(self, schema: Schema, shape: Shape) -> str:
        if shape.values:
            return " | ".join(self._literal(v) for v in shape.values)
        if shape.kind == "object":
            return self._object(schema, shape)
        if shape.kind == "array":
            return self._array(schema, shape)
        if shape.kind == "string":
            return f"{self.text(self._mark)} {self._inside(shape)}"
        return self.json(_scalar(shape))

    def _inside(self, shape: Shape) -> str:
        """Return the name of the rule of a string's text and its closing mark; the opening mark is written by the caller. The text
        cannot contain the mark."""
        if self._mark not in self._tokens:
            marked = slashed(f"(?s:.*){re.escape(self._mark)}(?s:.*)")
            return self.rule(" & ".join([*_terms(shape), f"~{marked}"]), self._mark)
        often = "?" if _may_be_empty(shape) else ""
        return self.rule(f"{self.terminal(_terms(shape))}{often} {self.text(self._mark)}")

    def _literal(self, value: Json) -> str:
        if isinstance(value, str):
            return f"{self.text(self._mark)} {self.text(value)} {self.text(self._mark)}".replace("  ", " ")
        if isinstance(value, list):
            return (
                ' "," '.join(['"["', *(self._literal(v) for v in value), '"]"'])
                .replace('"[" "," ', '"[" ')
                .replace(' "," "]"', ' "]"')
            )
        if isinstance(value, dict):
            inner = ' "," '.join(f"{self._key(k)} {self._literal(v)}" for k, v in value.items())
            return f'"{{" {inner} "}}"'
        return self.text(json.dumps(value))

    def _key(self, key: str) -> str:
        if not key or any(c in key for c in ':,{}[]\n"') or self._mark in key or key != key.strip():
            raise GrammarError(f"The parameter {key[:80]!r} cannot be written in this model's tool format.")
        return self.text(f"{key}:")

    def _object(self, schema: Schema, shape: Shape) -> str:
        if shape.values:
            return " | ".join(self._literal(v) for v in shape.values)
        members = [
            (f"{self._key(key)} {self.value(schema, part, key)}", required)
            for key, part, required in _members(shape.rules)
            if required or schema.shapes(part)
        ]
        free = ""
        for key_term, part in _free_members(shape, _GEMMA_KEY):
            free = self.rule(f'{self.terminal(key_term)} ":" {self.value(schema, part, "a value")}')
        # a comma stands between members that are there: `first` is a list that has none yet, `rest` one that has
        first, rest = self._others(free, *_counts(shape))
        for text, required in reversed(members):
            member = self.rule(text)
            begins = f"{member} {rest}"
            first = self.rule(begins if required else f"{begins} | {first}")
            rest = self.rule(f'"," {member} {rest}' if required else f'("," {member})? {rest}')
        return self.rule(f'"{{" {first} "}}"')

    def _array(self, schema: Schema, shape: Shape) -> str:
        rules = shape.rules
        least, most, item = rules.get("minItems", 0), rules.get("maxItems"), rules.get("items", True)
        parts = [s for s in rules.get("prefixItems", []) if s is not False][:most]
        fixed = [self.value(schema, s, "a list's item") for s in parts]
        room = 0 if item is False else None if most is None else most - len(fixed)
        other = "" if room == 0 else self.value(schema, item, "a list's item")
        first, rest = self._others(other, max(0, least - len(fixed)), room)
        inner = rest if fixed else first
        for i in range(len(fixed) - 1, -1, -1):
            head = fixed[i] if i == 0 else f'"," {fixed[i]}'
            inner = self.rule(f"{head} {inner}" if i < least else f"({head} {inner})?")
        return self.rule(f'"[" {inner} "]"')

    def _others(self, item: str, least: int, most: int | None) -> tuple[str, str]:
        """Return the names of two rules for `least` to `most` equal items with commas between them: one where no item precedes them, one
        where an item does. item: the rule of one item; empty for no items. most: None for no limit."""
        if not item or most == 0:
            return '""', '""'
        another = f'"," {item}'
        some = f"{item} {_repeated(another, max(least - 1, 0), None if most is None else most - 1)}"
        return self.rule(some if least else f'{some} | ""'), self.rule(_repeated(another, least, most))


_WRITERS: dict[str, Any] = {"json": _JsonWriter, "xml": _TagWriter, "gemma": _GemmaWriter}


def _objects(schema: Schema, name: str) -> list[Shape]:
    """Return the shapes of objects that the schema allows as arguments of a call of the tool `name`. Raises GrammarError where it allows
    no object."""
    found = [shape for shape in schema.shapes() if shape.kind == "object"]
    if not found:
        raise GrammarError(
            f"The parameters of the tool {name} are no object, and arguments of a call are one."
        )
    return found


def _only_objects(kept: Mapping[str, Json]) -> dict[str, Json]:
    """Return a schema whose valid values are those of the schema `kept` that are objects."""
    definitions = {"$defs": kept["$defs"]} if "$defs" in kept else {}
    inner = {k: v for k, v in kept.items() if k != "$defs"}
    return {"allOf": [inner, {"type": "object"}], **definitions}


def _members(rules: Mapping[str, Json]) -> list[tuple[str, Json, bool]]:
    """Return (name, schema, whether it is required) of each member of an object with these keywords, in the order in which a call has
    them: declared members, then required ones that are not declared."""
    required = rules.get("required", [])
    names = dict.fromkeys([*rules.get("properties", {}), *required])
    return [(name, member_of(rules, name), name in required) for name in names]


def _free_members(shape: Shape, key: str) -> list[tuple[list[str], Json]]:
    """Return (terms that a key matches, schema of the values) of the members whose names the object does not declare, at most one pair.
    The list is empty where the object allows no such members, and where it declares members without a rule for others. key: a pattern
    of all keys."""
    rules = shape.rules
    taken = {*rules.get("properties", {}), *rules.get("required", [])}
    patterns = rules.get("patternProperties", {})
    if patterns:
        found = [
            ([slashed(key), slashed(whole(p))], part) for p, part in patterns.items() if part is not False
        ]
        return found[:1]  # of several patterns a call writes the first
    rest = rules.get("additionalProperties", not taken)
    if rest is False or _counts(shape)[1] == 0:
        return []
    others = [f"~{slashed('|'.join(map(_plain, sorted(taken))))}"] if taken else []
    return [([slashed(key), *others], rest)]


def _plain(text: str) -> str:
    return "".join(c if c.isalnum() or c in "_ " else f"\\{c}" if ord(c) < 128 else c for c in text)


def _counts(shape: Shape) -> tuple[int, int | None]:
    """Return the smallest and the largest number of members that an object has in addition to its required ones. The largest is None
    where there is no limit."""
    required = len(shape.rules.get("required", []))
    most = shape.rules.get("maxProperties")
    return max(0, shape.rules.get("minProperties", 0) - required), None if most is None else max(
        0, most - required
    )


def _repeated(body: str, least: int, most: int | None) -> str:
    """Return the grammar's expression for `body`, repeated `least` to `most` times. most: None for no limit."""
    if most == 0:
        return '""'
    return f"({body}){{{least},{'' if most is None else most}}}"


def _terms(shape: Shape) -> list[str]:
    """Return terms of the grammar for a string that is written without quotes: its length, patterns and formats. The string must match
    all of them."""
    rules = shape.rules
    least, most = rules.get("minLength", 0), rules.get("maxLength")
    bounds = "" if most is None or most > _MOST_LENGTH else str(most)
    terms = ["/(?s:.*)/" if not least and not bounds else f"/(?s:.{{{least},{bounds}}})/"]
    patterns, formats = rules.get("pattern", []), rules.get("format", [])
    terms += [slashed(whole(p)) for p in ([patterns] if isinstance(patterns, str) else patterns)]
    terms += [slashed(FORMATS[f]) for f in ([formats] if isinstance(formats, str) else formats)]
    return terms


def _may_be_empty(shape: Shape) -> bool:
    return not {"pattern", "format"} & shape.rules.keys() and not shape.rules.get("minLength")


def _scalar(shape: Shape) -> dict[str, Json]:
    """Return the JSON schema of a shape that is a number, a truth value or null."""
    multiples = shape.rules.get("multipleOf")
    if isinstance(multiples, list):
        rest = {k: v for k, v in shape.rules.items() if k != "multipleOf"}
        return {"allOf": [{"type": shape.kind, **rest}, *({"multipleOf": m} for m in multiples)]}
    return {"type": shape.kind, **shape.rules}
