"""Edits of one function of a whole pasted file: files are runs of whole statements, and answers are what the requests say."""

from __future__ import annotations

import ast
import random

import pytest
from demo_data import long_edits
from demo_data.chat import fenced
from demo_data.corpus import SourceFile
from hypothesis import given
from hypothesis import strategies as st

_FUNCTION = '''def {name}(first, second={number}):
    """Add both, and multiply."""
    total = first + second
    total = total * 7
    return total
'''


def _file(names: list[str]) -> SourceFile:
    parts = [
        "import os\n",
        *(_FUNCTION.format(name=n, number=i + 10) for i, n in enumerate(names)),
        "LAST = 1\n",
    ]
    return SourceFile(path="a.py", text="\n\n".join(parts), sha256="", held=False, is_test=False)


def _words(text: str) -> int:
    return len(text.split())


def _whole(names: list[str], seed: int) -> long_edits.PastedFile | None:
    file = _file(names)
    return long_edits.file_of(long_edits.statements(file, _words), _words(file.text), random.Random(seed))


NAMES = ["join", "split", "find", "count", "merge", "spread"]


def test_statements_are_the_file() -> None:
    file = _file(NAMES)
    pieces = long_edits.statements(file, _words)
    assert "".join(p.text for p in pieces).strip() == file.text.strip()
    assert [p.name for p in pieces if p.function] == NAMES
    assert all(p.tokens == _words(p.text) for p in pieces)


def test_a_file_that_does_not_parse_has_none() -> None:
    broken = SourceFile(path="b.py", text="def f(:\n", sha256="", held=False, is_test=False)
    assert long_edits.statements(broken, _words) == []


@given(st.integers(0, 10_000), st.integers(20, 140))
def test_a_pasted_file_is_a_run_of_the_size_that_was_asked_for(seed: int, size: int) -> None:
    file = _file(NAMES)
    made = long_edits.file_of(long_edits.statements(file, _words), size, random.Random(seed))
    if made is None:
        return
    assert made.code in file.text
    assert 0.75 * size <= _words(made.code) <= size
    assert made.chosen
    ast.parse(made.code)


def test_a_name_that_two_functions_have_is_not_asked_for() -> None:
    made = _whole(["join", "join", "find"], 1)
    assert made is not None
    assert [p.name for p in made.chosen] == ["find"]


@pytest.mark.parametrize("kind", long_edits.KINDS)
@pytest.mark.parametrize("forms", [long_edits.FORMS, long_edits.HELD_OUT_FORMS], ids=["known", "held out"])
def test_an_answer_is_the_named_function_edited(kind: str, forms: dict[str, list[str]]) -> None:
    made = _whole(NAMES, 2)
    assert made is not None
    for seed in range(20):
        got = long_edits.turn(kind, made, ["value", "index", "left", "other"], random.Random(seed), forms)
        if got is None:
            continue
        one = next(p for p in made.chosen if p.name in got.request)
        assert got.place == made.code.index(one.function) / len(made.code)
        assert got.question(made) == f"{fenced(made.code)}\n{got.request}"
        assert got.question(None) == got.request
        function = ast.parse(got.answer.removeprefix("```python\n").removesuffix("\n```")).body[0]
        assert isinstance(function, ast.FunctionDef)
        assert (function.name == one.name) == (kind != "rename_function")
        assert (ast.get_docstring(function) is None) == (kind == "docstring")
        assert (got.answer == fenced(one.function)) == (kind == "copy")
        return
    pytest.fail("no edit was offered")


def test_held_out_wordings_are_not_in_training() -> None:
    for kind, forms in long_edits.HELD_OUT_FORMS.items():
        assert not set(forms) & set(long_edits.FORMS[kind])
