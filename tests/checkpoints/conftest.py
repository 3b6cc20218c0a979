"""A hub on this machine with a few repositories, and a home for what is fetched from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from hub_machine import Machine
from hub_server import HubServer

from mlxspec.platform.resources import demo_folder


@pytest.fixture(scope="session")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """owner/demo is the demo model; the others differ in one way each."""
    root = tmp_path_factory.mktemp("hub")
    found = {"owner/demo": demo_folder("target"), "owner/gated": demo_folder("draft")}
    for name, changes in {"owner/other": {"model_type": "gpt-of-nobody"}, "owner/vast": {}}.items():
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


@pytest.fixture(scope="session")
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
    hub.cards.clear()
    hub.stall_after.clear()
    hub.break_after.clear()
    hub.ignores_ranges.clear()
    hub.stalled.clear()
    hub.released.clear()
    return one_machine
