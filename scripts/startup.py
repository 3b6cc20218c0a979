"""How long mlxspec takes to be there: import, help, and the first token, on a machine that has never run it.

    .venv/bin/python scripts/startup.py [--repeat N]

Every run gets an empty home, cache and temporary folder, so nothing compiled or measured before helps it; only Python's own compiled files
are kept, unless --no-bytecode takes those away too. Prints medians and the longest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"import mlxspec": 0.2, "mlxspec --help": 0.5, "first token of generate": 3.0}


def whole(*arguments: str) -> Callable[[dict[str, str]], float]:
    def measure(environment: dict[str, str]) -> float:
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - started

    return measure


def first_token(environment: dict[str, str]) -> float:
    command = [sys.executable, "-m", "mlxspec", "generate", "-p", "what does os.path.join do?"]
    started = time.perf_counter()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise SystemExit("mlxspec generate said nothing.")
        seconds = time.perf_counter() - started
        process.stdout.read()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5, help="runs of each (default 5)")
    parser.add_argument("--no-bytecode", action="store_true", help="compile all Python files anew each time")
    options = parser.parse_args()
    python = statistics.median(whole("-c", "pass")(dict(os.environ)) for _ in range(options.repeat))
    measures = {
        "import mlxspec": whole("-c", "import mlxspec"),
        "mlxspec --help": whole("-m", "mlxspec", "--help"),
        "first token of generate": first_token,
    }
    for name, measure in measures.items():
        seconds = []
        for _ in range(options.repeat):
            with tempfile.TemporaryDirectory() as folder:
                seconds.append(measure(fresh(Path(folder), options.no_bytecode)))
        told = "" if name != "import mlxspec" else f" ({python:.2f} s of them Python itself)"
        print(
            f"{name:<24} {statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s; wanted {LIMITS[name]} s{told}"
        )


def fresh(folder: Path, no_bytecode: bool) -> dict[str, str]:
    """The environment of somebody who has never run it."""
    (folder / "tmp").mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLX", "XDG_", "HF_"))}
    made = kept | {"HOME": str(folder), "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)}
    return made | ({"PYTHONPYCACHEPREFIX": str(folder / "pyc")} if no_bytecode else {})


if __name__ == "__main__":
    main()
