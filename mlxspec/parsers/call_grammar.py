"""Writes a grammar, in llguidance's Lark, of the tool calls that a request allows.

`tokens` says which tags are special tokens of the vocabulary. A grammar names those by id; all others are text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlxspec.errors import GrammarError
from mlxspec.parsers.formats import ChatFormat

MAX_CALLS = 8  # of one answer that must call
_ANYTHING: dict[str, Any] = {"type": "object"}


def calls_grammar(
    form: ChatFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    tokens: Mapping[str, int],
    several: bool,
    lead: str = "",
    otherwise: Mapping[str, Any] | None = None,
) -> str:
    """Lark for one call of these tools, or for up to MAX_CALLS. lead: text in front of the first call. otherwise: a JSON schema that the
    answer may follow instead.

    tools: in OpenAI's form, at least one. Raises GrammarError for a schema that cannot be written in the format.
    """
    tags = form.call_tags
    if tags is None:
        raise GrammarError("This model's chat template takes no tools.")
    writer = _Writer(tokens)
    one = {"json": writer.json_call, "xml": writer.xml_call}.get(str(form.tools)) or writer.gemma_call(
        tags.mark or ""
    )
    bodies = [one(_name(t), _parameters(t)) for t in tools]
    between = "" if tags.mark else '"\\n"'
    call = writer.rule(f"{writer.text(tags.open)} ({' | '.join(bodies)}) {writer.text(tags.close)}")
    more = f" ({between} {call}){{0,{MAX_CALLS - 1}}}" if several else ""
    start = f"{writer.text(lead)} {call}{more}".lstrip()
    if otherwise is not None:
        start = f"{writer.rule(start)} | {writer.json(otherwise)}"
    return "\n".join([f"start: {start}", *writer.rules])


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool["function"]["name"])


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    found = tool["function"].get("parameters")
    return found if isinstance(found, Mapping) and found else _ANYTHING


class _Writer:
    """Rules in the making."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self.rules: list[str] = []
        self._depth = 0

    def rule(self, body: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def text(self, text: str) -> str:
        """A literal, special tokens in it by id."""
        for tag, number in self._tokens.items():
            if tag in text:
                before, _, after = text.partition(tag)
                parts = [self.text(before), f"<[{number}]>", self.text(after)]
                return " ".join(p for p in parts if p)
        return json.dumps(text, ensure_ascii=False) if text else ""

    def json(self, schema: Mapping[str, Any]) -> str:
        style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        return self.rule(f"%json {json.dumps({'x-guidance': style, **schema})}")

    def json_call(self, name: str, parameters: Mapping[str, Any]) -> str:
        head = json.dumps({"name": name}, ensure_ascii=False)[:-1] + ', "arguments": '
        closed = {"additionalProperties": False} if "properties" in parameters else {}
        return self.rule(f'{self.text(chr(10) + head)} {self.json({**closed, **parameters})} "}}\\n"')

    # --- Qwen's tags

    def xml_call(self, name: str, parameters: Mapping[str, Any]) -> str:
        parts = [self.text(f"\n<function={name}>\n")]
        for key, schema, required in _members(parameters):
            value = self._xml_value(schema)
            end = "" if _is_text(schema) else self.text("\n</parameter>\n")
            member = self.rule(f"{self.text(f'<parameter={key}>' + chr(10))} {value} {end}")
            parts.append(member if required else f"{member}?")
        return self.rule(" ".join([*parts, self.text("</function>\n")]))

    def _xml_value(self, schema: Mapping[str, Any]) -> str:
        if "enum" in schema and all(isinstance(v, str) for v in schema["enum"]):
            end = self.text("\n</parameter>\n")
            return self.rule(f"({' | '.join(self.text(v) or chr(34) * 2 for v in schema['enum'])}) {end}")
        if _is_text(schema):
            name = f"r{len(self.rules)}"
            self.rules.append(f'{name}[suffix="\\n</parameter>\\n"]: /(?s:.{_longest(schema)})/')
            return name
        return self.json(schema)

    # --- Gemma's notation

    def gemma_call(self, mark: str) -> Any:
        def call(name: str, parameters: Mapping[str, Any]) -> str:
            return self.rule(f"{self.text(f'call:{name}')} {self._gemma_object(parameters, mark)}")

        return call

    def _gemma_object(self, schema: Mapping[str, Any], mark: str) -> str:
        members = _members(schema)
        if not members:
            return '"{}"'
        # a comma stands between those that are there: `first` is a list that has none yet, `rest` one that has
        first: str | None = None
        rest = '""'
        for key, value, required in reversed(members):
            member = self.rule(f"{self.text(key + ':')} {self._gemma_value(value, mark)}")
            new_rest = self.rule(f'"," {member} {rest}' if required else f'("," {member})? {rest}')
            begins = f"{member} {rest}"
            first = self.rule(begins if required else f"{begins} | {first or chr(34) * 2}")
            rest = new_rest
        return self.rule(f'"{{" {first} "}}"')

    def _gemma_value(self, schema: Mapping[str, Any], mark: str) -> str:
        self._depth += 1
        try:
            if self._depth > 32:
                raise GrammarError("A tool's parameters are nested too deeply.")
            if "enum" in schema or "const" in schema:
                listed = schema["enum"] if "enum" in schema else [schema["const"]]
                return self.rule(" | ".join(self._gemma_literal(v, mark) for v in listed))
            for key in ("anyOf", "oneOf"):
                if isinstance(schema.get(key), list):
                    return self.rule(" | ".join(self._gemma_value(s, mark) for s in schema[key]))
            kinds = schema.get("type", "string")
            return self.rule(
                " | ".join(
                    self._gemma_type(k, schema, mark) for k in (kinds if isinstance(kinds, list) else [kinds])
                )
            )
        finally:
            self._depth -= 1

    def _gemma_literal(self, value: Any, mark: str) -> str:
        if isinstance(value, str):
            return f"{self.text(mark)} {self.text(value)} {self.text(mark)}".replace("  ", " ")
        if isinstance(value, (dict, list)):
            raise GrammarError("Objects and lists in an enum cannot be written in this model's tool format.")
        return self.text(json.dumps(value))

    def _gemma_type(self, kind: str, schema: Mapping[str, Any], mark: str) -> str:
        if kind == "object":
            return self._gemma_object(schema, mark)
        if kind == "array":
            item = self._gemma_value(schema.get("items") or {}, mark)
            return self.rule(f'"[" ({item} ("," {item})*)? "]"')
        if kind == "string":
            inside = f"/{'[^<]' if mark in self._tokens else '([^<]|<[^e|])'}{_longest(schema)}/"
            return self.rule(f"{self.text(mark)} {inside} {self.text(mark)}")
        if kind in ("integer", "number", "boolean", "null"):
            return self.json({**{k: v for k, v in schema.items() if k in _NUMBERS}, "type": kind})
        raise GrammarError(f"A tool's parameter has the type {kind!r}, which JSON schema does not know.")


_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def _members(parameters: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    """(name, schema, whether it must be there), in the order written."""
    properties = parameters.get("properties")
    needed = parameters.get("required")
    required = set(needed) if isinstance(needed, list) else set()
    if not isinstance(properties, Mapping):
        return []
    return [
        (str(key), schema if isinstance(schema, Mapping) else {"type": "string"}, key in required)
        for key, schema in properties.items()
    ]


def _longest(schema: Mapping[str, Any]) -> str:
    """How often a character may come, as a regular expression says it."""
    limit = schema.get("maxLength")
    return f"{{0,{limit}}}" if type(limit) is int and 0 <= limit < 100_000 else "*"


def _is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value is written as bare text that only its closing tag ends; enums bring their own end too."""
    if "enum" in schema:
        return all(isinstance(v, str) for v in schema["enum"])
    return schema.get("type", "string") == "string" and not any(
        k in schema for k in ("anyOf", "oneOf", "$ref", "const")
    )
