"""Edits and short copies: what is asked for is exactly what the answer holds."""

from __future__ import annotations

import ast
import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training.demo import copies, edits
from training.demo.chat import ask
from training.demo.corpus import functions, read_library

FOUND = functions(read_library(Path(json.__file__).parent))
POOL = ["total", "value", "index", "parts", "name", "left", "count"]
KINDS = ["rename", "rename_function", "literal", "docstring"]


def _names(tree: ast.AST) -> list[str]:
    found = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)]
    return found + [n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_edit_changes_exactly_what_was_asked(kind: str) -> None:
    rnd = random.Random(1)
    offered = 0
    for function in FOUND:
        edit = edits.random_edit(kind, function.source, POOL, rnd)
        if edit is None:
            continue
        offered += 1
        before, after = ast.parse(function.source), ast.parse(edit.code)
        assert ast.dump(before) != ast.dump(after)
        if kind == "rename":
            assert edit.old not in _names(after)
            assert [edit.new if n == edit.old else n for n in _names(before)] == _names(after)
        elif kind == "rename_function":
            assert (before.body[0].name, after.body[0].name) == (edit.old, edit.new)
            assert edit.code.replace(edit.new, edit.old, 1) == function.source
        elif kind == "literal":
            values = [[n.value for n in ast.walk(t) if isinstance(n, ast.Constant)] for t in (before, after)]
            assert sum(a != b for a, b in zip(*values, strict=True)) == 1
        else:
            assert ast.get_docstring(before.body[0])
            assert not ast.get_docstring(after.body[0])
            assert len(after.body[0].body) == len(before.body[0].body) - 1
    assert offered >= 3


def test_no_edit_takes_a_name_in_use_or_a_reserved_one() -> None:
    source = "def f(total, value):\n    total = total + value\n    return total\n"
    for seed in range(30):
        edit = edits.rename_variable(source, ["value", "class", "len"], random.Random(seed))
        assert edit is None or edit.new not in ("value", "class", "len")


def test_code_that_offers_nothing_gives_nothing() -> None:
    source = "def f():\n    pass\n    pass\n"
    rnd = random.Random(0)
    assert edits.rename_variable(source, POOL, rnd) is None
    assert edits.change_literal(source, POOL, rnd) is None
    assert edits.remove_docstring(source) is None


def test_a_name_that_also_stands_in_a_string_is_left_alone() -> None:
    source = 'def f(total):\n    total = total + 1\n    return "total"\n'
    assert edits.rename_variable(source, POOL, random.Random(0)) is None


def test_several_turns_edit_the_code_of_the_turn_before() -> None:
    rnd = random.Random(2)
    chats = [c for c in (edits.several_turns(f, POOL, rnd) for f in FOUND for _ in range(4)) if c]
    assert chats
    for chat in chats:
        roles = re.findall(r"<\|im_start\|>(\w+)\n", chat)
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert len(roles) >= 4


@given(st.integers(0, 10**9))
@settings(deadline=None, max_examples=60)
def test_a_short_rename_replaces_every_occurrence(seed: int) -> None:
    words = ["alpha", "beta", "gamma_ray", "x1", "done"]
    text = copies.short_rename(words, random.Random(seed))
    answer = text.split("<|im_start|>assistant\n")[1]
    renamed = re.search(r"`?(\w+)`? (?:to|by|instead|for)\b", text) or re.search(r"call (\w+) ", text)
    assert renamed
    assert answer.strip().endswith("<|im_end|>")


@given(st.integers(0, 10**9))
@settings(deadline=None, max_examples=60)
def test_a_short_copy_repeats_its_prompt(seed: int) -> None:
    text = copies.short_copy(["alpha", "beta"], ["def f(a):\n    return a\n"], random.Random(seed))
    user, answer = text.split("<|im_end|>\n<|im_start|>assistant\n")
    assert user.endswith(answer.removesuffix("<|im_end|>\n"))


def test_the_same_seed_gives_the_same_conversations() -> None:
    made = [[edits.edit_chat("rename", f, POOL, random.Random(5)) for f in FOUND[:20]] for _ in range(2)]
    assert made[0] == made[1]
    assert ask("a", "b") == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
