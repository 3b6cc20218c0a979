"""The `mlxspec` command and `python -m mlxspec`: hands over to the command line, knows no options itself."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run the command line with sys.argv; returns the exit code."""
    with_pastes = sys.argv[1:2] in (["chat"], ["run"]) and _is_screen()
    if with_pastes:  # imports take a moment too: what is pasted meanwhile is marked by the terminal, so that it is not sent
        os.write(1, b"\x1b[?2004h")
    try:
        from mlxspec.cli.main import main as run

        return int(run() or 0)
    except KeyboardInterrupt:  # in the imports; from there on the command line handles Ctrl-C
        return 130
    finally:
        if with_pastes and _is_screen():
            os.write(1, b"\x1b[?2004l")


def _is_screen() -> bool:
    return os.isatty(0) and os.isatty(1) and os.environ.get("TERM", "dumb") != "dumb"


if __name__ == "__main__":
    sys.exit(main())
