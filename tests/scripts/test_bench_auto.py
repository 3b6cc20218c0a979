"""The comparison of auto with plain decoding runs two processes a cell, the second on the first one's costs, and fails below its limits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import bench_auto
import pytest
import write_checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))

import tiny


@pytest.mark.slow
def test_two_processes_a_cell(tmp_path: Path) -> None:
    config = write_checkpoint.cut(tiny.hub_config(tiny.SHAPES["tied"]), None, 3000)
    write_checkpoint.write(tmp_path / "model", config)
    command = [sys.executable, bench_auto.__file__, str(tmp_path / "model"), "--tokens", "16"]
    command += ["--temperatures", "1", "--pairs", "2", "--json", str(tmp_path / "out.json")]
    for limits, code in (("0,0", 0), ("1000,0", 1)):
        done = subprocess.run([*command, "--limits", limits], capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
    first, second = json.loads((tmp_path / "out.json").read_text())
    assert (first["process"], second["process"]) == ("first", "second")
    assert first["same"]
    assert second["same"]
    assert len(first["ratios"]) == 2
    assert "mtp" in first["drafts"]
    assert set(first["measured"]) <= set(second["measured"])


def test_limits_are_two_numbers() -> None:
    assert bench_auto._limits("0.95,0.98") == (0.95, 0.98)
    with pytest.raises(ValueError, match="unpack"):
        bench_auto._limits("0.95")
