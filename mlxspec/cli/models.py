"""`mlxspec models`: what is known to run and what it takes, and which drafters were published. Knows options and output; counting is
checkpoints/known.py's."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from mlxspec.cli import terminal
from mlxspec.cli.table import print_table
from mlxspec.config import check_number


def run(args: argparse.Namespace) -> int:
    """One line a shape, or one JSON object. Asks no network."""
    from mlxspec.checkpoints.known import BITS, known
    from mlxspec.loading.progress import amount
    from mlxspec.platform.memory import machine_memory

    if args.drafters:
        return _drafters(json_wanted=args.json)
    if args.context is not None:
        check_number("--context", args.context, 1, 1 << 24, integer=True)
    found = [m for m in known(args.context) if m.fits or not args.fits]
    if args.json:
        terminal.say(json.dumps({"machine": machine_memory(), "models": [asdict(m) for m in found]}) + "\n")
        return 0
    rows = []
    for m in found:
        total = [amount(m.weights[form] + m.state + m.head_bytes) for form in BITS]
        head = amount(m.head_bytes) if m.head_bytes else "none"
        rows.append((", ".join(m.names), *total, ", ".join(m.fits) or "no", head, m.drafter or "lookup only"))
    headings = ("model", *BITS, "fits here", "head, 4 bits", "drafts beside lookup")
    print_table(headings, rows, right=(1, 2, 3, 5))
    contexts = sorted({m.context for m in found})
    terminal.note(
        f"Memory in all on a GPU, for one row of {' or '.join(map(str, contexts))} tokens; this machine gives {amount(machine_memory())}. "
        "`mlxspec search` finds conversions of a model. Those of mlx-lm lack the MTP head; `mlxspec pull MODEL --with-mtp` fetches it. "
        "`mlxspec models --drafters` lists the drafters that were published for models."
    )
    return 0


def _drafters(*, json_wanted: bool) -> int:
    """One line a drafter of the catalogue."""
    from mlxspec.checkpoints.catalogue import catalogue

    found = catalogue()
    if json_wanted:
        terminal.say(json.dumps({"drafters": [asdict(p) for p in found]}) + "\n")
        return 0
    rows = [
        (
            ", ".join(p.targets),
            p.repo,
            p.kind,
            f"{p.parameters:g}B" if p.parameters else "",
            p.license,
            p.note,
        )
        for p in found
    ]
    print_table(("model", "drafter", "kind", "size", "license", ""), rows, right=(3,))
    terminal.note(
        "The best of each model comes first. `mlxspec pull MODEL --drafter auto` fetches a model, or a conversion of it, with the first "
        "that fits; --json tells the sources."
    )
    return 0
