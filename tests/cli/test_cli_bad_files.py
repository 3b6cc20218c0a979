"""Things that people bring from other programs, damaged models and files, and what is not there. With those of test_cli_bad_inputs.py there
are more than 141: each ends with one sentence and the right exit code, nothing is lost, and nobody is asked over the network.
"""

from __future__ import annotations

import json
import shlex
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runs import Run, refused
from test_cli_bad_inputs import BAD

from mlxspec.platform.resources import demo_folder

# what is typed in a folder of files as `place` makes them, and what the sentence must hold
FOREIGN = [
    # models
    ("generate x -m nojson", "config.json in nojson is no valid JSON"),
    ("generate x -m listed", "config.json in listed is no JSON object"),
    ("generate x -m noconfig", "no config.json in noconfig"),
    ("generate x -m empty", "no config.json in empty"),
    ("generate x -m noweights", "no model*.safetensors files"),
    ("generate x -m short", "cut short"),
    ("generate x -m badtokens", "tokenizer.json"),
    ("generate x -m notokens", "no tokenizer.json"),
    ("generate x -m weightsdir", "no model*.safetensors files in weightsdir"),
    ("generate x -m othertype", "'gpt-of-nobody' are not supported"),
    ("generate x -m negative", "num_hidden_layers is -1"),
    ("generate x -m hugevocab", "vocab_size is 1000000000"),
    ("generate x -m file.txt", "a model is a folder"),
    ("generate x -m bad.gguf", "is in GGUF, which mlxspec does not read"),
    ("generate x -m ~nobody/x", "~nobody/x"),
    ("generate x -m owner/name", "HF_HUB_OFFLINE is set"),
    ("generate x -m owner/name/more", "no Hugging Face id"),
    ("--versoin", "There is no option --versoin; did you mean --version?"),
    ("generate x -m qwen3.5:5b", "`mlxspec run` lists common models, `mlxspec models qwen3.5 5b` searches"),
    ("generate x -m /models/name.gguf", "is in GGUF, which mlxspec does not read; `mlxspec models name`"),
    ("pull owner/name-GGUF", "is in GGUF"),
    ("generate x -m https://huggingface.co/owner/name/tree/main", "owner/name cannot be fetched"),
    ("generate x -m https://example.com/owner/name", "no model of Hugging Face"),
    ("generate x -m qwen3:4b", "mlx-community/Qwen3-4B-4bit cannot be fetched"),
    ("generate x -m gpt-4o", "`mlxspec models gpt 4o`"),
    ("run llama3.2", "mlx-community/Llama-3.2-3B-Instruct-4bit"),
    ("run nobody-knows-this", "`mlxspec models nobody knows this`"),
    ("run ''", "--model must not be empty"),
    ("pull hf.co/owner/name", "owner/name cannot be fetched"),
    ("pull ''", "There is no folder ''"),
    ("pull ../x", "no Hugging Face id"),
    ("pull a/b c/d", "'c/d' belongs to no option"),
    ("pull a/b --with-mtp --mtp-bits 5", "--mtp-bits must be one of"),
    ("rm owner/absent --yes", "owner/absent is not in the cache"),
    ("rm ../..", "no Hugging Face id"),
    ("models --limit 0", "--limit must be between"),
    ("models --drafters word", "leave the words out"),
    ("show missing/model", "`mlxspec pull missing/model`"),
    ("inspect short", "cut short"),
    ("convert empty out", "no model*.safetensors files"),
    ("convert demo nojson", "exists already"),
    ("convert demo out --bits 7", "--bits must be one of"),
    ("convert demo out more", "'more' belongs to no option"),
    # drafting, images, adapters, templates, grammars
    ("generate x --draft 16", "--draft-max 16"),
    ("generate x --draft-model empty", "no model*.safetensors files"),
    ("generate x --image pic.png", "reads no images"),
    ("generate x --image pic.png -m demo-vision", "PNG, JPEG, WebP or GIF"),
    ("generate x --adapter adapter", "lacks adapters.safetensors"),
    ("generate x --adapter missing", "no folder missing"),
    ("generate x --chat-template missing.jinja", "missing.jinja cannot be read"),
    ("generate x --chat-template bin.txt", "no readable text"),
    ("generate x --json-schema '{'", "The JSON schema cannot be used"),
    ("generate x --json-schema @schema.json", "'objekt'"),
    ("generate x --json-schema @deep.json", "nested too deeply"),
    ("generate x --regex '('", "The regular expression cannot be used"),
    ("generate x --lark @bad.lark", "The Lark grammar cannot be used"),
    # habits of other programs
    ("generate x --top_p two", "--top-p must be a number"),
    ("generate x --max-new-tokens many", "--max-tokens must be an integer"),
    ("generate x -hf owner/name:Q4_K_M", "leave :Q4_K_M out"),
    ("generate x --mirostat 2", "no such sampler"),
    ("generate x --max-kv-size 5x", "--max-context must be an integer"),
    ("rm demo --yes", "comes with mlxspec and stays"),
    ("generate x --model demo-vision --image http://x/y.png", "is on the web"),
    ("try --request x", "name the file too"),
    ("stop", "Ctrl-C ends"),
    ("ps --port http", "--port must be an integer"),
    ("help nothing", "There is no command 'nothing'"),
    ("launch nobody", "AGENT must be one of claude, codex, opencode"),
    # serving
    ("serve --port {port}", "Address already in use; --port names another"),
    ("serve --draft 16", "--draft-max 16"),
    ("serve --port 0 --memory-budget 1K", "--memory-budget is 1.0 KiB"),
    ("serve --allowed-origins example.com", "looks like https://example.com"),
    ("serve --api-key abc", "at least 4 characters"),
    ("serve --port 0 -m empty", "no config.json in empty"),
    # files
    ("chat --load missing.json", "missing.json cannot be read"),
    ("chat --load conv.json", "no conversation saved by mlxspec"),
    ("chat --load bin.txt", "no valid JSON"),
    ("try missing.py", "'missing.py' cannot be read"),
    ("try bin.txt", "no UTF-8 text"),
    ("bench --plot /nowhere/x.png", "no folder /nowhere"),
    ("tune --prompts bin.txt", "not UTF-8 text"),
    ("prove missing", "cannot be read"),
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Damaged models and files."""
    root = tmp_path_factory.mktemp("made")

    def copy(name: str) -> Path:
        return Path(shutil.copytree(demo_folder("target"), root / name))

    (copy("nojson") / "config.json").write_text("{not json")
    (copy("noconfig") / "config.json").unlink()
    (copy("noweights") / "model.safetensors").unlink()
    weights = copy("short") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    (copy("badtokens") / "tokenizer.json").write_text("[]")
    (copy("notokens") / "tokenizer.json").unlink()
    folder = copy("weightsdir") / "model.safetensors"
    folder.unlink()
    folder.mkdir()
    (copy("listed") / "config.json").write_text("[1]")
    changes = {
        "othertype": {"model_type": "gpt-of-nobody"},
        "negative": {"num_hidden_layers": -1},
        "hugevocab": {"vocab_size": 10**9},
    }
    for name, change in changes.items():
        config = copy(name) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
    (root / "empty").mkdir()
    (root / "adapter").mkdir()
    (root / "adapter" / "adapter_config.json").write_text("{}")
    schema, lark = '{"type": "objekt"}', "start: ("
    texts = {
        "file.txt": "x",
        "conv.json": '{"turns": 3}',
        "schema.json": schema,
        "bad.lark": lark,
        "deep.json": "[" * 100_000,
    }
    for name, text in texts.items():
        (root / name).write_text(text)
    for name, data in {"bin.txt": bytes(range(256)), "bad.gguf": b"GGUF", "pic.png": b"\x89PNG"}.items():
        (root / name).write_bytes(data)
    return root


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The folder that commands run in, with an empty cache of the hub, which nobody may ask. Returns a port that is taken."""
    from huggingface_hub import constants

    monkeypatch.chdir(made)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


@pytest.mark.parametrize(("typed", "words"), FOREIGN, ids=[t for t, _ in FOREIGN])
def test_foreign_inputs(run: Run, made: Path, place: int, tmp_path: Path, typed: str, words: str) -> None:
    before = sorted(made.rglob("*"))
    refused(run(*shlex.split(typed.format(port=place) if "{port}" in typed else typed)), words)
    assert sorted(made.rglob("*")) == before
    assert not list(tmp_path.iterdir())


def test_there_are_141() -> None:
    assert len({typed for typed, _ in (*BAD, *FOREIGN)}) >= 141
