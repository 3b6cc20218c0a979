"""`mlxspec pull`, `list` and `rm` against a hub on this machine, each in a process with its own HF_HOME."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conftest import Machine, Ran
from hub_server import COMMIT

from mlxspec.resources import demo_folder

WEIGHTS = demo_folder("target") / "model.safetensors"


def refused(ran: Ran, *words: str) -> None:
    """One sentence, and nothing else."""
    assert ran.code == 2, ran
    assert ran.out == ""
    assert ran.err.splitlines()[-1].startswith("mlxspec: error: ")
    assert "Traceback" not in ran.err
    for word in words:
        assert word in ran.err, ran.err


def test_pull_list_use_remove(machine: Machine) -> None:
    """The life of a model in the cache, and each file fetched once."""
    pull, again, listed, inspected, chat, removed, after, gone = machine.run(
        ["pull", "owner/demo"],
        ["pull", "owner/demo", "--json"],
        ["list", "--json"],
        ["inspect", "owner/demo", "--json"],
        ["generate", "--model", "owner/demo", "-p", "hi", "--max-tokens", "4", "--draft", "mtp"],
        ["rm", "owner/demo", "--yes"],
        ["list"],
        ["rm", "owner/demo", "--yes"],
    )
    assert pull.code == 0, pull
    assert COMMIT in pull.out
    assert "8.93 MB" in pull.err
    assert machine.hub.served["model.safetensors"] == WEIGHTS.stat().st_size  # and not twice
    assert json.loads(again.out)["fetched"] == 0
    assert json.loads(again.out)["revision"] == COMMIT
    entry = json.loads(listed.out)["models"][0]
    expected = {"name": "owner/demo", "revision": COMMIT, "refs": ["main"], "model_type": "qwen3_5"}
    assert entry | expected | {"has_head": True, "is_complete": True, "quantization": "bfloat16"} == entry
    assert json.loads(inspected.out)["revision"] == COMMIT
    assert chat.code == 0, chat
    assert removed.code == 0
    assert "8.93 MB freed" in removed.out
    assert not list((machine.home / "hub").glob("models--*"))
    assert "no model" in after.out
    refused(gone, "owner/demo is not in the cache")


def test_an_interrupted_pull_goes_on(machine: Machine) -> None:
    """Killed half way through a file: the second run asks for the rest of that file only."""
    half = WEIGHTS.stat().st_size // 2
    machine.hub.stall_after["model.safetensors"] = half
    first = machine.begin("pull", "owner/demo")
    assert machine.hub.stalled.wait(200)
    part = None
    while part is None or part.stat().st_size < half - (
        1 << 20
    ):  # what has arrived is on its way to the disk
        part = next((machine.home / "hub").rglob("*.mlxspec-part"), None)
        assert first.poll() is None or part is not None
    first.kill()
    first.communicate()
    kept = part.stat().st_size
    assert kept > half - (2 << 20)
    machine.hub.released.set()
    machine.hub.served.clear()
    listed, _, second = machine.run(["list"], ["inspect", "owner/demo"], ["pull", "owner/demo"])
    assert "incomplete" in listed.err
    assert second.code == 0, second
    assert "here already" in second.err
    assert machine.hub.served["model.safetensors"] == WEIGHTS.stat().st_size - kept
    assert machine.hub.served["tokenizer.json"] == 0
    folder = Path(second.out.splitlines()[1])
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS.read_bytes()
    assert not list((machine.home / "hub").rglob("*.mlxspec-part"))


def test_a_damaged_part_is_not_trusted(machine: Machine) -> None:
    machine.hub.stall_after["model.safetensors"] = 4 << 20
    first = machine.begin("pull", "owner/demo")
    assert machine.hub.stalled.wait(200)
    first.kill()
    first.communicate()
    machine.hub.released.set()
    part = next((machine.home / "hub").rglob("*.mlxspec-part"))
    part.write_bytes(b"x" * (1 << 20))
    bad, good = machine.run(["pull", "owner/demo"], ["pull", "owner/demo"])
    refused(bad, "arrived damaged", "pull it again")
    assert good.code == 0, good


def test_what_the_hub_does_not_give(machine: Machine) -> None:
    none, gated, revision, hostile, other, empty, vast, forced, path = machine.run(
        ["pull", "owner/none"],
        ["pull", "owner/gated"],
        ["pull", "owner/demo", "--revision", "v9"],
        ["pull", "owner/demo", "--revision", "../../etc"],
        ["pull", "owner/other"],
        ["pull", "owner/empty"],
        ["pull", "owner/vast"],
        ["pull", "owner/vast", "--force"],
        ["pull", "../up/one"],
    )
    refused(none, "owner/none", "HF_TOKEN")
    refused(gated, "gated", "HF_TOKEN")
    refused(revision, "v9")
    refused(hostile, "branch, tag or commit")
    refused(other, "gpt2", "not supported")
    refused(empty, "config.json")
    refused(vast, "memory", "--force")
    assert forced.code == 0, forced
    refused(path, "owner/name")
    weights = (demo_folder("draft") / "model.safetensors").stat().st_size
    assert (
        machine.hub.served["model.safetensors"] == weights
    )  # the forced one; all others were refused before


def test_a_token_opens_what_is_gated(machine: Machine) -> None:
    [ran] = machine.run(["pull", "owner/gated"], HF_TOKEN=machine.hub.TOKEN)
    assert ran.code == 0, ran


def test_only_data_is_fetched(machine: Machine) -> None:
    [ran] = machine.run(["pull", "owner/code"])
    assert ran.code == 0, ran
    names = {p.name for p in Path(ran.out.splitlines()[1]).iterdir()}
    assert {p.rsplit(".", 1)[1] for p in names} == {"json", "jinja", "safetensors"}
    assert not [r for r in machine.hub.requests if r.endswith((".py", ".bin", ".pt", ".npz", ".txt"))]


def test_offline(machine: Machine) -> None:
    machine.run(["pull", "owner/demo"])
    machine.hub.requests.clear()
    there, pull, load = machine.run(
        ["inspect", "owner/demo", "--json"],
        ["pull", "owner/code"],
        ["generate", "--model", "owner/code", "-p", "x"],
        HF_HUB_OFFLINE="1",
    )
    assert there.code == 0, there
    refused(pull, "HF_HUB_OFFLINE")
    refused(load, "HF_HUB_OFFLINE")
    assert not machine.hub.requests


def test_no_hub(machine: Machine) -> None:
    [ran] = machine.run(["pull", "owner/demo"], HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_ETAG_TIMEOUT="1")
    refused(ran, "cannot be reached")


def test_a_link_out_of_the_cache(machine: Machine, tmp_path: Path) -> None:
    [pulled] = machine.run(["pull", "owner/demo"])
    file = Path(pulled.out.splitlines()[1]) / "tokenizer_config.json"
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    file.unlink()
    os.symlink(secret, file)
    inspected, listed, generated = machine.run(
        ["inspect", "owner/demo"], ["list"], ["generate", "--model", "owner/demo", "-p", "x"]
    )
    refused(inspected, "tokenizer_config.json", "out of the cache")
    refused(generated, "out of the cache")
    assert "out of the cache" in listed.err


def test_rm_asks_first(machine: Machine) -> None:
    pulled, without, revision, one = machine.run(
        ["pull", "owner/demo"],
        ["rm", "owner/demo"],
        ["rm", "owner/demo", "--revision", "v9"],
        ["rm", "owner/demo", "--revision", "main", "--yes"],
    )
    assert pulled.code == 0
    refused(without, "--yes", "8.93 MB")
    refused(revision, "v9")
    assert one.code == 0, one


@pytest.mark.parametrize("command", ["pull", "rm", "inspect"])
def test_a_name_is_needed(machine: Machine, command: str) -> None:
    missing, empty = machine.run([command], [command, ""])
    refused(missing, "MODEL" if command == "inspect" else "repo")
    refused(empty)
