"""Edits of a pasted function: rename a variable or the function, change a literal, remove the docstring.

Knows syntax trees and request wording. Every edit is checked: the edited text must parse to exactly the tree the request
asks for, otherwise it is not offered. Also explaining and continuing a pasted function, which need no check.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import random
import re
from collections import Counter
from dataclasses import dataclass

from .chat import WORDINGS, ask, fenced, render
from .corpus import Function, first_sentence
from .questions import answer

FORMS: dict[str, list[str]] = WORDINGS["edits"]["requests"]
_RESERVED = set(keyword.kwlist) | set(dir(builtins)) | {"self", "cls"}


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One edit: what changes (`old` to `new`, both empty for the docstring) and the code after it."""

    kind: str
    old: str
    new: str
    code: str


def _word(name: str) -> str:
    return r"(?<![\w])" + re.escape(name) + r"(?![\w])"


def identifiers(functions: list[Function], *, at_least: int = 6) -> list[str]:
    """Names that occur often enough in `functions` to be plausible new names."""
    counts: Counter[str] = Counter()
    for function in functions:
        counts.update(set(re.findall(r"\b[a-z_][a-z0-9_]{0,13}\b", function.source)))
    return sorted(n for n, c in counts.items() if c >= at_least and n not in _RESERVED and n.strip("_"))


def new_name(pool: list[str], rnd: random.Random) -> str:
    """A plausible new identifier: from the pool, two of them joined, or one with a digit."""
    style = rnd.random()
    if style < 0.55:
        return rnd.choice(pool)
    if style < 0.85:
        return rnd.choice(pool).strip("_") + "_" + rnd.choice(pool).strip("_")
    return rnd.choice(pool) + str(rnd.randrange(10))


def _fits(new: str, source: str) -> bool:
    return new.isidentifier() and new not in _RESERVED and not re.search(_word(new), source)


class _Renamer(ast.NodeTransformer):
    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.new if node.id == self.old else node.id
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = self.new if node.arg == self.old else node.arg
        self.generic_visit(node)
        return node


def _same(code: str, tree: ast.AST) -> bool:
    try:
        return ast.dump(ast.parse(code)) == ast.dump(tree)
    except SyntaxError:
        return False


def rename_variable(source: str, pool: list[str], rnd: random.Random) -> Edit | None:
    """Rename a local name or argument that occurs at least twice, everywhere it stands."""
    tree = ast.parse(source)
    counts: Counter[str] = Counter()
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            counts[node.id] += 1
            if isinstance(node.ctx, ast.Store):
                bound.add(node.id)
        elif isinstance(node, ast.arg):
            counts[node.arg] += 1
            bound.add(node.arg)
    names = [n for n in sorted(bound) if counts[n] >= 2 and n not in _RESERVED and n != "_"]
    names = [n for n in names if len(re.findall(_word(n), source)) == counts[n]]
    if not names:
        return None
    old, new = rnd.choice(names), new_name(pool, rnd)
    code = re.sub(_word(old), new, source)
    if not _fits(new, source) or not _same(code, _Renamer(old, new).visit(tree)):
        return None
    return Edit(kind="rename", old=old, new=new, code=code)


def rename_function(source: str, pool: list[str], rnd: random.Random) -> Edit | None:
    """Rename the function itself where its name occurs exactly once."""
    tree = ast.parse(source)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    old, new = function.name, new_name(pool, rnd)
    if len(re.findall(_word(old), source)) != 1 or not _fits(new, source) or old.startswith("__"):
        return None
    function.name = new
    code = re.sub(_word(old), new, source)
    return Edit(kind="rename_function", old=old, new=new, code=code) if _same(code, tree) else None


def change_literal(source: str, pool: list[str], rnd: random.Random) -> Edit | None:
    """Replace a short number or string that occurs exactly once."""
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value) in (int, str) and len(str(node.value)) <= 16:
            text = ast.get_source_segment(source, node) or ""
            if text and str(node.value) and text == ast.unparse(node) and source.count(text) == 1:
                found.append((node, text))
    if not found:
        return None
    node, old = rnd.choice(found)
    value: object = rnd.randrange(1, 1000) if isinstance(node.value, int) else rnd.choice(pool)
    code = source.replace(old, repr(value))
    if value == node.value:
        return None
    node.value = value  # type: ignore[assignment]
    return Edit(kind="literal", old=old, new=repr(value), code=code) if _same(code, tree) else None


