"""Prints tables and pairs of name and value on stdout. Cells are broken to fit a terminal; a pipe gets whole lines. Nothing is cut."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from mlxspec.cli import terminal


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print a table whose columns are two spaces apart. right: numbers of the columns to align to the right."""
    rows = [headings, *([terminal.sentence(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(headings))]
    if sum(widths) + 2 * (len(widths) - 1) > _columns():
        return _print_broken(rows, right)
    for row in rows:
        cells = [
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        terminal.say("  ".join(cells).rstrip() + "\n")


def print_pairs(pairs: Sequence[tuple[str, str]], width: int = 0) -> None:
    """Print lines `name value` with the values aligned. A pair without a name continues the pair before. width: the least width of the
    names, for pairs that are printed later."""
    width = max(width, *(len(name) for name, _ in pairs))
    room = max(20, _columns() - width - 2)
    for name, value in pairs:
        parts = textwrap.wrap(terminal.sentence(value), room, break_long_words=False, break_on_hyphens=False)
        for part in parts or [""]:
            terminal.say(f"{name.ljust(width)}  {part}".rstrip() + "\n")
            name = ""


def _columns() -> int:
    """Return the width of the terminal that shows stdout; sys.maxsize where stdout is no terminal."""
    return shutil.get_terminal_size().columns if terminal.is_terminal(sys.stdout) else sys.maxsize


def _print_broken(rows: Sequence[Sequence[str]], right: Sequence[int]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, heading in enumerate(rows[0]):
        table.add_column(heading, justify="right" if i in right else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    Console(file=sys.stdout, width=_columns(), highlight=False, markup=False, no_color=True).print(table)
