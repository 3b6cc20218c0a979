"""Models that LM Studio has fetched are found by name, after those of the hub's cache; nothing of LM Studio's is changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from planting import catches

from mlxspec.checkpoints.cache import LM_STUDIO, listing, removal
from mlxspec.errors import ModelError
from mlxspec.loading import hub, lm_studio
from mlxspec.platform.resources import demo_folder

NAME = "lmstudio-community/tiny-4bit"


@pytest.fixture
def studio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two places of LM Studio's, the newer one with a model and a folder of GGUF files; returns the model's folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("mlxspec.loading.repositories.cache_folder", lambda: tmp_path / "hub")
    monkeypatch.setattr("mlxspec.loading.hub.cache_folder", lambda: tmp_path / "hub")
    monkeypatch.setattr(lm_studio, "PLACES", ("~/.lmstudio/models", "~/.cache/lm-studio/models"))
    folder = tmp_path / ".lmstudio" / "models" / NAME
    shutil.copytree(demo_folder("draft"), folder)
    (folder.parent / "tiny-GGUF").mkdir()
    (folder.parent / "tiny-GGUF" / "tiny.gguf").write_bytes(b"GGUF")
    return folder


@catches(
    "LM Studio's folders are not looked at",
    "mlxspec.loading.lm_studio:models",
    lambda right: dict,
    errors=(ModelError,),
)
def test_a_model_of_lm_studios_is_found_by_name(studio: Path) -> None:
    assert hub.resolve(NAME, download=False) == studio
    assert hub.cached(NAME, "main") is None  # its revision is not known
    older = Path("~/.cache/lm-studio/models/owner/older").expanduser()
    shutil.copytree(studio, older)
    assert hub.resolve("owner/older", download=False) == older
    shutil.copytree(studio, older.parents[1] / NAME)
    assert hub.resolve(NAME, download=False) == studio


def test_the_hubs_cache_comes_first(studio: Path, tmp_path: Path) -> None:
    home = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    commit = "0" * 40
    shutil.copytree(studio, home / "snapshots" / commit)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    assert hub.resolve(NAME, download=False) == home / "snapshots" / commit
    (home / "snapshots" / commit / "model.safetensors").unlink()
    assert hub.resolve(NAME, download=False) == studio


def test_half_a_model_is_none(studio: Path) -> None:
    (studio / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="not in the local cache"):
        hub.resolve(NAME, download=False)
    (entry,) = listing().entries
    assert "incomplete" in entry.problem


def test_listed_and_not_removed(studio: Path) -> None:
    (entry,) = listing().entries
    assert (entry.name, entry.revision, entry.is_complete) == (NAME, LM_STUDIO, True)
    assert entry.memory is not None
    assert entry.size >= (studio / "model.safetensors").stat().st_size
    with pytest.raises(ModelError, match="LM Studio's; remove it there"):
        removal(NAME)
    assert (studio / "model.safetensors").is_file()


def test_no_home_is_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_studio, "PLACES", ("~nobody-of-this-name/models",))
    assert lm_studio.models() == {}
