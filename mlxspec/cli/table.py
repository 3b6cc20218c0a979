"""Prints tables and pairs of name and value on stdout. Nothing is cut to the width of a terminal, so a pipe gets whole names."""

from __future__ import annotations

from collections.abc import Sequence

from mlxspec.cli import terminal


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Columns two spaces apart; those in `right` flush right."""
    rows = [headings, *([terminal.sentence(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(headings))]
    for row in rows:
        cells = [
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        terminal.say("  ".join(cells).rstrip() + "\n")


def print_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """`name  value`, values below one another; a pair without a name goes on with the one before."""
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        terminal.say(f"{name.ljust(width)}  {terminal.sentence(value)}".rstrip() + "\n")
