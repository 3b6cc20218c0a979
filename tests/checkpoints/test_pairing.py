"""Drafters that were published for a model: the catalogue, and `mlxspec pull` against a hub on this machine that serves a conversion, its
original and drafters under names of the catalogue."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from hub_machine import Machine, Ran
from hub_server import COMMIT
from published_shapes import CONFIGS

from mlxspec.checkpoints import pairing
from mlxspec.checkpoints.catalogue import KINDS, PublishedDrafter, catalogue, drafters_for
from mlxspec.errors import ConfigError, ModelError, StorageError
from mlxspec.loading import download
from mlxspec.platform.resources import demo_folder
from tests.drafters.eagle3_checkpoints import Kind
from tests.drafters.eagle3_checkpoints import write as write_eagle3
from tests.models import adapted_zoo

# names of the catalogue, over the demo family's files
ORIGINAL, CONVERSION = "Qwen/Qwen3.6-35B-A3B", "mlx-community/Qwen3.6-35B-A3B-4bit"
WRONG, ABSENT, RIGHT = (
    "incoai/Qwen3.6-35B-A3B-DFlash2",
    "RedHatAI/Qwen3.6-35B-A3B-speculator.dspark",
    "z-lab/Qwen3.6-35B-A3B-DFlash",
)
OTHER = "owner/eagle3"


def folder_of(machine: Machine, repo: str) -> Path:
    return machine.home / "hub" / f"models--{repo.replace('/', '--')}" / "snapshots" / COMMIT


@pytest.fixture
def hub(machine: Machine, tmp_path: Path) -> Machine:
    """The wrong drafter is the right one with another target's number of layers in its config; another one is not there at all."""
    wrong = tmp_path / "wrong"
    shutil.copytree(demo_folder("dflash"), wrong)
    config = json.loads((wrong / "config.json").read_text())
    inner = config.get("dflash_config", config)
    inner["num_target_layers"] = 5
    (wrong / "config.json").write_text(json.dumps(config))
    machine.hub.repos |= {
        ORIGINAL: demo_folder("target"),
        CONVERSION: demo_folder("target"),
        WRONG: wrong,
        RIGHT: demo_folder("dflash"),
        OTHER: demo_folder("eagle3"),
        "owner/gemma": demo_folder("gemma"),
    }
    machine.hub.cards[CONVERSION] = {"base_model": ORIGINAL}
    return machine


def weights_fetched(machine: Machine) -> int:
    return machine.hub.served["model.safetensors"]


def test_each_line_of_the_catalogue_has_what_a_pull_needs() -> None:
    known = {name for names, _ in CONFIGS.values() for name in names}
    families = re.compile(r"Qwen/Qwen3(\.[568])?-|google/gemma-4-|openai/gpt-oss-|meta-llama/Llama-3\.[13]-")
    for listed in catalogue():
        assert listed.kind in KINDS
        assert listed.source.startswith("https://")
        for target in listed.targets:
            assert target in known or families.match(target), target  # of a family that runs here


def test_the_best_kind_comes_first() -> None:
    order = ("DFlash2", "DSpark", "DFlash", "EAGLE-3", "assistant", "head")
    for target in {t for listed in catalogue() for t in listed.targets}:
        ranks = [order.index(listed.kind) for listed in drafters_for([target.upper()])]
        assert ranks == sorted(ranks), target
    assert drafters_for(["owner/nothing"]) == []


def test_the_docs_count_the_catalogue() -> None:
    targets = {target for listed in catalogue() for target in listed.targets}
    page = Path(__file__).resolve().parents[2] / "docs" / "drafters.md"
    said = f"knows the {len(catalogue())} drafters that `mlxspec models --drafters` lists, for {len(targets)} models"
    assert said in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "magic"},
        {"targets": ()},
        {"targets": ("owner/a",)},
        {"repo": "../a"},
        {"parameters": 0.0},
        {"source": "a card"},
    ],
)
def test_a_wrong_line_is_refused(change: dict[str, object]) -> None:
    right = {
        "repo": "owner/a",
        "kind": "DFlash",
        "targets": ("owner/b",),
        "read": "2026-11-25",
        "source": "https://a",
    }
    PublishedDrafter(**right)  # type: ignore[arg-type]
    with pytest.raises((ConfigError, ModelError)):
        PublishedDrafter(**right | change)  # type: ignore[arg-type]


