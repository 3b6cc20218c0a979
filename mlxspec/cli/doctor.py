"""`mlxspec doctor`: prints what this machine is, what is wrong with it, and what to do. Knows output; checkup.py examines."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from mlxspec.cli import options, terminal
from mlxspec.cli.checkup import Finding, examine
from mlxspec.cli.parser import declare
from mlxspec.cli.progress_bar import Waiting
from mlxspec.cli.table import print_pairs
from mlxspec.errors import ConfigError

_NAME_WIDTH = 18  # of the longest finding: each is printed as soon as it is there
_MARKS = {"ok": "", "note": "(!) ", "wrong": "WRONG: "}


def add_options(parser: argparse.ArgumentParser) -> None:
    declare(
        parser,
        ("--model", str, "M", f"the model that is probed: {options.MODEL}", "demo"),
        options.JSON,
        options.DEBUG,
    )


def run(args: argparse.Namespace) -> int:
    """Examine this machine and print each finding as soon as it is made. Returns 0 where nothing is wrong, else 1."""
    if not args.model:
        raise ConfigError("--model must not be empty.")
    findings, looks = list[Finding](), examine(args.model)
    while True:
        with Waiting("looking at this machine"):
            finding = next(looks, None)
        if finding is None:
            break
        findings.append(finding)
        if not args.json:
            print_pairs(_lines(finding), width=_NAME_WIDTH)
    wrong = [f for f in findings if f.status == "wrong"]
    if args.json:
        data = {"ok": not wrong, "findings": [asdict(f) for f in findings]}
        terminal.say(json.dumps(data) + "\n")
    else:
        terminal.say(f"\n{_verdict(findings)}\n")
    return 1 if wrong else 0


def _lines(finding: Finding) -> list[tuple[str, str]]:
    found = (finding.name, _MARKS[finding.status] + finding.found)
    return [found, ("", finding.advice)] if finding.advice else [found]


def _verdict(findings: list[Finding]) -> str:
    count = {s: sum(f.status == s for f in findings) for s in ("wrong", "note")}
    if count["wrong"]:
        return f"{count['wrong']} of {len(findings)} findings are wrong; what to do stands below each."
    return "Nothing is wrong." + (f" {count['note']} could be better, marked (!)." if count["note"] else "")
