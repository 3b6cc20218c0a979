"""`mlxspec versus` against mlx_lm.server with the same weights of a real model in float32: the same texts, and a ratio with its range."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlxspec.bench.rival import Rival

QUESTIONS = [
    f"What is {what}?"
    for what in (
        "a list", "the moon", "bread", "a river", "a prime number", "rain", "a cat", "the sun", "a book", "salt",
    )
]  # fmt: skip
SECONDS = 120.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def in_float32(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(smollm, tmp_path_factory.mktemp("models") / "smollm"))
    for path in folder.glob("*.safetensors"):
        weights = {name: value.astype(mx.float32) for name, value in mx.load(str(path)).items()}  # type: ignore[union-attr]
        mx.eval(weights)
        mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32", "dtype": "float32"}))
    return folder


@pytest.fixture(scope="module")
def server(in_float32: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rival]:
    """mlx_lm.server, once it listens."""
    from tests.engine.rank_processes import free_ports

    (port,) = free_ports(1)
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(in_float32), "--port", str(port)]
    with (tmp_path_factory.mktemp("log") / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    rival = Rival(url=f"http://127.0.0.1:{port}", model=str(in_float32))
    try:
        until = time.monotonic() + SECONDS
        while True:
            assert process.poll() is None
            assert time.monotonic() < until
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.2)
        yield rival
    finally:
        process.kill()
        process.wait()


def test_thirty_pairs_of_the_same_texts(server: Rival, in_float32: Path) -> None:
    asked = [word for question in QUESTIONS for word in ("--ask", question)]
    command = [sys.executable, "-m", "mlxspec", "versus", server.url, "-m", str(in_float32), "--json"]
    more = ["--rival-model", server.model, "--longest", "48", *asked]
    ran = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    data = json.loads(ran.stdout)
    pairs = [(prompt, turn) for prompt in data["prompts"] for turn in prompt["turns"]]
    assert len(pairs) == 30
    assert all(prompt["same_text"] for prompt in data["prompts"])
    assert all(t["own"]["tokens"] > 8 and t["rival"]["tokens"] == t["own"]["tokens"] for _, t in pairs)
    assert all(prompt["ratio"]["least"] > 0 for prompt in data["prompts"])
    assert data["rival"]["resident_bytes"] > 100 << 20
