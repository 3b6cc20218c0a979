"""The standard library as a corpus: which files, their hashes, and the split into training and held-out files.

Knows nothing of conversations or tokens. The split is by file (hash of the relative path), so no held-out function was
seen in training unless another file repeats it; `functions` drops such repeats from the held-out side.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SKIPPED_DIRS = {
    "site-packages", "idlelib", "lib2to3", "__pycache__", "encodings", "pydoc_data", "turtledemo", "ensurepip",
    "data", "test_data", "cjkencodings", "encoded_modules", "bad_coding", "lib-dynload",
}  # fmt: skip
_MIN_CHARS, _MAX_CHARS, _MAX_LINE = 200, 400_000, 2000


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of the corpus. `path` is relative to the library's root; `held` marks the held-out side."""

    path: str
    text: str
    sha256: str
    held: bool
    is_test: bool

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True, kw_only=True)
class Function:
    """One function cut out of a file, dedented. `qualname` includes the module; `doc` is None when it has none."""

    qualname: str
    source: str
    doc: str | None
    held: bool


def _is_held(path: str, is_test: bool) -> bool:
    bucket = int(hashlib.sha1(path.encode()).hexdigest(), 16) % 100
    return bucket < (3 if is_test else 6)


def read_library(root: Path | None = None) -> list[SourceFile]:
    """All usable files of the standard library under `root` (default: the running interpreter's), sorted by path."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if _SKIPPED_DIRS & set(relative.split("/")[:-1]):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if not _MIN_CHARS < len(text) < _MAX_CHARS or max(map(len, text.splitlines())) >= _MAX_LINE:
            continue
        is_test = relative.startswith("test/") or "/test" in relative
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        held = _is_held(relative, is_test)
        files.append(SourceFile(path=relative, text=text, sha256=digest, held=held, is_test=is_test))
    return files


def _cut(file: SourceFile) -> Iterator[Function]:
    tree = parse(file.text)
    if tree is None:
        return
    lines = file.text.splitlines()

    def visit(body: list[ast.stmt], prefix: str) -> Iterator[Function]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body, f"{prefix}.{node.name}")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno] + [d.lineno for d in node.decorator_list])
                source = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]))
                doc = ast.get_docstring(node)
                yield Function(qualname=f"{prefix}.{node.name}", source=source, doc=doc, held=file.held)

    yield from visit(tree.body, file.module)


def functions(files: list[SourceFile], *, min_chars: int = 80, max_chars: int = 640) -> list[Function]:
    """Functions of at least three lines; a held-out one whose text also stands in a training file is dropped."""
    found = [f for file in files for f in _cut(file)]
    found = [f for f in found if min_chars <= len(f.source) <= max_chars and f.source.count("\n") >= 2]
    found = [f for f in found if f.source.isascii() and _parses(f.source)]
    seen_in_training = {f.source for f in found if not f.held}
    unique: dict[str, Function] = {}
    for f in found:
        if not (f.held and f.source in seen_in_training):
            unique.setdefault(f.source, f)
    return list(unique.values())


def parse(text: str) -> ast.Module | None:
    """The syntax tree, or None; warnings about the text (escapes, comparisons) are not ours to show."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text)
        except SyntaxError:
            return None


def _parses(source: str) -> bool:
    tree = parse(source)
    return bool(tree and tree.body) and isinstance(tree.body[0], ast.FunctionDef | ast.AsyncFunctionDef)


def first_sentence(doc: str, max_chars: int = 160) -> str:
    """The first sentence of a docstring's first real paragraph (a leading signature line is skipped), on one line."""
    paragraphs = [" ".join(p.split()) for p in inspect.cleandoc(doc).split("\n\n") if p.strip()]
    if not paragraphs:
        return ""
    text = paragraphs[0]
    if len(paragraphs) > 1 and (text.endswith((")", "]")) or "->" in text) and "(" in text[:40]:
        text = paragraphs[1]
    for end in range(20, len(text)):
        if (
            text[end] == "."
            and (end + 1 == len(text) or text[end + 1] == " ")
            and text[end - 2 : end] not in ("i.", "e.")
        ):
            text = text[: end + 1]
            break
    return text if len(text) <= max_chars else ""
