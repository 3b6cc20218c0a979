#!/usr/bin/env python3
"""Reads the reports in docs/measurements/reports: checks each, makes the table of the page, and names contradictions with simulated cells.

    .venv/bin/python scripts/reports.py [FOLDER] [--check]

A report is what `mlxspec try --json` or `mlxspec versus --json` has printed. Plain decoding of Qwen3.6-27B is simulated for some chips
(docs/measurements/simulated.json): a report of such a chip and model whose plain speed is further from its cell than a factor of 1.25
contradicts it, and so does one that drafts faster than the largest cell by that factor. Exit status: 0, or 1 where a file is wrong, a cell
is contradicted, or, with --check, the page is not up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jsonschema
import measurements

FOLDER = measurements.DOCS / "measurements" / "reports"
SCHEMA = FOLDER / "schema.json"
SIMULATED = measurements.DOCS / "measurements" / "simulated.json"
HEAD = (
    "chip",
    "model",
    "kind of text",
    "plain",
    "drafted",
    "ratio, or range where not settled",
    "version",
    "day",
)
PLACE = re.compile(r"(<!-- reports -->\n)(?:\|.*\n)*")
FAR = 1.25  # times a simulated speed, or the other way round
_SIMULATED_MODEL = re.compile(r"qwen3\.6.27b", re.IGNORECASE)
_CHIP = re.compile(r"M\d+(?: (?:Pro|Max|Ultra))?")


class Line(NamedTuple):
    """One line of the table, in the order of HEAD."""

    chip: str
    model: str
    kind: str
    plain: float | None
    drafted: float
    ratio: Mapping[str, Any]
    version: str
    day: str

    @property
    def cells(self) -> list[str]:
        r = self.ratio
        span = f"{r['least']:.2f} to {r['most']:.2f}"
        said = r["refusal"] or (f"{r['median']:.2f} ({span})" if r["is_settled"] else span)
        plain = "" if self.plain is None else f"{self.plain:.0f}"
        return [self.chip, self.model, self.kind, plain, f"{self.drafted:.0f}", said, self.version, self.day]


def lines(report: Mapping[str, Any]) -> Iterator[Line]:
    """Yield the lines of a report. Of `versus` only our own side counts: the other's name says little about it."""
    chip, version, day = report["machine"], report["mlxspec"], report["day"]
    for kind in report.get("kinds", ()):
        yield Line(
            chip, report["model"], kind["kind"], kind["off"], kind["auto"], kind["ratio"], version, day
        )
    for prompt in report.get("prompts", ()):
        speeds = [turn["own"]["tokens_per_second"] for turn in prompt["turns"]]
        kind = f"{prompt['prompt']}, next to {report['rival']['model']}"
        yield Line(
            chip, report["own"]["model"], kind, None, median(speeds or [0.0]), prompt["ratio"], version, day
        )


def read(folder: Path) -> tuple[list[Line], list[str]]:
    """Return the lines of all reports, and a sentence for each file that is none."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    found, faults = list[Line](), list[str]()
    for path in sorted(folder.glob("*.json")):
        if path.name == SCHEMA.name:
            continue
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            jsonschema.validate(report, schema)
        except (ValueError, RecursionError) as error:
            faults.append(f"{path.name} is no JSON: {error}.")
        except jsonschema.ValidationError as error:
            where = "/".join(map(str, error.absolute_path)) or "the whole"
            faults.append(f"{path.name} is no report: {where}: {error.message[:200]}.")
        else:
            found += lines(report)
    return found, faults


def contradictions(found: Sequence[Line]) -> list[str]:
    """Return a sentence for each line that a simulated cell cannot be true beside."""
    table = json.loads(SIMULATED.read_text(encoding="utf-8"))["tables"]["verify"]
    cells = {row[0]: dict(zip(table["head"], row, strict=True)) for row in table["rows"]}
    said = []
    for line in found:
        chip = _CHIP.search(line.chip)
        cell = cells.get(chip[0]) if chip and _SIMULATED_MODEL.search(line.model) else None
        if cell is None:
            continue
        plain, most = float(cell["plain"]), float(cell["DFlash2, copies"].split("/")[-1])
        if line.plain is not None and not 1 / FAR <= line.plain / plain <= FAR:
            said.append(
                f"{line.chip}, {line.model}, {line.kind}: plain {line.plain:.0f} tokens a second, simulated {plain:.0f}."
            )
        if line.drafted > FAR * most:
            said.append(
                f"{line.chip}, {line.model}, {line.kind}: drafted {line.drafted:.0f} tokens a second, simulated at most {most:.0f}."
            )
    return said


def filled(page: str, found: Sequence[Line]) -> str:
    """Return the page with the table of these lines."""
    rows = [line.cells for line in sorted(found, key=lambda line: line[:3])]
    rows = rows or [["none yet", *[""] * (len(HEAD) - 1)]]
    made = "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in (HEAD, *rows))
    made = re.sub(r"\|(?:  \|)+", lambda m: m[0].replace("  ", " "), made)
    first, rest = made.split("\n", 1)
    return PLACE.sub(lambda m: f"{m[1]}{first}\n|{'---|' * len(HEAD)}\n{rest}", page)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    found, faults = read(options.folder)
    wrong = [*faults, *contradictions(found)]
    page = options.folder / "README.md"
    if page.is_file():
        before = page.read_text(encoding="utf-8")
        after = filled(before, found)
        if options.check and before != after:
            wrong.append(f"{page} is not up to date; run scripts/reports.py.")
        elif before != after:
            page.write_text(after, encoding="utf-8")
    print("\n".join([*wrong, f"{len(found)} lines of reports."]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
