"""`mlxspec pull` of repositories whose small files show that nothing could be answered: they are refused before any weight is fetched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from hub_machine import Machine

from mlxspec.loading.folder import INDEX
from mlxspec.platform.resources import demo_folder

Edit = Callable[[Path], None]


def without_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def only_sentencepiece(folder: Path) -> None:
    without_tokenizer(folder)
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")


def only_tiktoken(folder: Path) -> None:
    without_tokenizer(folder)
    (folder / "tiktoken.model").write_text("IQ== 0\n")


def only_a_vocabulary(folder: Path) -> None:
    without_tokenizer(folder)
    (folder / "vocab.json").write_text("{}")


def damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": {"type": "None of all"}}')


def damaged_settings(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")


def a_gap(folder: Path) -> None:
    added = {"5000": {"content": "<far>", "special": True}}
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def template(text: bytes) -> Edit:
    return lambda folder: (folder / "chat_template.jinja").write_bytes(text) and None


def template_in_settings(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "{% if %}"}))


def index(*names: str, keep: bool = True) -> Edit:
    """An index that names these files, in turn; keep: beside model.safetensors, else it is the first of them."""

    def edit(folder: Path) -> None:
        tensors = mx.load(str(folder / "model.safetensors"))
        places = {tensor: names[i % len(names)] for i, tensor in enumerate(sorted(tensors))}
        if not keep:
            (folder / "model.safetensors").rename(folder / names[0])
        (folder / INDEX).write_text(json.dumps({"weight_map": places}))

    return edit


def damaged_index(folder: Path) -> None:
    (folder / INDEX).write_text("[]")


def consolidated(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")


TOKENIZERS: dict[str, tuple[Edit, str]] = {
    "only tokenizer.model": (only_sentencepiece, "tokenizer.model alone is not read"),
    "only tiktoken.model": (only_tiktoken, "no tokenizer.json"),
    "only vocab.json": (only_a_vocabulary, "vocab.json alone is not read"),
    "no tokenizer": (without_tokenizer, "no tokenizer.json"),
    "a damaged tokenizer": (damaged_tokenizer, "cannot be read"),
    "damaged settings": (damaged_settings, "tokenizer_config.json"),
    "an added token behind a gap": (a_gap, "<far>"),
}
TEMPLATES: dict[str, tuple[Edit, str]] = {
    "a template that does not compile": (template(b"{% if %}"), "does not compile"),
    "a template in the settings": (template_in_settings, "does not compile"),
    "a template that is no text": (template(b"\xff\xfe"), "no readable text"),
}
SHARDS: dict[str, tuple[Edit, str]] = {
    "a shard is absent": (
        index("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", keep=False),
        "model-00002-of-00002.safetensors is missing",
    ),
    "a head's file is absent": (index("model.safetensors", "mtp/mtp.safetensors"), "mtp/mtp.safetensors is"),
    "a place that is no file's": (index("../model.safetensors"), "no plain file name"),
    "a damaged index": (damaged_index, "is damaged"),
    "no file that is loaded": (consolidated, "no model*.safetensors"),
}


def repository(machine: Machine, folder: Path, edit: Edit, source: str = "draft") -> str:
    """Its id: one of its own, for the hub's library remembers which files a commit of an id has."""
    shutil.copytree(demo_folder(source), folder)
    edit(folder)
    repo = f"owner/{folder.parent.name[-60:]}"
    machine.hub.repos[repo] = folder
    return repo


def weights(machine: Machine) -> int:
    return sum(size for name, size in machine.hub.served.items() if name.endswith(".safetensors"))


@pytest.mark.parametrize("case", [*TOKENIZERS, *TEMPLATES, *SHARDS])
def test_refused_before_the_weights(machine: Machine, tmp_path: Path, case: str) -> None:
    """The sentence is that of loading the folder, and no byte of the data of a tensor has come."""
    edit, words = (TOKENIZERS | TEMPLATES | SHARDS)[case]
    repo = repository(machine, tmp_path / "repo", edit)
    ran = machine.run("pull", repo, "--drafter", "none")
    assert ran.code == 2, ran
    assert words in ran.err.splitlines()[-1]
    assert weights(machine) < 1 << 16  # headers
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("case", ["only tokenizer.model", "a shard is absent"])
def test_commands_that_fetch_refuse_too(machine: Machine, tmp_path: Path, case: str) -> None:
    edit, words = (TOKENIZERS | SHARDS)[case]
    ran = machine.run("generate", "-m", repository(machine, tmp_path / "repo", edit), "-p", "hi")
    assert ran.code == 2, ran
    assert words in ran.err
    assert weights(machine) < 1 << 16


@pytest.mark.parametrize("case", ["no tokenizer", "a template that does not compile"])
def test_a_forced_pull_fetches_it(machine: Machine, tmp_path: Path, case: str) -> None:
    edit, _ = (TOKENIZERS | TEMPLATES)[case]
    ran = machine.run("pull", repository(machine, tmp_path / "repo", edit), "--force", "--drafter", "none")
    assert ran.code == 0, ran


@pytest.mark.parametrize("source", ["eagle3", "dflash"])
def test_a_drafter_needs_no_tokenizer(machine: Machine, tmp_path: Path, source: str) -> None:
    def bare(folder: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).unlink(missing_ok=True)

    ran = machine.run("pull", repository(machine, tmp_path / "repo", bare, source))
    assert ran.code == 0, ran


def test_a_head_alone_needs_no_tokenizer(machine: Machine, tmp_path: Path) -> None:
    """Its config.json is the model's, so that only the names of its tensors tell."""

    def head(folder: Path) -> None:
        without_tokenizer(folder)
        found = mx.load(str(folder / "model.safetensors"))
        (folder / "model.safetensors").unlink()
        kept = {name: value for name, value in found.items() if ".mtp." in f".{name}"}
        assert kept
        mx.save_safetensors(str(folder / "mtp.safetensors"), kept)

    ran = machine.run("pull", repository(machine, tmp_path / "repo", head, "target"), "--drafter", "none")
    assert ran.code == 0, ran
