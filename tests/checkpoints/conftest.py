"""A hub on this machine with a few repositories, and a home for what is fetched from it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hub_server import HubServer

from mlxspec.resources import demo_folder

_DRIVER = """
import contextlib, io, json, sys
from mlxspec.cli.main import main
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(json.loads(line))
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""
TIMEOUT = 240  # seconds; a loaded machine is slow


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class Machine:
    """A user's machine: an HF_HOME of its own, and processes that talk to the stand-in only."""

    def __init__(self, hub: HubServer, home: Path) -> None:
        self.hub, self.home = hub, home

    def environment(self, **more: str) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        return (
            clean | {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home), "HF_HUB_DISABLE_XET": "1"} | more
        )

    def run(self, *commands: Sequence[str], **environment: str) -> list[Ran]:
        """Several commands, one after another, in one process."""
        lines = "".join(json.dumps(list(c)) + "\n" for c in commands)
        done = subprocess.run(
            [sys.executable, "-c", _DRIVER],
            input=lines,
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        assert done.returncode == 0, done.stderr
        assert not done.stderr, done.stderr  # nothing beside what commands print
        return [Ran(*json.loads(line)) for line in done.stdout.splitlines()]

    def begin(self, *command: str) -> subprocess.Popen[str]:
        """One command in a process of its own, left running."""
        return subprocess.Popen(
            [sys.executable, "-m", "mlxspec", *command],
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture(scope="session")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """owner/demo is the demo model; the others differ in one way each."""
    root = tmp_path_factory.mktemp("hub")
    found = {"owner/demo": demo_folder("target"), "owner/gated": demo_folder("draft")}
    for name, changes in {"owner/other": {"model_type": "gpt2"}, "owner/vast": {}}.items():
        folder = root / name.replace("/", "-")
        shutil.copytree(demo_folder("draft"), folder)
        config = json.loads((folder / "config.json").read_text()) | changes
        if name == "owner/vast":
            config |= {"num_hidden_layers": 96, "hidden_size": 16384, "intermediate_size": 65536}
            config |= {"vocab_size": 1 << 20, "layer_types": None, "full_attention_interval": 4}
        (folder / "config.json").write_text(json.dumps(config))
        found[name] = folder
    code = root / "owner-code"
    shutil.copytree(demo_folder("draft"), code)
    for name in ("modeling_evil.py", "pytorch_model.bin", "weights.pt", "data.npz", "notes.txt"):
        (code / name).write_text("raise SystemExit('run')")
    found["owner/code"] = code
    empty = root / "owner-empty"
    empty.mkdir()
    (empty / "README.md").write_text("nothing")
    found["owner/empty"] = empty
    return found


@pytest.fixture
def machine(repositories: dict[str, Path], tmp_path: Path) -> Iterator[Machine]:
    hub = HubServer()
    hub.repos, hub.gated = dict(repositories), {"owner/gated"}
    yield Machine(hub, tmp_path / "home")
    hub.close()
