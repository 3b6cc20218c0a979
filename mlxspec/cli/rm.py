"""`mlxspec rm`: take a model out of the local cache. Knows options, the question and the answer."""

from __future__ import annotations

import argparse

from mlxspec.cli import terminal
from mlxspec.cli.confirm import confirmed


def run(args: argparse.Namespace) -> int:
    """Ask, remove, tell what was freed. Returns 1 where the answer is no."""
    from mlxspec.checkpoints.cache import removal
    from mlxspec.loading.progress import amount
    from mlxspec.loading.short_names import repository

    wanted = removal(repository(args.repo), args.revision)
    what = f"{wanted.name} ({', '.join(r[:12] for r in wanted.revisions)}), {amount(wanted.freed)}"
    if not confirmed("Removing", "Remove", what, yes=args.yes):
        return 1
    wanted.execute()
    terminal.say(f"Removed {wanted.name}: {amount(wanted.freed)} freed.\n")
    return 0
