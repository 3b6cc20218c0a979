#!/usr/bin/env python3
"""Draws docstrings of the package at random, with signatures and without bodies, for a reader who does not know the code.

    scripts/read_aloud.py [--seed 1] [-n 60] [--rooms engine cache ...]

The reader writes for each what it does and returns, and whether that had to be guessed; a second person compares with the code. Rooms are
drawn in turn, so that each has about as many. Prints Markdown. Needs no environment.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "mlxspec"
Drawn = tuple[str, str, str]  # where it stands, its signature, its docstring


def documented(path: Path) -> Iterator[Drawn]:
    """Yield the docstrings of a file's functions and classes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text, names, above = ast.get_docstring(node), [node.name], parents.get(node)
        if not text:
            continue
        while above is not None:
            names += [above.name] if isinstance(above, ast.ClassDef | ast.FunctionDef) else []
            above = parents.get(above)
        name = ".".join(reversed(names))
        if isinstance(node, ast.ClassDef):
            signature = f"class {name}({', '.join(map(ast.unparse, node.bases))})"
        else:
            marks = "".join(f"@{ast.unparse(d)} " for d in node.decorator_list)
            returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            signature = f"{marks}def {name}({ast.unparse(node.args)}){returned}"
        yield str(path.relative_to(PACKAGE)), signature, text


def drawn(seed: int, num: int, rooms: list[str]) -> list[Drawn]:
    """Return `num` docstrings, of each room about as many."""
    generator, by_room = random.Random(seed), dict[str, list[Drawn]]()
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0]
        if not rooms or room in rooms:
            by_room.setdefault(room, []).extend(documented(path))
    for each in by_room.values():
        generator.shuffle(each)
    found: list[Drawn] = []
    while len(found) < num and any(by_room.values()):
        for room in generator.sample(sorted(by_room), len(by_room)):
            if by_room[room] and len(found) < num:
                found.append(by_room[room].pop())
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-n", type=int, default=60)
    parser.add_argument("--rooms", nargs="*", default=[])
    options = parser.parse_args()
    for number, (place, signature, text) in enumerate(drawn(options.seed, options.n, options.rooms), 1):
        print(f"## {number}. {place}\n\n    {signature}\n\n{text}\n")


if __name__ == "__main__":
    main()
