"""What docstrings begin with (docs/contributing.md, Language): a function's says what it does, and no docstring is a fragment.

Whether a sentence is understood no test can tell. These two faults are the ones that a list of words finds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parent.parent / "mlxspec"
MOST_FRAGMENTS = 20
VERBS = frozenset(
    """
    abort accept add advance allow answer append apply ask assemble assign attach become begin bring build call cancel cast change check
    choose clear close commit compare compile complete compute continue convert copy count create cut decide delete destroy discard do
    download draft draw drop end evaluate fetch fill find follow forget free give go hand have hide hold import index initialize join judge
    keep know launch learn leave lend let limit load lock log look make mark move multiply note open order pause plan prepare print process
    put quantize queue raise read receive record refuse release remember remove replace reserve reset restore return run sample save scale
    schedule search select send set show skip sort split stage start stop store swap take teach tell time trim turn undo unload update use
    verify wait wake write yield
    """.split()
)
FRAGMENTS = frozenset(
    """
    after against as at before behind beside by for from how in inside into of on only since so than that those to under until up what when
    where which while who whose why with within without
    """.split()
)


class Documented(NamedTuple):
    """A docstring. place: where it stands. returns_nothing: a function's that returns None."""

    place: str
    first: str
    returns_nothing: bool


def documented(source: str, name: str = "") -> Iterator[Documented]:
    """Yield the docstrings of a file."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            own = getattr(node, "name", "")
            returned = ast.unparse(node.returns) if is_function and node.returns else "None"
            nothing = is_function and own != "__init__" and returned == "None"
            yield Documented(f"{name}:{own}", text.split()[0].rstrip(",;:").lower(), nothing)


def everywhere() -> Iterator[Documented]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield from documented(path.read_text(encoding="utf-8"), str(path.relative_to(PACKAGE)))


def test_a_function_that_returns_nothing_is_documented_by_what_it_does() -> None:
    assert [d for d in everywhere() if d.returns_nothing and d.first not in VERBS] == []


def test_few_docstrings_are_fragments() -> None:
    found = [d for d in everywhere() if d.first in FRAGMENTS]
    assert len(found) <= MOST_FRAGMENTS, found


def test_faults_are_found() -> None:
    source = '''
class A:
    """What is kept."""

    def forget(self) -> None:
        """It is gone."""

    def size(self) -> int:
        """Of a row."""

    async def run(self):
        """Run it."""
'''
    found = {d.place: d for d in documented(source)}
    assert [p for p, d in found.items() if d.returns_nothing and d.first not in VERBS] == [":forget"]
    assert [p for p, d in found.items() if d.first in FRAGMENTS] == [":A", ":size"]
