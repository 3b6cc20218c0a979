"""`mlxspec pull` of repositories whose small files or headers show that nothing could be answered: they are refused before any weight is
fetched."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from hub_machine import Machine
from repository_edits import (
    DRAFTERS,
    ENDS,
    GOOD,
    HEADERS,
    SHARDS,
    TEMPLATES,
    TOKENIZERS,
    repository,
    text,
    without,
)

FILES = TOKENIZERS | TEMPLATES | ENDS | SHARDS
OFTEN = {next(iter(kind)) for kind in (TOKENIZERS, TEMPLATES, ENDS)} | {
    "a shard is absent",
    "no file that is loaded",
}


def weights(machine: Machine) -> int:
    return sum(size for name, size in machine.hub.served.items() if name.endswith(".safetensors"))


def assert_refused(machine: Machine, folder: Path, words: str, *more: str) -> str:
    """In one sentence, and no byte of the data of a tensor has come. words: of which one stands in the sentence; more: of the command.
    Returns the sentence."""
    ran = machine.run("pull", f"owner/{folder.parent.name[-60:]}", *more)
    assert ran.code == 2, ran
    assert "Traceback" not in ran.err
    said = ran.err.splitlines()[-1]
    assert any(word in said for word in words.split("|")), said
    assert weights(machine) < 1 << 16  # headers
    return said


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in OFTEN else pytest.mark.slow) for c in FILES]
)
def test_refused_before_the_weights(machine: Machine, tmp_path: Path, case: str) -> None:
    edit, words = FILES[case]
    repository(machine, tmp_path / "repo", edit)
    assert_refused(machine, tmp_path / "repo", words, "--drafter", "none")


@pytest.mark.parametrize("case", HEADERS)
def test_refused_by_headers(machine: Machine, tmp_path: Path, case: str) -> None:
    """In the words of loading the folder, by our code and by mlx-lm's in turn."""
    edit, words = HEADERS[case]
    repository(machine, tmp_path / "repo", edit, ("draft", "llama")[list(HEADERS).index(case) % 2])
    said = assert_refused(machine, tmp_path / "repo", words, "--drafter", "none")
    there = machine.run("generate", "-m", str(tmp_path / "repo"), "-p", "hi", "--draft", "off")
    assert there.code == 2, there
    assert there.err.splitlines()[-1].removeprefix("mlxspec: error: ") in said


@pytest.mark.parametrize(
    ("case", "source"),
    [
        *(("nothing", source) for source in ("draft", "gemma", "llama", "gpt_oss", "falcon_h1")),
        ("two shards", "llama"),
        ("a description that was left behind", "draft"),
    ],
)
def test_what_is_not_refused_loads(machine: Machine, tmp_path: Path, case: str, source: str) -> None:
    repo = repository(machine, tmp_path / "repo", GOOD[case], source)
    ran = machine.run("pull", repo, "--drafter", "none")
    assert ran.code == 0, ran
    ran = machine.run("generate", "-m", repo, "-p", "hi", "--max-tokens", "2", "--draft", "off")
    assert ran.code == 0, ran


def test_a_template_may_refuse_messages(machine: Machine, tmp_path: Path) -> None:
    refuses = text("chat_template.jinja", "{{ raise_exception('only tools') }}")
    ran = machine.run("pull", repository(machine, tmp_path / "repo", refuses), "--drafter", "none")
    assert ran.code == 0, ran


@pytest.mark.parametrize("source", ["eagle3", "dflash"])
@pytest.mark.parametrize("case", DRAFTERS)
def test_a_drafter_is_judged_by_headers(machine: Machine, tmp_path: Path, case: str, source: str) -> None:
    edit, words = DRAFTERS[case]
    repository(machine, tmp_path / "repo", edit, source)
    assert_refused(machine, tmp_path / "repo", words)


@pytest.mark.parametrize("case", ["only tokenizer.model", "a shard is absent"])
def test_commands_that_fetch_refuse_too(machine: Machine, tmp_path: Path, case: str) -> None:
    edit, words = FILES[case]
    ran = machine.run("generate", "-m", repository(machine, tmp_path / "repo", edit), "-p", "hi")
    assert ran.code == 2, ran
    assert words in ran.err
    assert weights(machine) < 1 << 16


@pytest.mark.parametrize("case", ["no tokenizer", "a template that does not compile", "a tensor is absent"])
def test_a_forced_pull_fetches_it(machine: Machine, tmp_path: Path, case: str) -> None:
    edit, _ = (FILES | HEADERS)[case]
    ran = machine.run("pull", repository(machine, tmp_path / "repo", edit), "--force", "--drafter", "none")
    assert ran.code == 0, ran


@pytest.mark.parametrize("source", ["eagle3", "dflash"])
def test_a_drafter_needs_no_tokenizer(machine: Machine, tmp_path: Path, source: str) -> None:
    bare = without("tokenizer.json", "tokenizer_config.json")
    ran = machine.run("pull", repository(machine, tmp_path / "repo", bare, source))
    assert ran.code == 0, ran


def test_a_head_alone_needs_no_tokenizer(machine: Machine, tmp_path: Path) -> None:
    """Its config.json is the model's, so that only the names of its tensors tell."""

    def head(folder: Path) -> None:
        without("tokenizer.json", "tokenizer_config.json")(folder)
        found = mx.load(str(folder / "model.safetensors"))
        (folder / "model.safetensors").unlink()
        kept = {name: value for name, value in found.items() if ".mtp." in f".{name}"}
        assert kept
        mx.save_safetensors(str(folder / "mtp.safetensors"), kept)

    ran = machine.run("pull", repository(machine, tmp_path / "repo", head, "target"), "--drafter", "none")
    assert ran.code == 0, ran


def test_an_adapter_is_called_one(machine: Machine, tmp_path: Path) -> None:
    def lora(folder: Path) -> None:
        (folder / "config.json").unlink()
        (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")

    ran = machine.run("pull", repository(machine, tmp_path / "repo", lora))
    assert ran.code == 2, ran
    assert "is an adapter, no model" in ran.err
    assert weights(machine) == 0
