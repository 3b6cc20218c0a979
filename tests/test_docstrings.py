"""A docstring's first line has a subject. The list of rooms that still have docstrings without one may only shrink."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "mlxspec"
NO_SUBJECTS = {"Of", "By", "Those", "What", "As", "Where", "Behind"}
LEFT = {
    "models": 74, "server": 41, "checkpoints": 36, "cli": 36, "loading": 35, "policy": 19, "kernels": 17, "drafters": 16, "platform": 14,
    "cache": 12, "parsers": 11, "images": 8, "bench": 6, "compat": 4, "errors.py": 2, "config.py": 1, "demo": 1, "events.py": 1,
}  # fmt: skip


def without_subject(source: str) -> int:
    """How many docstrings of a file begin with a word that is no subject."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(n) for n in ast.walk(ast.parse(source)) if isinstance(n, kinds))
    return sum(bool(text) and text.split()[0] in NO_SUBJECTS for text in found)


def test_docstrings_have_a_subject() -> None:
    found: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        found[path.relative_to(PACKAGE).parts[0]] += without_subject(path.read_text(encoding="utf-8"))
    assert {room: num for room, num in found.items() if num > LEFT.get(room, 0)} == {}


def test_a_docstring_without_a_subject_is_found() -> None:
    assert without_subject('"""Of a row."""\ndef f():\n    """What it takes."""\n') == 2
    assert without_subject('"""The rows."""\nclass A:\n    """Keeps what it is given."""\n') == 0
