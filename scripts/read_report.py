#!/usr/bin/env python3
"""Puts a report of scripts/mac_check into docs/measurements/macs.json and the table of docs/measurements.md.

    .venv/bin/python scripts/read_report.py report.md [--source ADDRESS]

A report is the block headed "Report to paste", alone or within the file that mac_check writes. Every figure stays the text that the Mac
printed. A second report of the same chip, system, version and day replaces the first.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import measurements

RECORD = measurements.DOCS / "measurements" / "macs.json"
HEAD = ["day", "chip", "system", "mlxspec, MLX", "kernels", "plain decoding", "prompt", "failed"]
_MOST = 200_000  # characters of a file
_MACHINE = re.compile(r"(?P<chip>[^,()]+)(?: \([^)]*\))?(?:, (?P<memory>\d+ GiB))?, backend (?P<backend>\w+)")
_SYSTEM = re.compile(r"(?P<system>[\w.-]+), Python \S+, (?P<day>\d{4}-\d\d-\d\d)")
_VERSIONS = re.compile(r"mlxspec (?P<own>\S+), mlx (?P<mlx>\S+),")


class Report(NamedTuple):
    """One report of a Mac. cells: a line of the table, in the order of HEAD; lines: the whole report."""

    cells: list[str]
    lines: list[str]


def parsed(text: str) -> Report:
    """Read a report out of a text. Raises ValueError with one sentence where there is none, or it is not whole."""
    block = re.search(r"Report to paste\s*```(?:text)?\n(.*?)```", text, re.DOTALL)
    lines = [line.strip() for line in (block[1] if block else text).strip().splitlines() if line.strip()]
    found = [next(filter(None, map(form.search, lines)), None) for form in (_MACHINE, _SYSTEM, _VERSIONS)]
    machine, system, versions = found
    if machine is None or system is None or versions is None:
        raise ValueError(
            "This is no whole report of scripts/mac_check: its first lines name the chip, the system, the day and versions."
        )
    if machine["backend"] != "metal":
        raise ValueError(f"This report is of the backend {machine['backend']}, not of a Mac's GPU.")
    if not lines[-1].startswith("failed: "):
        raise ValueError("This report is cut: its last line begins with `failed:`.")
    chip = machine["chip"] + (f", {machine['memory']}" if machine["memory"] else "")
    own = f"{versions['own']}, {versions['mlx'].rstrip(',')}"
    shown = [_line(lines, name) for name in ("kernels", "plain decoding", "prompt of")]
    failed = lines[-1].removeprefix("failed: ").split(";")[0]
    return Report([system["day"], chip, system["system"], own, *shown, failed], lines)


def _line(lines: list[str], name: str) -> str:
    """Return what the first line of this name says, "" where there is none."""
    line = next((line for line in lines if name in line.split(": ")[0]), "")
    return line.partition(": ")[2].replace("|", "/")


def added(record: Mapping[str, Any], report: Report, source: str) -> dict[str, Any]:
    """Return the record with a report, the newest first. source: where it was published, "" where it was not."""
    rows = [row for row in record["tables"]["reports"]["rows"] if row[:4] != report.cells[:4]]
    rows = sorted([report.cells, *rows], key=lambda row: str(row[0]), reverse=True)
    key = " ".join(report.cells[:3])
    whole = {**record["reports"], key: {"source": source, "lines": report.lines}}
    return {**record, "tables": {"reports": {"head": HEAD, "rows": rows}}, "reports": whole}


def main() -> int:
    """Read one file and write the record and the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "report", type=Path, metavar="FILE", help="what scripts/mac_check printed or wrote with --out"
    )
    parser.add_argument("--source", default="", metavar="ADDRESS", help="where the report was published")
    options = parser.parse_args()
    try:
        text = options.report.read_text(encoding="utf-8")
        if len(text) > _MOST:
            raise ValueError(f"{options.report} is longer than a report.")
        report = parsed(text)
    except (OSError, ValueError) as error:
        said = f"{options.report} is no text." if isinstance(error, UnicodeDecodeError) else str(error)
        print(f"scripts/read_report: {said}", file=sys.stderr)
        return 2
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    RECORD.write_text(json.dumps(added(record, report, options.source), indent=1) + "\n", encoding="utf-8")
    measurements.PAGE.write_text(
        measurements.filled(measurements.PAGE.read_text(encoding="utf-8")), encoding="utf-8"
    )
    print(f"The report of {report.cells[1]} is in {RECORD.name} and in {measurements.PAGE.name}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
