"""The benchmark of an agent: its model says the trace, and earlier texts are accepted in the second conversation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_short_conversation() -> None:
    command = [sys.executable, "scripts/bench_agent.py", "--turns", "2", "--chars", "120", "--rounds", "1"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    later = re.search(r"^\| 2 and later \| ([\d.]+) \| ([\d.]+) \|", ran.stdout, re.MULTILINE)
    assert later is not None, ran.stdout
    assert float(later[2]) > 1  # tokens a round with earlier texts
