"""What the package uses of others that is not public: each use is named here, with what keeps it from breaking. A library is bounded below
its next minor version; of Python's own modules each use is tried on every version that the tests run on."""

from __future__ import annotations

import argparse
import ast
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import mlx_lm.models
import pytest
from planting import catches
from uvicorn.protocols.http import h11_impl

import mlxspec

PACKAGE = Path(mlxspec.__file__).parent
PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# By name, the files that use it.
ARGPARSE = {
    "_actions": {"cli/completion.py", "cli/launch.py", "cli/options.py", "cli/parser.py", "cli/settings.py"},
    "_ActionsContainer": {"cli/parser.py"},
    "_AppendAction": {"cli/settings.py"},
}
# Public by the language's reference, though they begin with an underscore.
TUPLES = {"_asdict", "_fields", "_field_defaults", "_replace", "_make"}
BOUNDED = ("mlx-lm", "uvicorn")


def names(tree: ast.AST) -> set[str]:
    """The names that a file gives to anything of its own."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_uses(files: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(name, file) of what files take from others. files: their texts by name."""
    trees = {file: ast.parse(text) for file, text in files.items()}
    own = set[str]().union(*map(names, trees.values()))
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("mlxspec"):
                parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                yield from ((part, file) for part in parts if is_private(part))
            elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
                yield node.attr, file


def test_each_private_use_is_named() -> None:
    texts = {str(p.relative_to(PACKAGE)): p.read_text(encoding="utf-8") for p in PACKAGE.rglob("*.py")}
    found: dict[str, set[str]] = {}
    for name, file in private_uses(texts):
        if name not in TUPLES:
            found.setdefault(name, set()).add(file)
    assert found == ARGPARSE


def test_a_private_use_is_seen() -> None:
    text = "from a import _b\nfrom _c.d import e\nf._g()\nself._own = 1\nself._own\n"
    assert {name for name, _ in private_uses({"x.py": text})} == {"_b", "_c", "_g"}


def test_argparse_has_what_is_used() -> None:
    parser = argparse.ArgumentParser()
    action = parser.add_argument("-a", "--all", action="append")
    assert action in parser._actions
    assert isinstance(action, argparse._AppendAction)
    assert isinstance(parser, argparse._ActionsContainer)


@pytest.mark.parametrize("library", BOUNDED)
def test_a_library_is_bounded_below_its_next_minor_version(library: str) -> None:
    (line,) = (line for line in PROJECT["dependencies"] if re.match(rf"{library}\b[^-]", line))
    major, minor = map(int, version(library).split(".")[:2])
    assert line.endswith(f",<{major}.{minor + 1}"), line


def test_uvicorn_has_the_protocol_that_connections_derive_from() -> None:
    """server/http/connections.py: a module without a page in uvicorn's docs."""
    made = h11_impl.H11Protocol
    needed = {"data_received", "connection_made", "connection_lost", "pause_writing", "resume_writing"}
    assert needed | {"on_response_complete"} <= set(dir(made))
    assert {"cycle", "client", "loop", "transport", "app_state"} <= set(made.__init__.__code__.co_names)


@catches(
    "mlx-lm's files are not found by their text",
    "mlxspec.models.adapted.classes:_CODE",
    lambda right: right / "elsewhere",
)
def test_mlx_lm_has_a_file_for_each_kind() -> None:
    """models/adapted/classes.py reads their texts, and takes two names out of their modules."""
    from mlxspec.models.adapted.classes import classes_of, has_code

    kinds = ("llama", "mistral", "phi3", "gpt_oss")
    assert Path(mlx_lm.models.__path__[0]).is_dir()
    for kind in kinds:
        assert has_code({"model_type": kind})
        model, args = classes_of({"model_type": kind})
        assert (model.__name__, args.__name__) == ("Model", "ModelArgs")
