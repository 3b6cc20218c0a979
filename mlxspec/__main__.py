"""The `mlxspec` command and `python -m mlxspec`: hands over to the command line, knows no options itself."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line with sys.argv; returns the exit code."""
    try:
        from mlxspec.cli.main import main as run
    except KeyboardInterrupt:  # imports take a moment; from here on the command line handles Ctrl-C
        return 130
    return int(run() or 0)


if __name__ == "__main__":
    sys.exit(main())
