"""The gate opens for what is as good as stored, and closes for what is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import bench_gate
import pytest

STORED = {"timed": {"decode_over_mlx_lm": 1.6, "verify_4_over_own_step": 1.5}, "counted": {"nodes_1": 400.0}}


@pytest.mark.parametrize(
    ("kind", "name", "value", "worse"),
    [
        ("timed", "decode_over_mlx_lm", 1.4, False),
        ("timed", "decode_over_mlx_lm", 1.3, True),
        ("timed", "decode_over_mlx_lm", 2.5, False),
        ("timed", "verify_4_over_own_step", 1.7, False),
        ("timed", "verify_4_over_own_step", 1.8, True),
        ("timed", "verify_4_over_own_step", 1.0, False),
        ("counted", "nodes_1", 405.0, False),
        ("counted", "nodes_1", 420.0, True),
        ("counted", "nodes_4", 900.0, False),
    ],
)
def test_worse_is_told_from_better(kind: str, name: str, value: float, worse: bool) -> None:
    ((line, found),) = bench_gate.compare(STORED, {kind: {name: value}})
    assert found is worse
    assert name in line
    assert line.startswith("!") is worse


def test_a_machine_is_held_against_itself_and_an_unknown_one_against_the_least() -> None:
    stored = {
        "fast": {"decode_over_mlx_lm": 2.6, "verify_4_over_own_step": 1.7},
        "slow": {"decode_over_mlx_lm": 1.9, "verify_4_over_own_step": 1.5},
    }
    assert bench_gate.timed_of(stored, "fast") == stored["fast"]
    assert bench_gate.timed_of(stored, "other") == {"decode_over_mlx_lm": 1.9, "verify_4_over_own_step": 1.7}
    assert bench_gate.timed_of({}, "other") == {}


def test_what_is_stored_covers_what_is_measured_without_a_clock() -> None:
    counted = json.loads(bench_gate.STORED.read_text())["counted"]
    assert counted["nodes_1"] < counted["nodes_4"]
    assert counted["tokens_a_round_edit_ngram-simple+mtp"] > counted["tokens_a_round_edit_mtp"] > 1


@pytest.mark.slow
def test_the_gate_itself(tmp_path: Path) -> None:
    command = [sys.executable, str(bench_gate.ROOT / "scripts" / "bench_gate.py"), "--counts"]
    env = {k: v for k, v in os.environ.items() if k != "MLX_DISABLE_COMPILE"}  # compiled nodes are counted
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Nothing is worse" in done.stdout