def remove_docstring(source: str) -> Edit | None:
    """Remove the docstring's lines, where a body remains."""
    tree = ast.parse(source)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    if not ast.get_docstring(function) or len(function.body) < 2:
        return None
    lines, first = source.split("\n"), function.body[0]
    rest = lines[first.end_lineno :]
    while rest and not rest[0].strip():
        rest = rest[1:]
    code = "\n".join(lines[: first.lineno - 1] + rest)
    function.body = function.body[1:]
    return Edit(kind="docstring", old="", new="", code=code) if _same(code, tree) else None


def random_edit(kind: str, source: str, pool: list[str], rnd: random.Random) -> Edit | None:
    """An edit of the kind asked for, or None where the code does not offer one."""
    if kind == "docstring":
        return remove_docstring(source)
    makers = {"rename": rename_variable, "rename_function": rename_function, "literal": change_literal}
    return makers[kind](source, pool, rnd)


def request(kind: str, old: str, new: str, code: str, rnd: random.Random) -> str:
    """The user's message: instruction and code in one of several layouts."""
    text = rnd.choice(FORMS[kind]).format(a=old, b=new)
    layout = rnd.choice(WORDINGS["edits"]["layouts"])
    if kind not in ("rename", "rename_function", "literal"):
        layout = layout.replace(" in:", ":")
    if text.endswith("?"):
        layout = layout.replace(":", "")
    return layout.format(t=text, c=fenced(code))


def edit_chat(kind: str, function: Function, pool: list[str], rnd: random.Random) -> str | None:
    """One conversation asking for an edit of `function`, or None."""
    edit = random_edit(kind, function.source, pool, rnd)
    if edit is None:
        return None
    return ask(request(kind, edit.old, edit.new, function.source, rnd), fenced(edit.code))


def signature(source: str) -> str:
    """The function's arguments as written in its header, `(...)` when long."""
    text = "(" + ast.unparse(ast.parse(source).body[0].args) + ")"  # type: ignore[attr-defined]
    return text if len(text) <= 80 else "(...)"


def explain_chat(function: Function, rnd: random.Random) -> str | None:
    """The pasted function's own signature and first docstring sentence."""
    sentence = first_sentence(function.doc) if function.doc else ""
    if len(sentence) < 12:
        return None
    name = function.qualname.split(".")[-1]
    said = answer(name, signature(function.source), sentence)
    return ask(request("explain", "", "", function.source, rnd), said)


def continue_chat(function: Function, rnd: random.Random) -> str | None:
    """The first lines of a function and the rest of it."""
    lines = function.source.split("\n")
    if len(lines) < 6:
        return None
    cut = rnd.randrange(3, len(lines) - 1)
    return ask(request("continue", "", "", "\n".join(lines[:cut]), rnd), fenced("\n".join(lines[cut:])))


def several_turns(function: Function, pool: list[str], rnd: random.Random) -> str | None:
    """A conversation that edits the same function step by step; code is pasted only once."""
    code, turns = function.source, []
    kinds = ["rename", "rename", "rename_function", "literal", "docstring", "explain"]
    for _ in range(rnd.randrange(2, 5)):
        kind = rnd.choice(kinds)
        if kind == "explain":
            doc = ast.get_docstring(ast.parse(code).body[0])  # type: ignore[arg-type]
            sentence = first_sentence(doc) if doc else ""
            if len(sentence) < 12:
                continue
            name = ast.parse(code).body[0].name  # type: ignore[attr-defined]
            old = new = ""
            said = answer(name, signature(code), sentence)
        else:
            edit = random_edit(kind, code, pool, rnd)
            if edit is None:
                continue
            old, new, said = edit.old, edit.new, fenced(edit.code)
        if turns:
            form = rnd.choice(WORDINGS["edits"]["later_turns"])
            text = form.format(rnd.choice(FORMS[kind]).format(a=old, b=new))
        else:
            text = request(kind, old, new, code, rnd)
        turns += [("user", text), ("assistant", said)]
        if kind != "explain":
            code = edit.code
    return render(*turns) if len(turns) >= 4 else None
