"""`mlxspec pull` of repositories whose small files or headers show that nothing could be answered: they are refused before any weight is
fetched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hub_machine import Machine

from mlxspec.loading.folder import INDEX
from mlxspec.platform.resources import demo_folder
from tests.models import adapted_zoo

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
    "an added token behind a gap": (a_gap, "tokenizer.json in"),
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


def setting(**changes: Any) -> Edit:
    """Other values in config.json than its tensors are of."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def tensors(change: Callable[[str, mx.array], tuple[str, mx.array] | None]) -> Edit:
    """Other tensors than config.json tells. change: of a name and a value, None to leave it out."""

    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        changed = dict(filter(None, (change(*item) for item in mx.load(str(path)).items())))
        mx.eval(changed)
        path.unlink()
        mx.save_safetensors(str(path), changed, {"format": "mlx"})

    return edit


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def no_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"{" * 100)


def repository(machine: Machine, folder: Path, edit: Edit, source: str = "draft") -> str:
    """Its id: one of its own, for the hub's library remembers which files a commit of an id has. source: one of the built-in models, or an
    architecture of mlx-lm's."""
    if source in adapted_zoo.ARCHITECTURES:
        adapted_zoo.write(source, folder)
    else:
        shutil.copytree(demo_folder(source), folder)
    edit(folder)
    repo = f"owner/{folder.parent.name[-60:]}"
    machine.hub.repos[repo] = folder
    return repo


HEADERS: dict[str, tuple[Edit, str]] = {
    "a name that is unknown": (
        tensors(lambda name, value: (name.replace("down_proj", "w2"), value)),
        "mlp.w2",
    ),
    "a tensor is absent": (
        tensors(lambda name, value: None if name.endswith("1.mlp.up_proj.weight") else (name, value)),
        "1.mlp.up_proj.weight",
    ),
    "a tensor too many": (
        tensors(lambda name, value: (name.replace("mlp.up_proj.weight", "mlp.up_proj.extra"), value)),
        "up_proj.extra",
    ),
    "a shape of another config": (setting(intermediate_size=96), "shape"),
    "a format of others, by names": (
        tensors(lambda name, value: (name.replace("up_proj.weight", "up_proj.qweight"), value)),
        "GPTQ or AWQ",
    ),
    "a layer less": (setting(num_hidden_layers=9), "layer"),
    "whole numbers": (
        tensors(lambda name, value: (name, value.astype(mx.int32) if "up_proj" in name else value)),
        "holds int32, expected float",
    ),
    "a file that is cut short": (cut_short, "cut short"),
    "a file without a header": (no_header, "no safetensors file"),
}


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


@pytest.mark.parametrize("source", ["draft", "llama"])
@pytest.mark.parametrize("case", HEADERS)
def test_refused_by_headers(machine: Machine, tmp_path: Path, case: str, source: str) -> None:
    """Of models by our code and by mlx-lm's: pull refuses them in the words of loading the folder."""
    edit, words = HEADERS[case]
    repo = repository(machine, tmp_path / "repo", edit, source)
    ran = machine.run("pull", repo, "--drafter", "none")
    assert ran.code == 2, ran
    assert words in ran.err.splitlines()[-1]
    assert weights(machine) < 1 << 16
    assert "Traceback" not in ran.err
    there = machine.run("generate", "-m", str(tmp_path / "repo"), "-p", "hi", "--draft", "off")
    assert there.code == 2, there
    assert there.err.splitlines()[-1].removeprefix("mlxspec: error: ") in ran.err


@pytest.mark.parametrize("source", ["draft", "gemma", "llama", "gpt_oss", "falcon_h1"])
def test_what_is_not_refused_loads(machine: Machine, tmp_path: Path, source: str) -> None:
    repo = repository(machine, tmp_path / "repo", lambda _: None, source)
    ran = machine.run("pull", repo, "--drafter", "none")
    assert ran.code == 0, ran
    ran = machine.run("generate", "-m", repo, "-p", "hi", "--max-tokens", "2", "--draft", "off")
    assert ran.code == 0, ran


@pytest.mark.parametrize("source", ["eagle3", "dflash"])
def test_a_drafter_is_judged_by_headers(machine: Machine, tmp_path: Path, source: str) -> None:
    edit = tensors(lambda name, value: (name, value[1:]) if "mlp.up_proj" in name else (name, value))
    ran = machine.run("pull", repository(machine, tmp_path / "repo", edit, source))
    assert ran.code == 2, ran
    assert "has shape" in ran.err
    assert weights(machine) < 1 << 16


@pytest.mark.parametrize("case", ["only tokenizer.model", "a shard is absent"])
def test_commands_that_fetch_refuse_too(machine: Machine, tmp_path: Path, case: str) -> None:
    edit, words = (TOKENIZERS | SHARDS)[case]
    ran = machine.run("generate", "-m", repository(machine, tmp_path / "repo", edit), "-p", "hi")
    assert ran.code == 2, ran
    assert words in ran.err
    assert weights(machine) < 1 << 16


@pytest.mark.parametrize("case", ["no tokenizer", "a template that does not compile", "a tensor is absent"])
def test_a_forced_pull_fetches_it(machine: Machine, tmp_path: Path, case: str) -> None:
    edit, _ = (TOKENIZERS | TEMPLATES | HEADERS)[case]
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


def test_an_adapter_is_called_one(machine: Machine, tmp_path: Path) -> None:
    def lora(folder: Path) -> None:
        (folder / "config.json").unlink()
        (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")

    ran = machine.run("pull", repository(machine, tmp_path / "repo", lora))
    assert ran.code == 2, ran
    assert "is an adapter, no model" in ran.err
    assert weights(machine) == 0