def test_one_command_makes_a_model_that_drafts_with_the_best_that_fits(hub: Machine) -> None:
    ran = hub.run("pull", CONVERSION, "--drafter", "auto", "--json")
    assert ran.code == 0, ran
    sizes = [(demo_folder(name) / "model.safetensors").stat().st_size for name in ("target", "dflash")]
    assert json.loads(ran.out)["drafter"] == {"repo": RIGHT, "bytes": sizes[1]}
    refusals = [line for line in ran.err.splitlines() if "Not taken" in line]
    assert len(refusals) == 2
    assert WRONG in refusals[0]
    assert "number of layers" in refusals[0]
    assert ABSENT in refusals[1]
    # the wrong drafter's header was read, and none of its weights; nothing of it is in the cache
    assert sum(sizes) <= weights_fetched(hub) < sum(sizes) + (1 << 16)
    assert not folder_of(hub, WRONG).exists()
    told = json.loads((folder_of(hub, CONVERSION) / pairing.PAIR_FILE).read_text())
    assert told == {"drafter": RIGHT, "revision": COMMIT}
    seen = len(hub.hub.requests)
    report = json.loads(hub.run("inspect", CONVERSION, "--json").out)
    drafters = {d["name"]: d for d in report["drafters"]}
    assert drafters["dflash"]["usable"]
    assert RIGHT in drafters["dflash"]["why"]
    assert "paired" in drafters["dflash"]["why"]
    bare = (
        json.loads(hub.run("inspect", ORIGINAL, "--json").out) if folder_of(hub, ORIGINAL).exists() else None
    )
    assert bare is None  # the original was asked for its card only
    assert report["memory"]["drafter_weights"] > sizes[1] // 4
    answer = hub.run(
        "generate", "--model", CONVERSION, "-p", "hi", "--max-tokens", "8", "--temp", "0", "--json"
    )
    assert answer.code == 0, answer
    plain = hub.run(
        "generate",
        "--model",
        CONVERSION,
        "-p",
        "hi",
        "--max-tokens",
        "8",
        "--temp",
        "0",
        "--json",
        "--draft",
        "off",
    )
    assert json.loads(answer.out)["text"] == json.loads(plain.out)["text"]
    assert len(hub.hub.requests) == seen  # all of it from the cache


