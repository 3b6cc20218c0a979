#!/usr/bin/env python3
"""Writes the README's table of what a Mac would do: simulated, until reports of Macs are there.

    .venv/bin/python scripts/your_mac.py [--check]

Plain speeds are scripts/simulate_device's. What the default makes of them is scripts/simulate's mean over recorded answers of a kind, 256
tokens long, warm, on the latency curve of that generation. Memory is what `mlxspec inspect MODEL --context 32768` counts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import simulate_device
from simulate import TRACES
from simulation.machines import MACHINES
from simulation.report import DRAFTERS, auto_seconds, days
from simulation.requests import plain_seconds
from simulation.traces import read_traces

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- scripts/your_mac.py -->\n", "<!-- end -->\n"
HEAD = "| Mac | model | memory, 32k tokens | plain | chat | code | edits |\n|---|---|---|---|---|---|---|\n"
KINDS = {"chat": "ask", "code": "continue", "edits": "edit"}
_TOKENS, _ANSWERS = 256, 15


class Mac(NamedTuple):
    """memory and model_gb: GB, that of the model with 32,768 tokens. bandwidth: GB/s. curve: of simulation.machines."""

    memory: int
    chip: str
    bandwidth: float
    curve: str
    model: str
    size: str
    model_gb: float


MACS = (
    Mac(16, "M4", 120.0, "M4 Pro", "mlx-community/Qwen3.5-9B-4bit", "9B", 6.5),
    Mac(32, "M1 Max", 400.0, "M1 Ultra", "mlx-community/Qwen3.8-27B-4bit", "27B", 18.0),
    Mac(64, "M4 Pro", 273.0, "M4 Pro", "mlx-community/Qwen3.8-27B-4bit", "27B", 18.0),
    Mac(128, "M3 Max", 400.0, "M3 Max", "mlx-community/Qwen3.8-27B-4bit", "27B", 18.0),
)


def rows() -> Iterator[str]:
    """Lines of the table."""
    recorded: dict[str, list[simulate_device.Event]] = {}
    for mac in MACS:
        if mac.size not in recorded:
            shape = simulate_device.Shape(simulate_device.MODELS[mac.size])
            recorded[mac.size] = simulate_device.record(
                shape, "plain", "greedy", depth=1, policy="auto", rows=1, kv_bits=simulate_device.PLAIN
            )
        device = simulate_device.Machine(mac.bandwidth)
        plain = 1 / simulate_device.replay(recorded[mac.size], device).seconds
        speeds = " | ".join(f"{plain * speedup(mac.curve, kind):.0f}" for kind in KINDS.values())
        yield (
            f"| {mac.memory} GB, {mac.chip} | `{mac.model}` | {mac.model_gb:.1f} GB | {plain:.0f} | {speeds} |\n"
        )


def speedup(curve: str, kind: str) -> float:
    """The default over plain decoding, the mean over answers of a kind."""
    machine = next(m for m in MACHINES if m.name == curve)
    workloads = {kind: read_traces(TRACES)[kind]}
    warm, held = days(workloads, _TOKENS, _ANSWERS, drafters=DRAFTERS, seed=0)
    times, _ = auto_seconds(machine, warm, held, "warm", 0)
    return float(np.mean(plain_seconds(held, machine) / times))


def main(arguments: list[str]) -> int:
    """Write the table, or with --check say whether the README has it. Returns 0, or 1 where it has not."""
    text = README.read_text(encoding="utf-8")
    before, found, rest = text.partition(BEGIN)
    old, ended, after = rest.partition(END)
    if not found or not ended:
        print("README.md has no place for the table.", file=sys.stderr)
        return 1
    table = HEAD + "".join(rows())
    if "--check" in arguments:
        return 0 if old == table else 1
    README.write_text(before + found + table + ended + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
