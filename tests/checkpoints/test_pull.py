"""`mlxspec pull`, `list` and `rm` against a hub on this machine, each in a process with its own HF_HOME."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hub_machine import Machine, Ran
from hub_server import COMMIT
from planting import catches, rewritten

from mlxspec.checkpoints.cache import removal
from mlxspec.cli.main import main
from mlxspec.platform.resources import demo_folder
from tests.models import adapted_zoo

WEIGHTS = demo_folder("target") / "model.safetensors"
SENT = 14 << 20  # bytes that the stand-in sends before it stops


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
    run = machine.run
    pulled = run("pull", "owner/demo")
    assert pulled.code == 0, pulled
    assert COMMIT in pulled.out
    assert "8.93 MB" in pulled.err
    again = run("pull", "owner/demo", "--json")
    assert json.loads(again.out)["fetched"] == 0
    assert json.loads(again.out)["revision"] == COMMIT
    size = WEIGHTS.stat().st_size
    assert (
        size <= machine.hub.served["model.safetensors"] < size + (1 << 16)
    )  # headers were read; and not twice
    entry = json.loads(run("models", "--json").out)["models"][0]
    expected = {"name": "owner/demo", "revision": COMMIT, "refs": ["main"], "model_type": "qwen3_5"}
    assert entry | expected | {"has_head": True, "is_complete": True, "quantization": "bfloat16"} == entry
    assert json.loads(run("inspect", "owner/demo", "--json").out)["revision"] == COMMIT
    seen = len(machine.hub.requests)
    answer = run("generate", "--model", "owner/demo", "-p", "hi", "--max-tokens", "4", "--draft", "mtp")
    assert answer.code == 0, answer
    assert len(machine.hub.requests) == seen  # what is in the cache is used without asking
    removed = run("rm", "owner/demo", "--yes")
    assert removed.code == 0
    assert "8.93 MB freed" in removed.out
    assert not list((machine.home / "hub").glob("models--*"))
    assert "no model" in run("models").out
    refused(run("rm", "owner/demo", "--yes"), "owner/demo is not in the cache")


def test_an_interrupted_pull_keeps_whole_files(machine: Machine) -> None:
    """Killed half way through the weights: the second run fetches them again, and no other file."""
    whole = (machine.hub.repos["owner/large"] / "model.safetensors").read_bytes()
    machine.hub.stall_after["model.safetensors"] = SENT
    first = machine.begin("pull", "owner/large", "--drafter", "none")
    assert machine.hub.stalled.wait(200)
    first.kill()
    first.communicate()
    machine.hub.released.set()
    machine.hub.served.clear()
    assert "incomplete" in machine.run("models").err
    second = machine.run("pull", "owner/large", "--drafter", "none")
    assert second.code == 0, second
    assert len(whole) <= machine.hub.served["model.safetensors"] < len(whole) + (1 << 16)  # its header
    assert machine.hub.served["tokenizer.json"] == 0
    folder = Path(second.out.splitlines()[1])
    assert (folder / "model.safetensors").read_bytes() == whole


def test_a_connection_that_breaks_is_taken_up_again(machine: Machine) -> None:
    """Within one pull the hub's library goes on inside a file."""
    machine.hub.stall_after["model.safetensors"] = SENT
    machine.hub.released.set()
    ran = machine.run("pull", "owner/large")
    assert ran.code == 0, ran
    whole = (machine.hub.repos["owner/large"] / "model.safetensors").stat().st_size
    assert machine.hub.served["model.safetensors"] < SENT + whole


def test_two_pulls_at_once(machine: Machine) -> None:
    """The second waits for the first, and fetches nothing again."""
    machine.hub.stall_after["model.safetensors"] = 1 << 20
    first = machine.begin("pull", "owner/demo")
    assert machine.hub.stalled.wait(200)
    second = machine.begin("pull", "owner/demo")
    machine.hub.released.set()
    for process in (first, second):
        _, said = process.communicate(timeout=200)
        assert process.returncode == 0, said
    assert machine.hub.served["model.safetensors"] <= WEIGHTS.stat().st_size + (1 << 20)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("owner/none", ("owner/none", "HF_TOKEN")),
        ("owner/gated", ("gated", "HF_TOKEN")),
        ("owner/demo --revision v9", ("v9",)),
        ("owner/demo --revision ../../etc", ("branch, tag or commit",)),
        ("owner/other", ("gpt-of-nobody", "not supported")),
        ("owner/empty", ("config.json",)),
        ("owner/vast", ("memory", "--force")),
        ("../up/one", ("owner/name",)),
        ("", ("MODEL",)),
    ],
)
def test_what_the_hub_does_not_give(machine: Machine, arguments: str, words: tuple[str, ...]) -> None:
    refused(machine.run("pull", *arguments.split()), *words)
    assert machine.hub.served["model.safetensors"] == 0


