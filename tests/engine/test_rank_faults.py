"""Each fault that rank_faults.py plants into ranks ends as it should, once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import rank_faults
import rank_processes


@pytest.mark.slow
@pytest.mark.parametrize("name", list(rank_faults.FAULTS))
def test_ranks_end_as_promised(name: str) -> None:
    """All answers with an error and all processes within ten seconds, and the port is free."""
    assert rank_faults.plant(name).wrong == []


def test_a_rank_whose_others_never_start_ends(tmp_path: Path) -> None:
    """MLX waits for them for ever, and lets no thread of Python run meanwhile."""
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in rank_processes.free_ports(2)]))
    program = "from mlxspec.engine.ranks import peers; peers.START_SECONDS = 1.0; peers.join()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=rank_processes.ROOT,
        env=os.environ | {"MLX_HOSTFILE": str(hosts), "MLX_RANK": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stderr.strip() == "mlxspec: error: Rank 0 has waited 1 seconds for the other ranks to start."
