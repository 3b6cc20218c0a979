"""The `mlxspec` command and `python -m mlxspec`: hands over to the command line, knows no options itself."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line with sys.argv; returns the exit code."""
    from mlxspec.cli.main import main as run

    return int(run() or 0)


if __name__ == "__main__":
    sys.exit(main())
