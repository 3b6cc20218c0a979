"""Runs a command in several processes, the ranks, that share one divided model and are started by mlx.launch.

Rank 0 runs the command as a single process would. Every other rank loads its part with the same options and follows rank 0: it reads no
prompt, listens on no port and prints nothing but why it ended. Knows options; knows no rounds.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable

from mlxspec.cli import options


def run(args: argparse.Namespace, command: Callable[[argparse.Namespace], int]) -> int:
    """Run a command in this process, alone or as one of the ranks of mlx.launch. Returns its exit code. Raises what the command raises."""
    from mlxspec.engine import ranks

    args.ranks = found = ranks.join()
    if found is None or found.leads:
        try:
            return command(args)
        finally:
            if found is not None:
                found.end()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's, which tells when to end
    if args.command == "serve":
        from mlxspec.cli.serve import served_alone

        args = served_alone(args)
    ranks.follow(options.load_engine(args, options.spec_config(args), quiet=True).step)
    return 0
