"""Grammars of tool calls against parsers of tool calls: whatever a grammar lets a model write is read as arguments that follow the schema.

A walk takes random tokens that the grammar allows, to its end. Our own parser reads the text, and the independent jsonschema package
checks the arguments.
"""

from __future__ import annotations

import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker
from planting import catches
from schemas_as_sent import SCHEMAS

import mlxspec.demo
from mlxspec.config import SamplingParams
from mlxspec.errors import GrammarError
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.parsers.call_grammar import calls_grammar
from mlxspec.parsers.formats import ChatFormat
from mlxspec.parsers.pieces import CallArguments, CallStart, Content
from mlxspec.parsers.schema import Schema
from mlxspec.sampling import bits
from mlxspec.sampling.constraints import ConstraintMaker

STYLES = ("json", "xml", "gemma4", "function-gemma")
TAGS = ("<|tool_call>", "<tool_call|>", '<|"|>', "<tool_call>", "</tool_call>")
VOCABULARY = 2048
_CHECKER = FormatChecker(("date", "ipv4", "ipv6", "uuid", "email"))


@cache
def maker() -> tuple[ConstraintMaker, Tokenizer, dict[str, int]]:
    """The demo's vocabulary with tags as special tokens, as Qwen3.5 and Gemma 4 have them. FunctionGemma's are text here."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="mlxspec-tests-")) / "model"
    shutil.copytree(mlxspec.demo.TARGET, folder)
    path = folder / "tokenizer.json"
    told = json.loads(path.read_text())
    known = {t["content"]: t["id"] for t in told["added_tokens"]}
    options = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    new = [tag for tag in TAGS if tag not in known]
    told["added_tokens"] += [{"id": VOCABULARY + i, "content": tag, **options} for i, tag in enumerate(new)]
    path.write_text(json.dumps(told))
    tokenizer = Tokenizer.from_folder(folder)
    shutil.rmtree(folder.parent)
    ids = {tag: known.get(tag, VOCABULARY + new.index(tag) if tag in new else 0) for tag in TAGS}
    return ConstraintMaker(tokenizer, VOCABULARY + len(new)), tokenizer, ids


def tool(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, **more}}


def grammar_of(style: str, schema: Any, **more: Any) -> str:
    form = ChatFormat(tools=style)  # type: ignore[arg-type]
    tags = form.call_tags
    special = {
        t: i for t, i in maker()[2].items() if tags is not None and t in (tags.open, tags.close, tags.mark)
    }
    return calls_grammar(form, [tool(schema)], tokens=special, several=False, **more)


def walk(style: str, lark: str, seed: int, most: int = 1500, mark: str = "") -> str:
    """A text of the grammar. What ends a value is tried often, so that texts end. mark: such an end, where it is no special token."""
    constraints = maker()[0]
    grammar = constraints.compile(SamplingParams(lark=lark)).grammar
    assert grammar is not None
    grammar = grammar.copy(grammar._clock)
    tokens = _walked(grammar, f"{lark} {seed}", most, mark)
    return b"".join(_spelled(t) for t in tokens).decode()


def _spelled(token: int) -> bytes:
    constraints, _, ids = maker()
    special = {i: tag for tag, i in ids.items()}
    return special[token].encode() if token in special else constraints.vocabulary.tokens[token]


def _walked(grammar: Any, seed: str, most: int, mark: str = "") -> list[int]:
    """Tokens up to the end of the grammar's text."""
    constraints, tokenizer, ids = maker()
    size, rng, found = len(constraints.vocabulary.tokens), random.Random(seed), list[int]()
    ends = [
        tokenizer.encode(end, special=False)
        for end in ("\n</parameter>\n", "<escape>", '"', "}", "]", "@a.bc")
    ]
    ends.append([ids['<|"|>']])
    ends += [tokenizer.encode_plain(mark)] * 4 if mark else []
    for _ in range(most):
        mask = grammar.mask()
        allowed = [i for i in range(size) if mask[i // 32] >> (i % 32) & 1]
        if grammar.is_finished or any(i in constraints.vocabulary.eos_ids for i in allowed):
            return found
        end = rng.choice(ends)
        tokens = end if rng.random() < 0.5 and grammar.validate(end) == len(end) else [rng.choice(allowed)]
        for token in tokens:
            if not bits.holds(grammar.mask(), token):
                break  # of a forced text one way to cut it into tokens is allowed
            assert grammar.consume(token)
            found.append(token)
    raise AssertionError(f"no end: {found[-40:]}")


def free_answer(style: str, schema: Any, seed: int) -> str:
    """An answer that calls the tool twice because it wants to: text, a tag, and from there what the constraints allow."""
    constraints, tokenizer, ids = maker()
    tags = ChatFormat(tools=style).call_tags  # type: ignore[arg-type]
    assert tags is not None
    space = " " if tags.open in ids else "\n\n"  # a special token may stand within a line
    lark = grammar_of(style, schema, is_opened=True)
    answer = constraints.constraints_for(SamplingParams(lark=lark, lark_at=tags.open), [1])
    assert answer is not None
    tokens = list[int]()

    def say(new: list[int]) -> None:
        for token in new:
            assert answer.push(token)
            tokens.append(token)

    for place in range(2):
        say(tokenizer.encode(f"Now <{place}>: `{tags.open}`.{space}", special=False))
        assert answer.is_waiting
        assert answer.masks(()) == [None]
        say(tokenizer.encode(tags.open, special=False))
        assert not answer.is_waiting
        grammar = answer._state.grammar
        assert grammar is not None
        call = _walked(grammar.copy(), f"{lark} {seed} {place}", 1500)
        *inside, behind = answer.masks(call)
        assert all(m is not None and bits.holds(m, t) for m, t in zip(inside, call, strict=True))
        assert behind is None, "a draft that ends the call goes on freely"
        say(call)
        assert answer.is_waiting
    return b"".join(map(_spelled, tokens)).decode()


def read(style: str, text: str, *tools: dict[str, Any], cut: bool = False) -> list[tuple[str, str]]:
    """(name, arguments) of each call, by our own parser; the text comes in pieces of three characters."""
    whole, pieces = [], ChatFormat(tools=style).parser("", tools)  # type: ignore[arg-type]
    parts = [text[i : i + 3] for i in range(0, len(text), 3)]
    found = [piece for part in parts for piece in pieces.push(part)] + pieces.finish(cut=cut)
    for piece in found:
        if isinstance(piece, CallStart):
            whole.append([piece.name, ""])
        elif isinstance(piece, CallArguments):
            whole[-1][1] += piece.text
    return [(name, arguments) for name, arguments in whole]


def check_walks(style: str, name: str, seeds: range) -> None:
    lark = grammar_of(style, SCHEMAS[name])
    for seed in seeds:
        text = walk(style, lark, seed)
        check_calls(read(style, text, tool(SCHEMAS[name])), name, text, 1)


def check_free_walks(style: str, name: str, seeds: range) -> None:
    for seed in seeds:
        text = free_answer(style, SCHEMAS[name], seed)
        check_calls(read(style, text, tool(SCHEMAS[name])), name, text, 2)
        form = ChatFormat(tools=style)  # type: ignore[arg-type]
        parser = form.parser("", [tool(SCHEMAS[name])])
        pieces = [*parser.push(text), *parser.finish()]
        said = "".join(p.text for p in pieces if isinstance(p, Content))
        tag = form.call_tags.open if form.call_tags else ""
        assert "".join(said.split()) == f"Now<0>:`{tag}`.Now<1>:`{tag}`.", text


def check_calls(calls: list[tuple[str, str]], name: str, text: str, num: int) -> None:
    validator = Draft202012Validator(_as_2020(SCHEMAS[name]), format_checker=_CHECKER)
    assert [c for c, _ in calls] == ["f"] * num, text
    for _, given in calls:
        arguments = json.loads(given, parse_constant=pytest.fail)
        assert isinstance(arguments, dict), text
        errors = [e.message for e in validator.iter_errors(arguments)]
        assert not errors, f"{errors} in {arguments!r} of {text!r}"


def _as_2020(schema: Any) -> Any:
    """Older spellings in those of the validator's dialect."""
    if isinstance(schema, list):
        return [_as_2020(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    out = {k: _as_2020(v) for k, v in schema.items() if not (k == "$schema" and isinstance(v, str))}
    if isinstance(out.get("items"), list):
        out["prefixItems"] = out.pop("items")
        if "additionalItems" in out:
            out["items"] = out.pop("additionalItems")
    if out.get("exclusiveMinimum") is True:
        out["exclusiveMinimum"] = out.pop("minimum")
    return out


@catches(
    "rules of bare texts are not written",
    "mlxspec.parsers.call_grammar:_terms",
    lambda right: lambda shape: ["/(?s:.*)/"],
    case="pattern of a file's name-xml",
)
@pytest.mark.parametrize(("name", "style"), [(name, STYLES[i % 4]) for i, name in enumerate(SCHEMAS)])
def test_a_walk_of_the_grammar_follows_the_schema(style: str, name: str) -> None:
    check_walks(style, name, range(1))


@pytest.mark.parametrize(("name", "style"), [(name, STYLES[i % 4]) for i, name in enumerate(SCHEMAS)])
def test_a_call_that_nobody_required_follows_the_schema(style: str, name: str) -> None:
    check_free_walks(style, name, range(1))


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", SCHEMAS)
def test_seven_answers_with_calls_that_nobody_required_follow_the_schema(style: str, name: str) -> None:
    check_free_walks(style, name, range(1, 8))


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", SCHEMAS)
def test_ten_walks_of_the_grammar_follow_the_schema(style: str, name: str) -> None:
    check_walks(style, name, range(1, 11))


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {"not": {"type": "null"}}}}, "properties.a.not"),
        ({"type": "string", "pattern": "^(?!\\.)[a-z]+$"}, "pattern"),
        ({"type": "string", "pattern": "\\bword\\b"}, "pattern"),
        ({"if": {}, "then": {"required": ["a"]}}, "if"),
        ({"contains": {"type": "null"}}, "contains"),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "oneOf"),
        ({"properties": {"a": {}}, "minProperties": 1}, "minProperties"),
        ({"propertyNames": {"minLength": 2}}, "propertyNames"),
        ({"properties": {"a": {"$ref": "https://example.org/schema"}}}, "properties.a.$ref"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"$defs": {"d": {"not": {}}}, "$ref": "#/$defs/d"}, "$defs.d.not"),
    ],
)
def test_what_a_grammar_cannot_hold_is_named(schema: Any, place: str) -> None:
    assert [found.place for found in Schema(schema).left_out][:1] == [place]


