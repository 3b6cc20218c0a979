"""Names of models to folders; no network is touched here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from mlxspec.errors import ConfigError, ModelError, StorageError
from mlxspec.loading import download, hub
from mlxspec.loading.folder import tensor_files


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert hub.resolve(str(tmp_path)) == tmp_path


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert hub.resolve("~/model") == tmp_path / "model"


def test_the_demo_needs_no_network() -> None:
    assert hub.resolve(hub.DEMO).name == "target"
    assert hub.resolve(hub.DEMO_DRAFT).name == "draft"
    assert hub.resolve(hub.DEMO_AGENT).name == "draft"


@pytest.mark.parametrize("name", ["", "  ", None], ids=repr)
def test_no_name_is_an_error_in_asking(name: object) -> None:
    with pytest.raises(ConfigError, match="No model was named"):
        hub.resolve(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hf.co/unsloth/Qwen3-4B-GGUF:Q4_K_M", "is in GGUF, which mlxspec does not read"),
        ("unsloth/Qwen3-4B-GGUF:Q4_K_M", "is in GGUF"),
        ("https://ollama.com/library/qwen3", "`mlxspec models qwen3` searches"),
        ("huggingface.co/datasets/openai/gsm8k", "is a dataset, not a model"),
        ("https://huggingface.co/spaces/a/b", "is a space, not a model"),
        ("https://example.com/model", "names no model"),
    ],
)
def test_addresses_of_what_is_no_model(name: str, says: str) -> None:
    with pytest.raises(ModelError) as caught:
        hub.resolve(name)
    assert says in str(caught.value)


def test_a_folder_of_pytorchs_files_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"PyTorch's \.bin files.*in safetensors"):
        tensor_files(tmp_path)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelError, match="is a file"):
        hub.resolve(str(file))


@pytest.mark.parametrize(
    "name",
    [
        "./nowhere",
        "/no/such/folder",
        "nowhere",
        "a/b/c",
        "../up/one",
        "a/..",
        "owner/na me",
        "-x/y",
        "owner/",
        "\0/x",
        "x" * 5000,
        "~no-such-user/model",
    ],
    ids=lambda n: repr(n[:12]),
)
def test_what_can_be_no_id_is_not_looked_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: pytest.fail("looked up"))
    with pytest.raises(ModelError) as caught:
        hub.resolve(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "revision", ["", "../up", "a//b", "a/", "-x", "a b", "x" * 300, "\0"], ids=lambda n: repr(n[:9])
)
def test_what_can_be_no_revision_is_not_looked_up(revision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: pytest.fail("looked up"))
    with pytest.raises(ConfigError, match="branch, tag or commit"):
        hub.resolve("owner/model", revision=revision)


def test_a_folder_has_no_revisions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder here"):
        hub.resolve(str(tmp_path), revision="main")


def test_nothing_is_fetched_unless_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: pytest.fail("looked up"))
    with pytest.raises(ModelError, match="mlxspec pull owner/model"):
        hub.resolve("owner/model", download=False)


def snapshot(cache: Path, commit: str = 40 * "a") -> Path:
    """An empty snapshot of owner/model, as `main`."""
    home = cache / "models--owner--model"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    (home / "snapshots" / commit).mkdir(parents=True)
    return home / "snapshots" / commit


def test_what_is_cached_is_used_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = snapshot(tmp_path)
    (folder / "config.json").write_text("{}")
    assert hub.cached("owner/model") is None
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").write_bytes(b"")
    assert hub.cached("owner/model") is None
    (folder / "model-2.safetensors").write_bytes(b"")
    assert hub.cached("owner/model") == folder
    assert hub.cached("owner/model", 40 * "a") == hub.resolve("owner/model") == folder
    assert hub.cached("owner/model", 40 * "b") is None
    assert hub.revision_of(folder) == 40 * "a"
    assert hub.revision_of(tmp_path) is None


@pytest.mark.parametrize("ref", ["../../../etc", "x", "", 39 * "a"])
def test_a_reference_names_a_commit(ref: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot(tmp_path)
    (tmp_path / "models--owner--model" / "refs" / "main").write_text(ref)
    assert hub.cached("owner/model") is None


class Response:
    """As much of an HTTP response as the hub's errors look at."""

    status_code = 500
    headers: dict[str, str] = {}  # noqa: RUF012
    request = None
    text = ""

    def json(self) -> dict:
        return {}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            lambda: RepositoryNotFoundError("x\ny", response=Response()),
            "no model owner/model on Hugging Face",
        ),
        (lambda: LocalEntryNotFoundError("x\ny"), "cannot be reached"),
        (lambda: HfHubHTTPError("x\ny", response=Response()), "the hub answered 500"),
        (lambda: ConnectionError("x\ny"), "could not be downloaded"),
        (lambda: OSError(28, "No space left on device"), "disk is full"),
    ],
    ids=["unknown", "offline", "http", "connection", "disk"],
)
def test_what_goes_wrong_on_the_way_is_one_sentence(
    error, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object, **__: object) -> str:
        raise error()

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(sha="a", siblings=[])
    )
    with pytest.raises((ModelError, StorageError), match=words) as caught:
        hub.resolve("owner/model")
    assert "\n" not in str(caught.value)


def test_a_disk_too_small_is_told_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = download.File("model.safetensors", 50 << 30, False)
    plan = download.Plan("owner/model", None, 40 * "a", tmp_path, (file,))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("fetched"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=49 << 30))
    with pytest.raises(StorageError, match=r"53\.7 GB and 1\.07 GB to spare.*52\.6 GB left.*HF_HOME"):
        download.fetch(plan)


def test_a_branch_that_names_no_commit_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands in the file of a branch is no path."""
    monkeypatch.setattr(hub, "cache_folder", lambda: tmp_path)
    home = tmp_path / "models--owner--name"
    (home / "refs").mkdir(parents=True)
    other = home / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    (other / "model.safetensors").write_bytes(b"")
    (home / "snapshots").mkdir()
    (home / "refs" / "main").write_text("../other")
    assert hub.cached("owner/name") is None
