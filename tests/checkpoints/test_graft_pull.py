"""Heads taken from a repository of the hub: only the files that hold them are fetched. And what the command prints while it works."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
import tiny
from hub_machine import Machine

from mlxspec.checkpoints.convert import Wish, convert
from mlxspec.cli.main import main
from mlxspec.loading import progress
from mlxspec.loading.weights import read_folder

SHAPE = tiny.SHAPES["grouped"]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards, the head in the last one alone."""
    folder = tmp_path_factory.mktemp("original") / "model"
    tiny.write_hub(folder, SHAPE)
    tensors = read_folder(folder)
    head = {k: v for k, v in tensors.items() if k.startswith("mtp.")}
    rest = sorted(tensors.keys() - head.keys())
    parts = [{k: tensors[k] for k in rest[::2]}, {k: tensors[k] for k in rest[1::2]}, head]
    mx.eval(parts)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    places = {}
    for i, part in enumerate(parts):
        name = f"model-{i + 1:05d}-of-00003.safetensors"
        mx.save_safetensors(str(folder / name), part)
        places |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


@pytest.fixture(scope="module")
def quantized(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As mlx-lm converts it: without the head."""
    out = tmp_path_factory.mktemp("quantized") / "model"
    return tiny.convert(original, out, tiny.Quantization(bits=4, group_size=32))


def test_only_the_bytes_of_the_head_are_fetched(
    machine: Machine, original: Path, quantized: Path, tmp_path: Path
) -> None:
    machine.hub.repos["owner/original"] = original
    out = tmp_path / "out"
    ran = machine.run("convert", str(quantized), "-o", str(out), "--graft-mtp", "owner/original")
    assert ran.code == 0, ran
    assert "an MTP head of" in ran.out
    fetched = {name for name in machine.hub.served if name.endswith(".safetensors")}
    assert fetched == {"model-00003-of-00003.safetensors"}
    report = json.loads(machine.run("inspect", str(out), "--json").out)
    assert report["head"]["present"]
    assert next(iter(report["head"]["formats"])) == "4 bits in groups of 64"
    again = machine.run(
        "convert", str(quantized), "-o", str(tmp_path / "again"), "--graft-mtp", "owner/original"
    )
    assert again.code == 0, again
    shard = original / "model-00003-of-00003.safetensors"  # holds nothing else
    with shard.open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    # the second time this process has the head, and asks for the header only
    assert machine.hub.served[shard.name] == shard.stat().st_size + header
    assert not list((machine.home / "hub").glob("models--*"))


def test_a_repository_without_a_head(machine: Machine, quantized: Path, tmp_path: Path) -> None:
    machine.hub.repos["owner/headless"] = quantized
    ran = machine.run("convert", str(quantized), "-o", str(tmp_path / "out"), "--graft-mtp", "owner/headless")
    assert ran.code == 2
    assert "no MTP head" in ran.err
    assert not machine.hub.served["model.safetensors"]
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_fetched_to_be_converted(machine: Machine, original: Path, tmp_path: Path) -> None:
    machine.hub.repos["owner/original"] = original
    ran = machine.run("convert", "owner/original", "-o", str(tmp_path / "out"), "-q", "--group-size", "32")
    assert ran.code == 0, ran
    assert "left out: 1." in ran.err
    listed = json.loads(machine.run("models", "--json").out)["models"][0]
    assert listed["name"] == "owner/original"
    assert listed["has_head"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo"], "Name the folder"),
        (["demo", "-o", ""], "Name the folder"),
        (["demo", "-o", "{tmp}"], "exists already"),
        (["demo", "-o", "{tmp}/new", "--bits", "7"], "--bits must be one of"),
        (["demo", "-o", "{tmp}/new", "--mode", "int4"], "--mode must be one of"),
        (["demo", "-o", "{tmp}/new", "--mtp-bits", "5"], "--mtp-bits must be one of"),
        (["demo", "-o", "{tmp}/new", "--dtype", "int8"], "--dtype must be one of"),
        (["demo-draft", "-o", "{tmp}/new", "--mtp-bits", "4"], "no MTP head"),
        (["/no/such", "-o", "{tmp}/new"], "/no/such"),
        (["demo", "-o", "{tmp}/taken/new"], "cannot be written to"),
    ],
)
def test_what_is_refused(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("a file")
    assert main(["convert", *(a.format(tmp=tmp_path) for a in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words in err
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_all_of_the_work_is_told(quantized: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []

    class Watcher:
        def __init__(self, what: str, total: int) -> None:
            told.append((what, total))

        def __enter__(self) -> progress.Step:
            return lambda done: told.append(("step", done))

        def __exit__(self, *_: object) -> None:
            told.append(("end", 0))

    with progress.watched_by(Watcher):
        made = convert(str(quantized), tmp_path / "out", Wish())
    assert told[0] == (f"converting {quantized}", made.trunk_bytes)
    assert told[-1] == ("end", 0)
    assert sum(done for what, done in told if what == "step") == made.trunk_bytes


IMPATIENT = """
import sys
from mlxspec.cli import main, progress_bar
progress_bar._PATIENCE = -1.0  # the demo is converted before a bar would come
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.terminal
def test_a_terminal_shows_a_bar(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-c", IMPATIENT, "convert", "demo", "-o", str(tmp_path / "out"), "-q"]
    done = subprocess.Popen(command, stderr=theirs, stdout=subprocess.PIPE, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    out, _ = done.communicate(timeout=200)
    assert done.returncode == 0
    assert b"converting demo" in shown
    assert b"an MTP head of" in out
