"""Writes the tables of docs/measurements.md from docs/measurements/*.json: `.venv/bin/python scripts/measurements.py`.

A line `<!-- FILE TABLE -->` in the page stands above a table. A cell that is an object of figures becomes the largest of them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "measurements.md"
PLACE = re.compile(r"(<!-- ([\w-]+) ([\w-]+) -->\n)(?:\|.*\n)*")


def table(name: str, part: str) -> str:
    found = json.loads((DOCS / "measurements" / f"{name}.json").read_text(encoding="utf-8"))["tables"][part]
    lines = ["| " + " | ".join(map(cell, row)) + " |\n" for row in (found["head"], *found["rows"])]
    return "".join([lines[0], "|" + "---|" * len(found["head"]) + "\n", *lines[1:]])


def cell(value: Any) -> str:
    return re.sub("e-0", "e-", f"{max(value.values()):.1e}") if isinstance(value, dict) else str(value)


def filled(page: str) -> str:
    """The page with its tables made anew."""
    return PLACE.sub(lambda m: m[1] + table(m[2], m[3]), page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
