"""`mlxspec search`: models on Hugging Face that run here. Knows options and output; asking is checkpoints/search.py's."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from mlxspec.cli import terminal
from mlxspec.cli.table import print_table
from mlxspec.config import check_number


def run(args: argparse.Namespace) -> int:
    """One line a model, the most downloaded first, or one JSON object."""
    from mlxspec.checkpoints.search import search
    from mlxspec.loading.progress import amount

    check_number("--limit", args.limit, 1, 100, integer=True)
    found = search(" ".join(args.words), limit=args.limit, all_kinds=args.all)
    if args.json:
        terminal.say(json.dumps({"models": [asdict(m) for m in found]}) + "\n")
        return 0
    if not found:
        terminal.say(
            f"Hugging Face has no model that mlxspec runs and whose id holds {' '.join(args.words)!r}; "
            "`mlxspec models` lists what is known to run.\n"
        )
        return 0
    rows = [
        (
            m.name,
            m.model_type or "?",
            m.quantization or "",
            amount(m.size) if m.size else "?",
            f"{m.downloads:,}",
            ", ".join(m.base_models),
            "gated" if m.gated else "",
        )
        for m in found
    ]
    print_table(("model", "type", "weights", "size", "downloads", "made from", ""), rows, right=(3, 4))
    terminal.note("`mlxspec pull MODEL --with-mtp` fetches one with its MTP head.")
    return 0
