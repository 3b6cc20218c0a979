"""Names of models to folders; no network is touched here."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from mlxspec.errors import ConfigError, ModelError
from mlxspec.loading import hub


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert hub.resolve(str(tmp_path)) == tmp_path


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert hub.resolve("~/model") == tmp_path / "model"


def test_the_demo_needs_no_network() -> None:
    assert hub.resolve(hub.DEMO).name == "target"
    assert hub.resolve(hub.DEMO_DRAFT).name == "draft"


@pytest.mark.parametrize("name", ["", "  ", None, 5], ids=repr)
def test_no_name_is_an_error_in_asking(name: object) -> None:
    with pytest.raises(ConfigError, match="No model was named"):
        hub.resolve(name)  # type: ignore[arg-type]


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
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("looked up"))
    with pytest.raises(ModelError) as caught:
        hub.resolve(name)
    assert "\n" not in str(caught.value)


def test_an_id_is_downloaded_data_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def download(repo: str, allow_patterns: list[str]) -> str:
        asked[repo] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.resolve("owner/model-4bit") == tmp_path
    assert not any(p.endswith((".py", ".bin", ".pt", ".pkl", "*")) for p in asked["owner/model-4bit"])


class Response:
    """As much of an HTTP response as the hub's errors look at."""

    status_code = 404
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
        (lambda: HfHubHTTPError("x\ny", response=Response()), "could not be downloaded"),
        (lambda: OSError(28, "No space left on device"), "could not be downloaded"),
        (lambda: ConnectionError("x\ny"), "could not be downloaded"),
    ],
    ids=["unknown", "offline", "http", "disk", "connection"],
)
def test_what_goes_wrong_on_the_way_is_one_sentence(
    error, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object, **__: object) -> str:
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match=words) as caught:
        hub.resolve("owner/model")
    assert "\n" not in str(caught.value)