@pytest.mark.parametrize(
    "schema",
    [
        {"format": "path"},
        {"uniqueItems": False},
        {"propertyNames": {"type": "string"}},
        {"additionalProperties": True, "title": "x", "x-order": 1},
        {"then": {"required": ["a"]}},
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        {"oneOf": [{"type": "object", "properties": {"k": {"const": c}}, "required": ["k"]} for c in "ab"]},
        {"pattern": ".*"},
        {"required": ["a"], "minProperties": 1},
    ],
)
def test_keywords_that_change_nothing_are_dropped_without_a_word(schema: Any) -> None:
    assert Schema(schema).left_out == []


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a": {"type": "strin"}}}, "properties.a.type"),
        ({"properties": {"a": 5}}, "properties.a"),
        ({"$ref": "#/$defs/gone"}, "#/$defs/gone"),
        ({"$ref": "#gone"}, "#gone"),
        ({"enum": "a"}, "enum"),
        ({"minLength": "3"}, "minLength"),
        ({"maximum": float("inf")}, "maximum"),
    ],
)
def test_what_is_no_schema_is_refused_with_its_place(schema: Any, said: str) -> None:
    with pytest.raises(GrammarError, match=said.replace("$", "\\$").replace(".", "\\.")):
        Schema(schema)


def test_schemas_without_end_are_refused() -> None:
    deep: Any = {"type": "integer"}
    for _ in range(5000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(GrammarError, match="nested too deeply"):
        Schema(deep)
    with pytest.raises(GrammarError, match="without end"):
        Schema({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}).shapes()


def test_a_recursive_schema_that_is_joined_with_itself_has_an_end() -> None:
    tree = {
        "type": "object",
        "properties": {"leaf": {"type": "boolean"}, "next": {"$ref": "#/$defs/Tree"}},
        "required": ["leaf"],
    }
    twice = {
        "allOf": [
            {"$ref": "#/$defs/Tree"},
            {"type": "object", "properties": {"next": {"$ref": "#/$defs/Tree"}}},
        ]
    }
    schema = {
        "type": "object",
        "properties": {"v": twice},
        "required": ["v"],
        "$defs": {"Tree": {"allOf": [tree, {"properties": {"next": {"$ref": "#/$defs/Tree"}}}]}},
    }
    assert len(grammar_of("gemma4", schema).splitlines()) < 40


@pytest.mark.parametrize(
    ("schema", "text", "is_written"),
    [
        ({"type": "integer"}, "9" * 18, True),
        ({"type": "integer"}, "-" + "9" * 20, False),
        ({"type": ["integer", "null"]}, "9" * 20, False),
        ({"type": "integer", "minimum": 0}, "9" * 20, False),
        ({"type": "integer", "exclusiveMaximum": 5}, "-" + "9" * 20, False),
        ({"type": "integer", "enum": [5]}, "5", True),
        ({"type": ["integer", "number"]}, "9" * 20, True),
    ],
)
def test_an_integer_has_as_many_digits_as_64_bits_hold(schema: Any, text: str, is_written: bool) -> None:
    constraints, tokenizer, _ = maker()
    grammar = constraints.compile(SamplingParams(json_schema=Schema(schema).json())).grammar
    assert grammar is not None
    ids = tokenizer.encode_plain(text)
    assert (grammar.validate(ids) == len(ids)) == is_written


@pytest.mark.parametrize(
    ("prompt", "text", "is_held"),
    [
        ("<think>\n", "I may\n<tool_call>", False),
        ("<think>\n", "I may\n</think>\n\n<tool_call>", True),
        ("<think>\n", "x</think><tool_call>", True),
        ("", "<think>hm\n<tool_call>", False),
        ("", "<think>hm</think>\n<tool_call>", True),
        ("", "<tool_call>", True),
        ("", '<tool_call>\n{"name": "f", "arguments": {"v": "<think>"}}\n</tool_call>\n<tool_call>', True),
    ],
)
def test_calls_are_held_outside_thinking(prompt: str, text: str, is_held: bool) -> None:
    constraints, tokenizer, ids = maker()
    schema = {"type": "object", "properties": {"v": {"type": "string"}}, "required": ["v"]}
    given = SamplingParams(
        lark=grammar_of("json", schema, is_opened=True), lark_at="<tool_call>", thinking_budget=99
    )
    answer = constraints.constraints_for(given, tokenizer.encode(f"a{prompt}", special=False))
    assert answer is not None
    rest = text
    while rest:  # a forced text is cut into tokens as the mask says
        tag = next((t for t in ("<tool_call>", "</tool_call>") if rest.startswith(t)), None)
        token = ids[tag] if tag else next(t for t in tokenizer.encode(rest, special=False))
        forced = answer.forced()
        token = forced[0] if forced and tag is None else token
        assert answer.push(token)
        rest = rest[len(_spelled(token).decode()) :]
    assert (not answer.is_waiting) == is_held


def test_a_tool_whose_schema_cannot_be_used_may_have_any_arguments() -> None:
    loose: dict[str, str] = {}
    good, bad = tool({"type": "object"}), tool({"$ref": "#/gone"})
    bad["function"]["name"] = "g"
    form = ChatFormat(tools="json")
    given: Any = {"tokens": {}, "several": False}
    assert '"g' in calls_grammar(form, [good, bad], is_opened=True, loose=loose, **given).replace("\\", "")
    assert loose.keys() == {"g"}
    assert "#/gone" in loose["g"]
    with pytest.raises(GrammarError, match="#/gone"):
        calls_grammar(form, [good, bad], **given)
