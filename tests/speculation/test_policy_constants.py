"""Numbers of the policy: those that it is tuned by are in one table, and no others decide anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from mlxspec.policy.constants import Constants

POLICY = Path(__file__).resolve().parents[2] / "mlxspec" / "policy"
PLAIN = {0, 1, -1, 2, 0.5}  # nothing, one, twice, half
# widths, lengths and edges of cells, and what only names a file
GRIDS = {
    "MAX_TOKENS",
    "KNOTS",
    "DEPTHS",
    "MODEL_DEPTH",
    "CONTEXTS",
    "SHARED_DEPTHS",
    "CONFIDENCES",
    "STREAKS",
}
GRIDS |= {"WIDTHS", "_MIDDLES", "_DEPTHS", "_FORMAT", "_DIGITS"}
# how long and how often calibration measures, and what it guesses until something is measured
MEASURING = {
    "READY",
    "SHARE",
    "_PATIENT",
    "_FOR_ROUNDS",
    "_MOST",
    "_PLAIN",
    "_DRAFTS",
    "_FOUR",
    "_QUARTERS",
    "_QUEUE",
    "_LEAST",
    "_ORDER",
}
GUESSES = {"LIKELY", "_QUEUED", "_PAUSE", "_ROW"}


def numbers(source: str, allowed: set[str]) -> Iterator[str]:
    """Numbers in a module that are neither PLAIN nor the value of an allowed name."""
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if all(isinstance(t, ast.Name) and t.id in allowed for t in targets):
                continue
        for inner in ast.walk(node):
            if (
                isinstance(inner, ast.Constant)
                and type(inner.value) in (int, float)
                and inner.value not in PLAIN
            ):
                yield f"{inner.lineno}: {inner.value}"


@pytest.mark.parametrize("path", sorted(POLICY.glob("*.py")), ids=lambda p: p.stem)
def test_no_number_decides_that_is_in_no_table(path: Path) -> None:
    if path.stem != "constants":
        assert not list(numbers(path.read_text(encoding="utf-8"), GRIDS | MEASURING | GUESSES))


def test_numbers_are_found() -> None:
    assert list(numbers("LIMIT = 7", set())) == ["1: 7"]
    assert list(numbers("def f(x):\n    return 0.3 * x", {"LIMIT"})) == ["2: 0.3"]
    assert not list(numbers("LIMIT = (7, 9)\ny = 2 * x", {"LIMIT"}))


def test_there_are_at_most_twenty() -> None:
    assert len(fields(Constants)) <= 20
