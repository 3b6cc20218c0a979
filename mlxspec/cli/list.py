"""`mlxspec list`: the models in the local cache. Knows options and output."""

from __future__ import annotations

import argparse
import json

from mlxspec.cli import terminal
from mlxspec.cli.table import print_table


def run(args: argparse.Namespace) -> int:
    """One line a revision, or one JSON object."""
    from mlxspec.checkpoints.cache import listing
    from mlxspec.loading.progress import amount

    found = listing()
    if args.json:
        data = {
            "cache": str(found.folder),
            "models": [e.data() for e in found.entries],
            "others": found.num_others,
        }
        terminal.say(json.dumps(data) + "\n")
        return 0
    if found.entries:
        rows = [
            (
                e.name,
                e.revision[:12] + (f" ({', '.join(e.refs)})" if e.refs else ""),
                amount(e.size),
                e.model_type,
                e.quantization,
                {True: "yes", False: "no", None: "?"}[e.has_head],
            )
            for e in found.entries
        ]
        print_table(("model", "revision", "size", "type", "weights", "MTP head"), rows, right=(2,))
    else:
        terminal.say(
            f"There is no model that mlxspec runs in {found.folder}; `mlxspec pull owner/name` fetches one.\n"
        )
    for e in found.entries:
        if e.problem:
            terminal.note(f"{e.name} {e.revision[:12]}: {e.problem}.")
    if found.num_others:
        terminal.note(f"Of the cache's other repositories, {found.num_others}, mlxspec runs none.")
    return 0
