"""Edits of one function of a whole pasted file: the request names the function, and the answer is that function alone, edited.

A file is a run of whole statements of the corpus, as they stand there, of about a given number of tokens. Every edit is checked as those of
a pasted function are. Knows syntax trees and request wording; not which tokens there are, which it is told by a function.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .chat import fenced
from .corpus import SourceFile, parse
from .edits import Edit, random_edit

KINDS = ("rename_function", "rename", "docstring", "literal", "copy")
_MIN, _MAX = 80, 640  # characters of a function that is edited, as of those that are pasted alone
_REQUESTS = {
    "rename_function": """rename the function {f} to {b}|Rename `{f}` to `{b}`|rename function {f} to {b}|in this file rename {f} to {b}
call the function {f} {b} instead|please rename {f} to {b}""",
    "rename": """in {f} rename {a} to {b}|In `{f}` rename `{a}` to `{b}`|in the function {f} rename {a} to {b}|rename {a} to {b} in {f}
in {f} replace the name {a} by {b}""",
    "docstring": """remove the docstring of {f}|delete the docstring of `{f}`|in {f} remove the docstring|drop the docstring of {f}""",
    "literal": """in {f} change {a} to {b}|in {f} replace {a} by {b}|change {a} to {b} in {f}|In `{f}` use {b} instead of {a}""",
    "copy": """show {f}|show the function {f}|Show me `{f}`|print the function {f}|what is the code of {f}?""",
}
FORMS = {kind: text.replace("\n", "|").split("|") for kind, text in _REQUESTS.items()}
HELD_OUT_FORMS = {
    "rename_function": ["could you give {f} the name {b}"],
    "rename": ["could you rename {a} to {b} inside {f}"],
    "docstring": ["can you remove the docstring from {f}"],
    "literal": ["could you change {a} to {b} inside {f}"],
    "copy": ["could you show {f} again"],
}


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A statement at the top of a file with the lines before it. function: its source, where it is one that can be edited."""

    text: str
    tokens: int
    name: str = ""
    function: str = ""


def statements(file: SourceFile, count: Callable[[str], int]) -> list[Statement]:
    """The file in pieces; none where it does not parse."""
    tree = parse(file.text)
    if tree is None or not file.text.isascii():
        return []
    lines, found, done = file.text.split("\n"), [], 0
    for node in tree.body:
        end = node.end_lineno or 0
        if end <= done:
            continue  # on the line of the one before
        text, name, source = "\n".join(lines[done:end]) + "\n", "", ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno] + [d.lineno for d in node.decorator_list])
            whole = "\n".join(lines[first - 1 : end])
            if _MIN <= len(whole) <= _MAX and end - first >= 2:
                name, source = node.name, whole
        found.append(Statement(text=text, tokens=count(text), name=name, function=source))
        done = end
    return found


def _edit(kind: str, one: Statement, pool: list[str], rnd: random.Random) -> Edit | None:
    if kind == "copy":
        return Edit(kind=kind, old="", new="", code=one.function)
    return random_edit(kind, one.function, pool, rnd)


@dataclass(frozen=True, kw_only=True)
class PastedFile:
    """code: of whole statements. chosen: those of them that can be edited, each with a name that no other function at the top has."""

    code: str
    chosen: tuple[Statement, ...]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """request: what is asked of a pasted file. answer: the edited function. place: of its first line, as a share of the file."""

    kind: str
    request: str
    answer: str
    place: float

    def question(self, file: PastedFile | None) -> str:
        """The user's message: the file, where it was not pasted before, and the request."""
        return self.request if file is None else f"{fenced(file.code)}\n{self.request}"


def file_of(pieces: list[Statement], tokens: int, rnd: random.Random) -> PastedFile | None:
    """A run of `pieces` of at most `tokens` tokens and at least three quarters of them, around a function that can be edited, or None."""
    around = [i for i, piece in enumerate(pieces) if piece.function and piece.tokens <= tokens]
    if not around:
        return None
    first = last = rnd.choice(around)
    used = pieces[first].tokens
    while True:
        sides = []
        if first and used + pieces[first - 1].tokens <= tokens:
            sides.append(first - 1)
        if last + 1 < len(pieces) and used + pieces[last + 1].tokens <= tokens:
            sides.append(last + 1)
        if not sides:
            break
        more = rnd.choice(sides)
        first, last, used = min(first, more), max(last, more), used + pieces[more].tokens
    code = "".join(piece.text for piece in pieces[first : last + 1]).strip("\n")
    chosen = [
        piece
        for piece in pieces[first : last + 1]
        if piece.function and len(re.findall(rf"(?m)^(?:async )?def {re.escape(piece.name)}\b", code)) == 1
    ]
    return PastedFile(code=code, chosen=tuple(chosen)) if chosen and used >= 0.75 * tokens else None


def turn(
    kind: str, file: PastedFile, pool: list[str], rnd: random.Random, forms: Mapping[str, list[str]]
) -> Turn | None:
    """An edit of one of the file's functions, or None. pool: names for renames; forms: wordings by kind."""
    one = rnd.choice(file.chosen)
    edit = _edit(kind, one, pool, rnd)
    if edit is None:
        return None
    request = rnd.choice(forms[kind]).format(f=one.name, a=edit.old, b=edit.new)
    place = file.code.index(one.function) / len(file.code)
    return Turn(kind=kind, request=request, answer=fenced(edit.code), place=place)
