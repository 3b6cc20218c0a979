"""A hub on this machine with a few repositories, and a home for what is fetched from it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import pytest
from hub_server import HubServer

from mlxspec.resources import demo_folder

_DRIVER = """
import contextlib, io, json, os, sys
from mlxspec.cli.main import main
for line in sys.stdin:
    command, token = json.loads(line)
    os.environ["HF_TOKEN"] = token
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(command)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class Machine:
    """A user's machine: an HF_HOME of its own, and processes that talk to the stand-in only. `run` uses one process for all."""

    def __init__(self, hub: HubServer, home: Path, **environment: str) -> None:
        self.hub, self.home, self._more = hub, home, environment
        self._driver: subprocess.Popen[str] | None = None

    @property
    def environment(self) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        ours = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home), "HF_HUB_DISABLE_XET": "1"}
        ours["HF_HUB_DOWNLOAD_TIMEOUT"] = "300"  # whoever waits for us may be stopped for long
        return clean | ours | self._more

    def run(self, *command: str, token: str = "") -> Ran:
        if self._driver is None:
            self._driver = self._process("-c", _DRIVER, stdin=subprocess.PIPE)
        stdin, stdout = self._driver.stdin, self._driver.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([command, token]) + "\n")
        stdin.flush()
        return Ran(*json.loads(stdout.readline()))

    def begin(self, *command: str) -> subprocess.Popen[str]:
        """One command in a process of its own, left running."""
        return self._process("-m", "mlxspec", *command)

    def close(self) -> None:
        if self._driver is not None:
            _, said = self._driver.communicate()
            assert not said, said  # nothing beside what commands print

    def _process(self, *arguments: str, stdin: int | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=self.environment,
            stdin=stdin,
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
    large = (
        root / "owner-large"
    )  # as large as the hub's library must be interrupted behind its first chunk, 10 MiB
    shutil.copytree(demo_folder("target"), large)
    tensors = mx.load(str(large / "model.safetensors"))
    mx.save_safetensors(
        str(large / "model.safetensors"), {k: v.astype(mx.float32) for k, v in tensors.items()}
    )
    found["owner/large"] = large
    empty = root / "owner-empty"
    empty.mkdir()
    (empty / "README.md").write_text("nothing")
    found["owner/empty"] = empty
    return found


@pytest.fixture(scope="module")
def one_machine(repositories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    hub = HubServer()
    machine = Machine(hub, tmp_path_factory.mktemp("machine") / "home")
    yield machine
    machine.close()
    hub.close()


@pytest.fixture
def machine(one_machine: Machine, repositories: dict[str, Path]) -> Machine:
    """With an empty cache, and a hub that has counted nothing."""
    shutil.rmtree(one_machine.home, ignore_errors=True)
    hub = one_machine.hub
    hub.repos, hub.gated = dict(repositories), {"owner/gated"}
    hub.served.clear()
    hub.requests.clear()
    hub.stall_after.clear()
    hub.stalled.clear()
    hub.released.clear()
    return one_machine
