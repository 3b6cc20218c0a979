"""How many members and items a call's grammar wants, and whose definitions a reference means."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from planting import catches
from test_call_grammars import grammar_of, maker, read, tool, walk

from mlxspec.parsers import call_grammar
from mlxspec.parsers.call_grammar import _counts, calls_grammar
from mlxspec.parsers.formats import ChatFormat
from mlxspec.parsers.schema import Shape


@catches(
    "required members do not count among the least number of members",
    "mlxspec.parsers.call_grammar:_counts",
    lambda right: lambda shape: (shape.rules.get("minProperties", 0), right(shape)[1]),
    case="3-None",
)
@pytest.mark.parametrize(
    ("least", "most", "wanted"),
    [(0, None, (0, None)), (3, None, (1, None)), (1, 2, (0, 0)), (2, 5, (0, 3)), (0, 1, (0, 0))],
)
def test_required_members_count_among_all(least: int, most: int | None, wanted: tuple[int, Any]) -> None:
    rules: dict[str, Any] = {"required": ["a", "b"], "minProperties": least}
    assert _counts(Shape("object", rules if most is None else {**rules, "maxProperties": most})) == wanted


def _one_less(right: Any) -> Any:
    def array(self: Any, schema: Any, shape: Shape) -> str:
        return right(self, schema, replace(shape, rules={**shape.rules, "minItems": 1}))

    return array


@catches(
    "a list of fixed items may lack the last that it needs",
    "mlxspec.parsers.call_grammar:_GemmaWriter._array",
    _one_less,
)
def test_a_list_has_all_of_its_fixed_items() -> None:
    items = {"prefixItems": [{"type": "boolean"}, {"type": "boolean"}], "items": False, "minItems": 2}
    schema = {"type": "object", "properties": {"a": {"type": "array", **items}}, "required": ["a"]}
    lark = grammar_of("gemma4", schema)
    for seed in range(8):
        text = walk("gemma4", lark, seed)
        ((_, arguments),) = read("gemma4", text, tool(schema))
        assert len(json.loads(arguments)["a"]) == 2, text


def _by_text(right: Any) -> Any:
    def value(self: Any, schema: Any, part: Any, where: str) -> str:
        key = f"shared {json.dumps(part, sort_keys=True)}"
        return self._known.get(key) or self._known.setdefault(key, right(self, schema, part, where))

    return value


@catches(
    "a reference means the definition of the first tool that has one of its name",
    "mlxspec.parsers.call_grammar:_Writer.value",
    _by_text,
)
@pytest.mark.parametrize("style", ["xml", "gemma4"])
def test_a_reference_means_its_own_tools_definition(style: str) -> None:
    kinds = {"f": "boolean", "g": "null"}
    tools = [
        tool(
            {
                "type": "object",
                "properties": {
                    "a": {"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1, "maxItems": 2}
                },
                "required": ["a"],
                "$defs": {
                    "x": {"anyOf": [{"type": kind}, {"type": "array", "items": {"$ref": "#/$defs/x"}}]}
                },
            },
            name=name,
        )
        for name, kind in kinds.items()
    ]
    form = ChatFormat(tools=style)  # type: ignore[arg-type]
    tags = form.call_tags
    assert tags is not None
    special = {t: i for t, i in maker()[2].items() if t in (tags.open, tags.close, tags.mark)}
    lark, seen = calls_grammar(form, tools, tokens=special, several=False), set()

    def leaves(value: Any) -> list[Any]:
        return [leaf for v in value for leaf in leaves(v)] if isinstance(value, list) else [value]

    for seed in range(16):
        text = walk(style, lark, seed)
        ((name, arguments),) = read(style, text, *tools)
        seen.add(name)
        for leaf in leaves(json.loads(arguments)["a"]):
            assert (leaf is None) == (kinds[name] == "null"), text
    assert seen == {"f", "g"}


@catches(
    "a mark that is text may stand in a string",
    "mlxspec.parsers.call_grammar:_GemmaWriter._inside",
    lambda right: lambda self, shape: self.rule(" & ".join(call_grammar._terms(shape)), self._mark),
    case="gemma4",
    errors=(ValueError,),  # no call is read
)
@pytest.mark.parametrize("style", ["gemma4", "function-gemma"])
def test_a_string_holds_its_schema_where_the_mark_is_no_special_token(style: str) -> None:
    part = {"type": "string", "minLength": 5, "pattern": "^[^a]*$"}
    schema = {"type": "object", "properties": {"s": part}, "required": ["s"], "additionalProperties": False}
    lark = calls_grammar(ChatFormat(tools=style), [tool(schema)], tokens={}, several=False)  # type: ignore[arg-type]
    mark = '<|"|>' if style == "gemma4" else "<escape>"
    for seed in range(40):
        ((_, arguments),) = read(style, walk(style, lark, seed, mark=mark), tool(schema))
        found = json.loads(arguments)["s"]
        assert len(found) >= 5, arguments
        assert "a" not in found
