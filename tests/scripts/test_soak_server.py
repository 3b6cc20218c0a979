"""A short soak: twenty clients of mixed manners leave a server as it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "soak_server.py"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_minute_of_mixed_manners() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--seconds", "60"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