def test_a_pair_drafts_beside_the_models_own_head(hub: Machine) -> None:
    assert hub.run("pull", CONVERSION, "--drafter", "auto").code == 0
    script = (
        "import json, sys, mlxspec\n"
        "e = mlxspec.load(sys.argv[1])\n"
        "print(json.dumps([list(e.drafts.drafters), e.notices]))"
    )

    def drafters(name: str) -> tuple[list[str], list[str]]:
        ran = subprocess.run(
            [sys.executable, "-c", script, name],
            env=hub.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        names, notices = json.loads(ran.stdout)
        return names, notices

    names, notices = drafters(CONVERSION)
    assert {"ngram-simple", "mtp", "dflash"} <= set(names)
    assert not any("head does not" in notice for notice in notices)
    # a drafter that is gone is said, and the model loads
    assert hub.run("rm", RIGHT, "--yes").code == 0
    names, notices = drafters(CONVERSION)
    assert "dflash" not in names
    assert (folder_of(hub, CONVERSION) / pairing.PAIR_FILE).exists()
    assert any(RIGHT in notice and "mlxspec pull" in notice for notice in notices)
    # so is a damaged file
    (folder_of(hub, CONVERSION) / pairing.PAIR_FILE).write_text('{"drafter": 3}')
    names, notices = drafters(CONVERSION)
    assert "dflash" not in names
    assert any("damaged" in notice for notice in notices)


def test_a_named_drafter_is_taken_and_a_wrong_one_refused_before_anything_is_fetched(hub: Machine) -> None:
    def refused(ran: Ran, *words: str) -> None:
        assert ran.code == 2, ran
        assert ran.out == ""
        assert "Traceback" not in ran.err
        assert all(word in ran.err.splitlines()[-1] for word in words), ran.err
        assert weights_fetched(hub) < 1 << 16
        hub.hub.served.clear()

    refused(hub.run("pull", CONVERSION, "--drafter", WRONG), WRONG, "number of layers")
    refused(hub.run("pull", CONVERSION, "--drafter", ABSENT), ABSENT)
    refused(hub.run("pull", CONVERSION, "--drafter", "owner/demo"), "a model of its own")
    refused(hub.run("pull", CONVERSION, "--drafter", "no name"), "no name")
    refused(hub.run("pull", CONVERSION, "--drafter", "owner/empty"), "owner/empty")
    refused(hub.run("pull", CONVERSION, "--drafter", "owner/gated"), "gated")
    ran = hub.run("pull", CONVERSION, "--drafter", OTHER)
    assert ran.code == 0, ran
    assert json.loads((folder_of(hub, CONVERSION) / pairing.PAIR_FILE).read_text())["drafter"] == OTHER


def test_a_model_with_a_head_of_its_own_comes_alone(hub: Machine) -> None:
    for more in ((), ("--drafter", "none")):
        ran = hub.run("pull", CONVERSION, *more)
        assert ran.code == 0, ran
        assert not (folder_of(hub, CONVERSION) / pairing.PAIR_FILE).exists()
    size = (demo_folder("target") / "model.safetensors").stat().st_size
    assert size <= weights_fetched(hub) < size + (1 << 16)  # headers were read
    unknown = hub.run("pull", "owner/demo", "--drafter", "auto")
    assert unknown.code == 0
    assert "No drafter that fits was published for owner/demo" in unknown.err


def test_a_model_that_can_have_no_head_comes_with_a_drafter(
    hub: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import sys\n"
        "from mlxspec.checkpoints import fetching, head\n"
        "from mlxspec.checkpoints.pull import memory_of\n"
        "from mlxspec.loading.download import plan\n"
        "head.may_have_head = lambda plan: False\n"
        "wanted = plan(sys.argv[1])\n"
        "print(fetching.beside(wanted, memory_of(wanted)).drafter.repo)"
    )
    command = [sys.executable, "-c", script, CONVERSION]
    ran = subprocess.run(command, env=hub.environment, capture_output=True, text=True, check=True)
    assert ran.stdout == f"{RIGHT}\n"


def test_a_fetch_that_broke_off_is_gone_on_from(hub: Machine) -> None:
    size = (demo_folder("dflash") / "model.safetensors").stat().st_size
    assert hub.run("pull", CONVERSION).code == 0
    hub.hub.repos.pop(RIGHT)
    missing = hub.run("pull", CONVERSION, "--drafter", RIGHT)
    assert missing.code == 2
    assert not (folder_of(hub, CONVERSION) / pairing.PAIR_FILE).exists()
    hub.hub.repos[RIGHT] = demo_folder("dflash")
    hub.hub.served.clear()
    assert hub.run("pull", CONVERSION, "--drafter", RIGHT).code == 0
    assert size <= weights_fetched(hub) < size + (1 << 16)  # the model was here


def test_a_drafter_that_does_not_fit_into_memory_is_not_taken(
    hub: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import sys\n"
        "from dataclasses import replace\n"
        "from mlxspec.checkpoints import pairing\n"
        "from mlxspec.checkpoints.pull import memory_of\n"
        "from mlxspec.loading.download import plan\n"
        "wanted = plan(sys.argv[1])\n"
        "memory = memory_of(wanted)\n"
        "print(pairing.find(wanted, replace(memory, machine=memory.total + 100)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, CONVERSION],
        env=hub.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.startswith("(None, [")
    assert f"{CONVERSION} with {RIGHT} would need" in ran.stdout


def test_what_is_fetched_together_is_counted_together(hub: Machine) -> None:
    """The memory that is told has the drafter's weights, as floats, and its keys and values; the disk must hold both."""
    told = [hub.run("pull", CONVERSION, "--drafter", which) for which in ("none", RIGHT)]
    assert [ran.code for ran in told] == [0, 0]
    sizes = [float(re.findall(r"about ([\d.]+) MB of memory", ran.err)[0]) for ran in told]
    held = sum(4 * value.size for value in mx.load(str(demo_folder("dflash") / "model.safetensors")).values())
    assert sizes[1] - sizes[0] > held / 1e6 > 0.1
    there = download.Plan(CONVERSION, None, COMMIT, demo_folder("draft"), ())
    download.check_disk(there)
    with pytest.raises(StorageError, match="needs 5e\\+04 TB"):
        download.check_disk(there, 5 * 10**16)


def test_a_model_by_mlx_lms_code_is_paired(hub: Machine, tmp_path: Path) -> None:
    """What reads layers drafts where rows share a forward, and is refused before it is fetched where they do not."""
    write_eagle3(tmp_path / "eagle3", Kind(rows=512), 2048, 32, (1, 2, 3))
    hub.hub.repos |= {
        "owner/llama": adapted_zoo.write("llama", tmp_path / "llama"),
        "owner/lfm2": adapted_zoo.write("lfm2", tmp_path / "lfm2"),
        OTHER: tmp_path / "eagle3",
    }
    assert hub.run("pull", "owner/llama", "--drafter", OTHER).code == 0
    command = ("generate", "-m", "owner/llama", "-p", "def add(a, b):", "--max-tokens", "24", "--json")
    told = hub.run(*command, "--policy", "fixed")
    assert told.code == 0, told
    assert "eagle3" in json.loads(told.out)["stats"]["drafters"], told.out
    refused = hub.run("pull", "owner/lfm2", "--drafter", OTHER)
    assert refused.code == 2
    assert "do not share all of a forward" in refused.err


def test_the_drafters_are_listed(hub: Machine) -> None:
    ran = hub.run("models", "--drafters")
    assert ran.code == 0
    assert all(listed.repo in ran.out for listed in catalogue())
    told = json.loads(hub.run("models", "--drafters", "--json").out)["drafters"]
    assert [line["repo"] for line in told] == [listed.repo for listed in catalogue()]


def test_what_is_removed_is_of_that_repository_where_a_copy_has_the_same_commit(hub: Machine) -> None:
    names = (CONVERSION, ORIGINAL, "owner/demo")
    assert all(hub.run("pull", name, "--drafter", "none").code == 0 for name in names)
    for i, name in enumerate(names):
        assert hub.run("rm", name, "--yes").code == 0
        assert [folder_of(hub, n).exists() for n in names] == [j > i for j in range(len(names))]


@pytest.mark.parametrize("bare", [True, False])
def test_a_head_that_lies_alone_is_a_drafter(hub: Machine, tmp_path: Path, bare: bool) -> None:
    """As mlx-community publishes MTP heads: names without a prefix; and with one."""
    head = tmp_path / "head"
    head.mkdir()
    tensors = mx.load(str(demo_folder("target") / "model.safetensors"))
    own = {k: v for k, v in tensors.items() if ".mtp." in f".{k}"}
    assert own
    named = {k.rpartition("mtp.")[2]: v for k, v in own.items()}
    mx.save_safetensors(
        str(head / "model.safetensors"), {("" if bare else "mtp.") + k: v for k, v in named.items()}
    )
    config = json.loads((demo_folder("target") / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"model_type": "qwen3_5_mtp"}))
    hub.hub.repos["owner/head"] = head
    ran = hub.run("pull", CONVERSION, "--drafter", "owner/head")
    assert ran.code == 0, ran
    assert "an MTP head" in ran.err
    answer = hub.run("generate", "--model", CONVERSION, "-p", "hi", "--max-tokens", "4")
    assert answer.code == 0, answer
    refused = hub.run("pull", "owner/gemma", "--drafter", "owner/head")
    assert refused.code == 2
    assert "owner/head does not draft for owner/gemma" in refused.err
