"""A second reader of Metal source: clang, by libclang, with Metal's address spaces (front_end.h). It compiles nothing.

clang refuses a constant or threadgroup pointer where a device pointer belongs, ambiguous overloads and undefined names. What it takes and
Apple's compiler does not is looked for here, in clang's syntax tree and in the words of declarations: pointers and references that name
no address space, casts from one to another, recursion, static locals, globals outside constant memory, and C++ that Metal leaves out.

Not seen: what needs Apple's own library or back end, such as registers and limits of threads.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .translate import without_comments

HEADER = Path(__file__).with_name("front_end.h")
_FILE = "kernel.metal"
STANDARDS = ("c++14", "c++17")  # what Metal 3.x and Metal 4.x are made of
FLAGS = (
    "-x", "c++", "--target=x86_64-unknown-linux-gnu", "-nostdinc", "-nostdinc++", "-Wall", "-Wno-unused", "-Wno-unknown-attributes",
    "-Wno-undefined-inline", "-Wno-undefined-internal", "-Wno-address-of-packed-member", "-ferror-limit=5", "-include", str(HEADER),
)  # fmt: skip
_SPACES = {"device", "constant", "threadgroup", "thread"}
_ABSENT = {  # kinds of libclang's tree
    "CXX_THROW_EXPR": "exceptions", "CXX_TRY_STMT": "exceptions", "CXX_NEW_EXPR": "new", "CXX_DELETE_EXPR": "delete", "GOTO_STMT": "goto",
    "INDIRECT_GOTO_STMT": "goto", "CXX_TYPEID_EXPR": "typeid", "CXX_DYNAMIC_CAST_EXPR": "dynamic_cast", "LAMBDA_EXPR": "lambdas",
    "ASM_STMT": "assembler",
}  # fmt: skip
_DECLARED = {"VAR_DECL", "PARM_DECL", "FIELD_DECL", "FUNCTION_DECL", "CXX_METHOD", "FUNCTION_TEMPLATE"}
_VECTOR = re.compile(r"(?<![\w:])((?:float|half|bfloat|int|uint|ushort|uchar|ulong|long)[234])(?=\()")
_SHARED = re.compile(r"(?m)^(\s*)threadgroup(?=\s+[\w:<>, ]+?\s\w+\s*(?:\[|;))")


@functools.cache
def missing() -> str | None:
    """Why there is no second reader here, or None."""
    try:
        import clang.cindex

        clang.cindex.Index.create()
    except Exception as problem:  # not installed, or of another machine
        return f"needs libclang, which the dev extra brings ({type(problem).__name__})"
    return None


@functools.lru_cache(maxsize=4096)
def refusals(text: str, *, standard: str = STANDARDS[0], tree: bool = True) -> tuple[str, ...]:
    """Why Metal does not take the source that MLX generated, each with its line; empty: nothing is known against it. tree: whether to look
    for what clang takes, which takes longer than clang does."""
    from clang.cindex import Index

    text = spelled(text)
    unit = Index.create().parse(_FILE, args=[*FLAGS, f"-std={standard}"], unsaved_files=[(_FILE, text)])
    said = [f"line {d.location.line}: {d.spelling}" for d in unit.diagnostics if d.severity >= d.Warning]
    if said or not tree:
        return tuple(said)
    return tuple(dict.fromkeys(_Reading(unit, text).complaints()))


def spelled(text: str) -> str:
    """Metal made into C++, each line in its place: no comments, no attributes, vectors made by functions, static shared variables."""
    text = re.sub(r"#include\s*<metal_\w+>|\[\[.*?\]\]", "", without_comments(text))
    return _SHARED.sub(r"\1static threadgroup", _VECTOR.sub(r"make_\1", text))


class _Reading:
    """What clang has taken and Metal does not. text: that clang has read."""

    def __init__(self, unit: Any, text: str) -> None:
        self._text = text
        self._own = [
            c for c in unit.cursor.get_children() if c.location.file and c.location.file.name == _FILE
        ]
        self._calls: dict[str, set[str]] = {}

    def complaints(self) -> Iterator[str]:
        by_name = Counter(c.spelling for c in self._own)
        users = {c.spelling: c.get_usr() for c in self._own}
        for cursor in self._own:
            yield from self._declaration(cursor, is_local=False)
            called = self._calls.setdefault(cursor.get_usr(), set())
            for inner in cursor.walk_preorder():
                kind = inner.kind.name
                if kind in _ABSENT:
                    yield f"line {inner.location.line}: Metal has no {_ABSENT[kind]}"
                elif kind == "CSTYLE_CAST_EXPR":
                    yield from self._cast(inner)
                elif kind == "OVERLOADED_DECL_REF" and by_name[inner.spelling] == 1:  # in a template
                    called.add(users[inner.spelling])
                elif kind == "DECL_REF_EXPR" and inner.referenced is not None:
                    called.add(inner.referenced.get_usr())
                elif inner != cursor:
                    yield from self._declaration(inner, is_local=True)
        for cursor in self._own:
            if cursor.get_usr() in self._reached(cursor.get_usr()):
                yield f"line {cursor.location.line}: {cursor.spelling} calls itself"

    def _reached(self, name: str) -> set[str]:
        seen: set[str] = set()
        ahead = [name]
        while ahead:
            ahead += (new := self._calls.get(ahead.pop(), set()) - seen)
            seen |= new
        return seen

    def _declaration(self, cursor: Any, *, is_local: bool) -> Iterator[str]:
        """A variable, parameter or member, or what a function returns."""
        kind = cursor.kind.name
        if kind not in _DECLARED:
            return
        where, words = f"line {cursor.location.line}", self._words_before(cursor)
        if not is_local or kind != "FUNCTION_TEMPLATE":
            yield from _unplaced(words, where, cursor.spelling)
        if kind == "VAR_DECL":
            spaces = {"constant", "threadgroup"} if is_local else {"constant"}
            if (not is_local or "static" in words) and not spaces & set(words):
                what = "a static local" if is_local else "a global"
                yield f"{where}: {what} outside constant memory: {cursor.spelling}"

    def _words_before(self, cursor: Any) -> list[str]:
        """Words of a declaration before its name, without those of template parameters. Counted from the text: clang's own extent leaves
        out a first word that is a macro, as address spaces are."""
        start = cursor.extent.start.offset
        before = re.split(r"[^\w\s]", self._text[max(0, start - 200) : start])[-1]
        words = re.findall(r"\w+|&&|\S", before + self._text[start : cursor.location.offset])
        if "template" in words:
            depth = 0
            for i, word in enumerate(words):
                depth += (word == "<") - (word == ">")
                if word == ">" and depth == 0:
                    return words[i + 1 :]
        return words

    def _cast(self, cursor: Any) -> Iterator[str]:
        where, inner = f"line {cursor.location.line}", list(cursor.get_children())
        words = re.findall(r"\w+|\S", self._text[cursor.extent.start.offset : cursor.extent.end.offset])
        yield from _unplaced(words[: words.index(")") + 1], where, "in a cast")
        to, came = cursor.type.get_canonical(), inner[-1].type.get_canonical()
        if (
            to.kind == came.kind
            and to.get_pointee().get_address_space() != came.get_pointee().get_address_space()
        ):
            yield f"{where}: a cast from one address space to another"


def _unplaced(words: list[str], where: str, name: str) -> Iterator[str]:
    if {"*", "&", "&&"} & set(words) and "auto" not in words and not _SPACES & set(words):
        yield f"{where}: a pointer or reference without an address space: {name}"
