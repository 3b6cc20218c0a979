"""Literals of a request that spell a chat tag are text: the tag's token is neither needed to write them nor ends the answer.

Every end token of the vocabulary and the other control tokens stand in an enum, a const, a member's name and a choice, as an answer's
schema and as a tool's parameters in each notation.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_call_grammars import STYLES, grammar_of, maker, read, tool

from mlxspec.config import SamplingParams
from mlxspec.parsers.formats import ChatFormat

TAGS = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")


def writes(params: SamplingParams, ids: list[int]) -> bool:
    """Whether the grammar takes these tokens and may end behind them."""
    constraints, _, _ = maker()
    grammar = constraints.compile(params).grammar
    assert grammar is not None
    grammar = grammar.copy(constraints.clock)
    if grammar.validate(ids) != len(ids) or not all(map(grammar.consume, ids)):
        return False
    if grammar.is_finished:
        return True
    mask = grammar.mask()
    return any(mask[i // 32] >> (i % 32) & 1 for i in constraints.vocabulary.eos_ids)


def known_tags() -> list[str]:
    _, tokenizer, _ = maker()
    known = {tokenizer.token_text(i) for i in tokenizer.added_tokens()}
    return [tag for tag in TAGS if tag in known]


def test_the_vocabulary_has_tags_to_spell() -> None:
    assert "<|im_end|>" in known_tags()


@pytest.mark.parametrize("around", ["{}", "{}x", "a{}b", "x{}"])
def test_answers_spell_tags_as_text(around: str) -> None:
    _, tokenizer, _ = maker()
    for tag in known_tags():
        text = around.format(tag)
        forms: list[tuple[dict[str, Any], str]] = [
            ({"json_schema": {"type": "string", "enum": [text]}}, json.dumps(text)),
            ({"json_schema": {"const": text}}, json.dumps(text)),
            (
                {
                    "json_schema": {
                        "type": "object", "properties": {text: {"const": 1}}, "required": [text], "additionalProperties": False,
                    }
                },
                json.dumps({text: 1}),
            ),
            ({"lark": f"start: {json.dumps(text)}"}, text),
        ]  # fmt: skip
        for params, wanted in forms:
            assert writes(SamplingParams(**params), tokenizer.encode_plain(wanted)), (params, wanted)
            assert not writes(SamplingParams(**params), tokenizer.encode(wanted, special=False)), params


@pytest.mark.parametrize("style", STYLES)
def test_calls_spell_tags_as_text(style: str) -> None:
    _, tokenizer, ids = maker()
    tags = ChatFormat(tools=style).call_tags  # type: ignore[arg-type]
    assert tags is not None
    for tag in known_tags():
        for value in (tag, f"a{tag}b"):
            schema = {"type": "object", "properties": {"v": {"enum": [value]}}, "required": ["v"]}
            inner = {
                "json": '\n{"name": "f", "arguments": ' + json.dumps({"v": value}) + "}\n",
                "xml": f"\n<function=f>\n<parameter=v>\n{value}\n</parameter>\n</function>\n",
            }.get(style, f"call:f{{v:{tags.mark}{value}{tags.mark}}}")
            text = tags.open + inner + tags.close
            assert writes(SamplingParams(lark=grammar_of(style, schema)), spelled(text, tokenizer, ids, tags))
            assert read(style, text, tool(schema)) == [("f", json.dumps({"v": value}))]


def spelled(text: str, tokenizer: Any, ids: dict[str, int], tags: Any) -> list[int]:
    """Ids of a text, in which only the notation's own tags are special tokens."""
    for tag in (tags.open, tags.close, tags.mark):
        if tag in ids and tag in text:
            before, _, after = text.partition(tag)
            return [
                *spelled(before, tokenizer, ids, tags), ids[tag], *spelled(after, tokenizer, ids, tags)
            ]  # fmt: skip
    return list(tokenizer.encode_plain(text)) if text else []
