"""Engines over divided models answer as one process does. With the fixed policy nothing that ranks decide depends on a clock, so they need
no message but those of the forwards."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine import ranks_side

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 200


@pytest.mark.slow
def test_demo_over_two_ranks(tmp_path: Path) -> None:
    """Greedy and seeded, plain and with each kind of drafter: every rank has the tokens of plain decoding in one process."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    command = [sys.executable, "-m", "tests.engine.ranks_side", str(tmp_path)]
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"MLX_RANK": str(r), "MLX_HOSTFILE": str(hosts)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    plain = ranks_side.cases(ranks_side.engine())[ranks_side.PLAIN]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert list(found) == list(ranks_side.DRAFTERS)
        for names, tokens in found.items():
            assert tokens == plain, f"rank {rank}, {names}"
