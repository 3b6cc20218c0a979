"""Links in a model's folder: those of other caches and of folders of links are followed, and none to what may be a secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxspec.errors import ModelError
from mlxspec.loading.folder import check_links

FILES = ("config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja", "LICENSE")


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text("{}")
    return folder


def linked(folder: Path, **targets: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, target in targets.items():
        (folder / name.replace("__", ".")).symlink_to(target)
    return folder


def snapshot(root: Path, digits: int) -> Path:
    """A cache of the hub's layout that is not the one in use."""
    home = root / "hub" / "models--owner--name"
    folder, blobs = home / "snapshots" / ("a" * 40), home / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    for i, name in enumerate(FILES):
        (blobs / f"{i:0{digits}x}").write_text("{}")
        (folder / name).symlink_to(Path("../../blobs") / f"{i:0{digits}x}")
    return folder


@pytest.mark.parametrize("digits", [40, 64])
def test_a_snapshot_of_another_cache(digits: int, tmp_path: Path) -> None:
    folder = snapshot(tmp_path, digits)
    check_links(folder)
    check_links(linked(tmp_path / "flat", **{n.replace(".", "__"): folder / n for n in FILES}))
    check_links(linked(tmp_path, twin=folder) / "twin")


def test_a_folder_of_links(tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    folder = linked(tmp_path / "flat", **{n.replace(".", "__"): source / n for n in FILES})
    (source / "head").mkdir()
    (source / "head" / "other.safetensors").write_text("")
    linked(folder, mtp=source / "head", **{"model-2__safetensors": source / "head" / "other.safetensors"})
    check_links(folder)
    check_links(linked(tmp_path / "chained", config__json=folder / "config.json"))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "LICENSE", "chat_template.jinja", "config.json"])
@pytest.mark.parametrize("place", ["home", "blobs", "a model"])
def test_a_link_to_what_may_be_a_secret(name: str, place: str, tmp_path: Path) -> None:
    """Another name, or no model beside it, or no blob of the hub's layout."""
    elsewhere = {"home": tmp_path / "home", "blobs": tmp_path / "x" / "blobs", "a model": tmp_path / "m"}[
        place
    ]
    if place == "a model":
        model(elsewhere)
    elsewhere.mkdir(parents=True, exist_ok=True)
    secret = elsewhere / ("a" * 40 if place == "blobs" else "id_rsa")
    secret.write_text("secret")
    with pytest.raises(ModelError, match="is a link out of that folder"):
        check_links(linked(tmp_path / "model", **{name.replace(".", "__"): secret}))


def test_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    for target in (tmp_path / "unmounted" / "model.safetensors", Path("model.safetensors")):
        folder = linked(tmp_path / f"{len(target.parts)}", model__safetensors=target)
        with pytest.raises(ModelError, match="leads nowhere; is the drive"):
            check_links(folder)