def test_what_does_not_fit_can_be_forced(machine: Machine) -> None:
    ran = machine.run("pull", "owner/vast", "--force")
    assert ran.code == 0, ran


def test_a_token_opens_what_is_gated(machine: Machine) -> None:
    ran = machine.run("pull", "owner/gated", token=machine.hub.TOKEN)
    assert ran.code == 0, ran


def test_only_data_is_fetched(machine: Machine) -> None:
    ran = machine.run("pull", "owner/code")
    assert ran.code == 0, ran
    names = {p.name for p in Path(ran.out.splitlines()[1]).iterdir()}
    assert {p.rsplit(".", 1)[1] for p in names} == {"json", "jinja", "safetensors"}
    assert not [r for r in machine.hub.requests if r.endswith((".py", ".bin", ".pt", ".npz", ".txt"))]


def test_offline(machine: Machine) -> None:
    machine.run("pull", "owner/demo")
    machine.hub.requests.clear()
    offline = Machine(machine.hub, machine.home, HF_HUB_OFFLINE="1")
    there = offline.run("inspect", "owner/demo", "--json")
    assert there.code == 0, there
    refused(offline.run("pull", "owner/code"), "HF_HUB_OFFLINE")
    refused(
        offline.run("pull", "owner/demo"), "HF_HUB_OFFLINE"
    )  # whether what is here is the newest cannot be known
    refused(offline.run("generate", "--model", "owner/code", "-p", "x"), "HF_HUB_OFFLINE")
    offline.close()
    assert not machine.hub.requests


def test_a_head_in_a_folder_comes_along_and_nothing_else_does(machine: Machine, tmp_path: Path) -> None:
    tensors = mx.load(str(WEIGHTS))
    folder = tmp_path / "split"
    shutil.copytree(WEIGHTS.parent, folder)
    for place in ("mtp", "original"):
        (folder / place).mkdir()
    head = {k.removeprefix("mtp."): v for k, v in tensors.items() if k.startswith("mtp.")}
    mx.save_safetensors(str(folder / "mtp" / "head.safetensors"), head)
    mx.save_safetensors(str(folder / "original" / "consolidated.safetensors"), head)
    (folder / "mtp" / "deeper").mkdir()
    for name in ("mtp/config.json", "mtp/head.py", "mtp/deeper/config.json", "original/params.json"):
        (folder / name).write_text("{}")
    rest = {k: v for k, v in tensors.items() if not k.startswith("mtp.")}
    mx.eval(rest)
    mx.save_safetensors(str(folder / "model.safetensors"), rest)
    machine.hub.repos["owner/split"] = folder
    pulled = machine.run("pull", "owner/split")
    assert pulled.code == 0, pulled
    here = Path(pulled.out.splitlines()[1])
    deep = {str(p.relative_to(here)) for p in here.rglob("*/*") if p.is_file()}
    assert deep == {"mtp/head.safetensors", "mtp/config.json"}
    report = json.loads(machine.run("inspect", "owner/split", "--json").out)
    assert report["head"]["present"]
    assert json.loads(machine.run("models", "--json").out)["models"][0]["has_head"]
    assert machine.hub.served["consolidated.safetensors"] == 0


@pytest.mark.slow
def test_no_hub(machine: Machine) -> None:
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_ETAG_TIMEOUT": "1"}
    alone = Machine(machine.hub, machine.home, **nowhere)
    refused(alone.run("pull", "owner/demo"), "cannot be reached")
    alone.close()


