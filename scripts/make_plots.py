"""The pictures of docs/pictures that measurements make: the figure of `mlxspec tune` on the demo model, and its table as it is printed.

    python scripts/make_plots.py [FOLDER]

Takes a minute or two; run it on a machine that does nothing else. Everything drawn was measured in this run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMAND = ("tune", "--repeat", "2", "--max-tokens", "64")


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    figure = folder / "tune-plot.png"
    ran = subprocess.run(
        [sys.executable, "-m", "mlxspec", *COMMAND, "--plot", str(figure)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    print(ran.stdout, ran.stderr, sep="", end="")
    if ran.returncode:
        return ran.returncode
    draw_text(folder / "tune-table.png", f"$ mlxspec {' '.join(COMMAND)}\n\n{ran.stdout}")
    return 0


def draw_text(path: Path, text: str) -> None:
    """Text as a terminal shows it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = text.rstrip().splitlines()
    width, height = max(map(len, lines)) * 0.0835 + 0.5, len(lines) * 0.185 + 0.4
    figure = Figure(figsize=(width, height), facecolor="#1c1f24")
    FigureCanvasAgg(figure)
    figure.text(
        0.25 / width,
        1 - 0.2 / height,
        "\n".join(lines),
        family="monospace",
        fontsize=10,
        linespacing=1.25,
        color="#d8dee9",
        va="top",
        parse_math=False,
    )
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
