"""The demo family: paths of its targets, its drafters, its recorded workloads, its pictures and its measured figures.

Knows paths only; nothing is loaded here. How the family was trained: `docs/contributing.md`.
"""

from __future__ import annotations

from pathlib import Path

from mlxspec.errors import ConfigError

ROOT = Path(__file__).resolve().parent
TARGET = ROOT / "target"
DRAFT = ROOT / "draft"
GEMMA = ROOT / "gemma"
EAGLE3 = ROOT / "eagle3"
DFLASH = ROOT / "dflash"
VISION = ROOT / "vision"
PICTURES = ROOT / "pictures"
FIGURES = ROOT / "figures.json"
WORKLOADS = ("edit", "explain", "continue", "ask", "sampled")


def workload(name: str) -> Path:
    """Return the path of a recorded workload, one of WORKLOADS. Raises ConfigError for another name."""
    if name not in WORKLOADS:
        raise ConfigError(f"There is no workload {name!r}; there are {', '.join(WORKLOADS)}.")
    return ROOT / "workloads" / f"{name}.json"