def test_a_link_out_of_the_cache(machine: Machine, tmp_path: Path) -> None:
    file = Path(machine.run("pull", "owner/demo").out.splitlines()[1]) / "tokenizer_config.json"
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    file.unlink()
    os.symlink(secret, file)
    refused(machine.run("inspect", "owner/demo"), "tokenizer_config.json", "out of")
    refused(machine.run("generate", "--model", "owner/demo", "-p", "x"), "out of")
    assert "out of" in machine.run("models").err


def test_rm_asks_first(machine: Machine) -> None:
    assert machine.run("pull", "owner/demo").code == 0
    refused(machine.run("rm", "owner/demo"), "--yes", "8.93 MB")
    refused(machine.run("rm", "owner/demo", "--revision", "v9"), "v9")
    assert machine.run("rm", "owner/demo", "--revision", "main", "--yes").code == 0


@pytest.mark.parametrize("command", ["pull", "rm", "inspect"])
def test_a_name_is_needed(machine: Machine, command: str) -> None:
    refused(machine.run(command), "MODEL")
    refused(machine.run(command, ""))


@pytest.mark.parametrize(
    ("answer", "goes"), [("y\n", True), ("Yes\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_rm_does_what_is_answered(
    answer: str,
    goes: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = tmp_path / "models--owner--demo"
    folder = home / "snapshots" / COMMIT
    (home / "blobs").mkdir(parents=True)
    (home / "refs").mkdir()
    folder.mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    (home / "blobs" / "abc").write_text("{}" * 500)
    (folder / "config.json").symlink_to(home / "blobs" / "abc")
    (home / "blobs" / "abc.incomplete").write_bytes(bytes(500))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("mlxspec.cli.terminal.is_terminal", lambda _: True)
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    assert main(["rm", "owner/demo"]) == (0 if goes else 1)
    out = capsys.readouterr().out
    assert "Remove owner/demo (c0ffee000000), 1.5 kB? [y/N]" in out
    assert ("1.5 kB freed" if goes else "Nothing was removed") in out
    assert home.exists() != goes


@catches(
    "what another revision's download has fetched goes with the first one",
    "mlxspec.checkpoints.cache:removal",
    rewritten("if len(chosen) == len(repo.revisions) else []", "if chosen else []"),
)
def test_what_a_broken_download_left_goes_with_the_last_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "models--owner--demo"
    part = home / "blobs" / "abc.incomplete"
    (home / "refs").mkdir(parents=True)
    (home / "blobs").mkdir()
    for digit in "12":
        folder = home / "snapshots" / (digit * 40)
        folder.mkdir(parents=True)
        (home / "refs" / f"v{digit}").write_text(digit * 40)
        (home / "blobs" / digit).write_text("{}" * 500)
        (folder / "config.json").symlink_to(home / "blobs" / digit)
    part.write_bytes(bytes(500))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert removal("owner/demo").freed == 2500
    first = removal("owner/demo", "v1")
    assert first.freed == 1000
    first.execute()
    assert [path.name for path in (home / "snapshots").iterdir()] == ["2" * 40]
    assert part.exists()
    last = removal("owner/demo", "v2")
    assert last.freed == 1500
    last.execute()
    assert not home.exists()


QUANTIZED: dict[str, dict[str, Any]] = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "exl2": {"quant_method": "exl2", "bits": 4.0},
    "unheard-of": {"quant_method": "unheard-of"},
    "integers": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
}


def quantized(machine: Machine, folder: Path, told: dict[str, Any], *, modelopt: bool = False) -> str:
    """A repository that says so of itself, in config.json or in ModelOpt's own file."""
    shutil.copytree(demo_folder("draft"), folder)
    if modelopt:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": told}))
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": told}))
    repo = f"owner/quantized-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"  # the hub's library remembers
    machine.hub.repos[repo] = folder
    return repo


@pytest.mark.parametrize(
    "command",
    ["pull", "pull --force", "generate -p x --model", "convert -o made", "tune --texts made --model"],
)
@pytest.mark.parametrize("method", QUANTIZED)
def test_formats_of_others_cost_no_download(
    machine: Machine, tmp_path: Path, method: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = quantized(machine, tmp_path / "repo", QUANTIZED[method])
    scaled(tmp_path / "repo")
    name, *more = command.split()
    more = [str(tmp_path / "made") if word == "made" else word for word in more]
    refused(machine.run(name, *more, repo), "is not supported")
    assert machine.hub.served["model.safetensors"] < 1 << 16  # its header, whose names decide
    assert not list((machine.home / "hub").rglob("*.mlxspec-part"))
    assert machine.hub.served["tokenizer.json"] == 0
    found = json.loads(machine.run("models", "quantized", "--json").out)["models"]
    assert [m["name"] for m in found] == ([repo] if method == "integers" else [])


def scaled(folder: Path) -> None:
    """Give it a tensor of a quantized matrix."""
    found = dict(mx.load(str(folder / "model.safetensors")))
    mx.eval(found)
    (folder / "model.safetensors").unlink()
    found["model.layers.0.mlp.up_proj.weight_scale"] = mx.ones((1,))
    mx.save_safetensors(str(folder / "model.safetensors"), found, {"format": "mlx"})


def test_modelopts_own_file_is_asked(machine: Machine, tmp_path: Path) -> None:
    repo = quantized(machine, tmp_path / "a", {"quant_algo": "W4A16_AWQ"}, modelopt=True)
    scaled(tmp_path / "a")
    refused(machine.run("pull", repo), "modelopt (W4A16_AWQ)")
    assert machine.hub.served["model.safetensors"] < 1 << 16
    fine = quantized(machine, tmp_path / "b", {"quant_algo": "FP8"}, modelopt=True)
    assert machine.run("pull", fine).code == 0


def test_a_description_that_was_left_behind(machine: Machine, tmp_path: Path) -> None:
    """The index tells the names, before a weight is fetched: these are of floats."""
    folder = tmp_path / "repo"
    repo = quantized(machine, folder, QUANTIZED["bitsandbytes"])
    names = mx.load(str(folder / "model.safetensors"))
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert machine.run("pull", repo).code == 0
    entry = json.loads(machine.run("models", "--json").out)["models"][0]
    assert entry["is_complete"]
    assert entry["problem"] == ""
    assert machine.run("generate", "--model", repo, "-p", "hi", "--max-tokens", "2").code == 0
    index["weight_map"]["model.layers.0.mlp.up_proj.qweight"] = "model.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.rmtree(machine.home)
    machine.hub.served.clear()
    refused(machine.run("pull", repo), "is not supported")
    assert machine.hub.served["model.safetensors"] == 0


def test_a_model_that_runs_by_mlx_lms_code_is_found_and_listed(machine: Machine, tmp_path: Path) -> None:
    """Whatever loads is searched for and listed."""
    machine.hub.repos["owner/llama"] = adapted_zoo.write("llama", tmp_path / "repo")
    found = json.loads(machine.run("models", "llama", "--json").out)["models"]
    assert [m["name"] for m in found] == ["owner/llama"]
    assert machine.run("pull", "owner/llama").code == 0
    listed = json.loads(machine.run("models", "--json").out)
    (entry,) = listed["models"]
    assert (entry["name"], entry["model_type"], entry["problem"]) == ("owner/llama", "llama", "")
    assert entry["is_complete"]
    assert not entry["has_head"]
    assert entry["memory"] > (tmp_path / "repo" / "model.safetensors").stat().st_size
    assert listed["others"] == 0


def test_a_cached_model_of_another_format_is_listed_as_unusable(machine: Machine, tmp_path: Path) -> None:
    repo = quantized(machine, tmp_path / "repo", {})
    folder = Path(machine.run("pull", repo).out.splitlines()[1])
    path = folder / "model.safetensors"
    tensors = dict(mx.load(str(path)))
    mx.eval(tensors)
    path.unlink()
    mx.save_safetensors(str(path), tensors | {"model.layers.0.mlp.up_proj.qweight": mx.zeros((1, 1))})
    entry = json.loads(machine.run("models", "--json").out)["models"][0]
    assert not entry["is_complete"]
    assert "GPTQ or AWQ" in entry["problem"]
    refused(machine.run("inspect", repo), "GPTQ or AWQ")
    refused(machine.run("generate", "--model", repo, "-p", "x"), "GPTQ or AWQ")
