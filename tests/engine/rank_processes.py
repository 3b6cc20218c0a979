"""Starts ranks on this machine as mlx.launch does, each a process, and tells what became of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """One rank's exit code and what it printed."""

    code: int
    out: str
    err: str


def free_ports(num: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    ports = [s.getsockname()[1] for s in sockets]
    for each in sockets:
        each.close()
    return ports


def start(
    arguments: Sequence[Sequence[str]], folder: Path, more: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """One process a rank: `python ARGUMENTS`. folder: for the file that names the ranks' ports. more: variables of the environment."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(len(arguments))]))
    common = os.environ | {"MLX_HOSTFILE": str(hosts), "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return [
        subprocess.Popen(
            [sys.executable, *own],
            cwd=ROOT,
            env=common | {"MLX_RANK": str(rank)} | dict(more or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, own in enumerate(arguments)
    ]


def run(
    arguments: Sequence[Sequence[str]],
    folder: Path,
    seconds: float,
    more: Mapping[str, str] | None = None,
) -> list[Ended]:
    """Start ranks and wait for all of them; none is left behind."""
    processes = start(arguments, folder, more)
    try:
        said = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [Ended(p.returncode, out, err) for p, (out, err) in zip(processes, said, strict=True)]
