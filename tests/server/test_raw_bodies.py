"""Bodies of requests are read as typed objects: few functions still look a key up in a raw mapping, of whose values no type is known.

What is counted: `x["key"]`, `x.get("key")` and `x.pop("key")` in a function of the server that takes `x` as `Mapping[str, Any]` or
`dict[str, Any]`. Scopes of ASGI are such mappings too, and no bodies.
"""

from __future__ import annotations

import ast
from pathlib import Path

import mlxspec

SERVER = Path(mlxspec.__file__).parent / "server"
RAW = ("Mapping[str, Any]", "Mapping[str, object]", "dict[str, Any]")
MOST = 20


def raw_accesses(source: str) -> list[str]:
    """Return the accesses of a file, as written."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        given = [*function.args.args, *function.args.kwonlyargs]
        names = {
            a.arg for a in given if a.annotation and any(raw in ast.unparse(a.annotation) for raw in RAW)
        } - {"scope"}
        for node in ast.walk(function):
            of = None
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
                of = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of = node.func.value if node.func.attr in ("get", "pop") else None
            if isinstance(of, ast.Name) and of.id in names:
                found.append(f"{function.name}: {ast.unparse(node)}")
    return found


def test_few_functions_look_into_raw_bodies() -> None:
    found = [each for path in sorted(SERVER.rglob("*.py")) for each in raw_accesses(path.read_text("utf-8"))]
    assert len(found) <= MOST, found


def test_an_access_is_found() -> None:
    source = """
def read(body: Mapping[str, Any], form: Form, *, more: dict[str, Any] | None) -> None:
    body["a"], body.get("b"), more.pop("c"), form["d"], form.get("e")
    body["f"] = 1
"""
    assert raw_accesses(source) == ["read: body['a']", "read: body.get('b')", "read: more.pop('c')"]
