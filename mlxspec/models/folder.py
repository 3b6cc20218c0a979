"""Finds out what a folder holds: a model, an MTP head alone, a Gemma assistant, an EAGLE-3 drafter, or a block drafter. Builds nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mlxspec.errors import ModelError
from mlxspec.loading.folder import check_links, tensor_files
from mlxspec.loading.safetensors import check_header
from mlxspec.loading.tokenizer import read_json
from mlxspec.loading.weights import FolderWeights, is_bare_head, read_folder
from mlxspec.models.drafter_folders import FOLDERS, folder_kind, title_of
from mlxspec.models.float16 import narrow
from mlxspec.models.vision.settings import image_settings

Kind = str  # "model", "head", or a kind of drafter_folders.py
_HEAD_TYPES = ("qwen3_5_mtp", "qwen3_5_moe_mtp")


def drafter_in(config: Mapping[str, Any]) -> Kind | None:
    """Return the kind of drafter that a folder holds, by its config.json alone; None where config.json does not tell."""
    return folder_kind((), config) or ("head" if config.get("model_type") in _HEAD_TYPES else None)


def kind_by(names: Collection[str], config: Mapping[str, Any]) -> Kind:
    """Return the kind of a folder: "model", "head", or a kind of drafter. names: names of its tensors, those of an MTP head under
    `mtp.`."""
    if names and all(name.startswith("mtp.") for name in names):
        return "head"
    return folder_kind(names, {}) or folder_kind((), config) or "model"


class ModelFolder:
    """A folder with a model, a head or a drafter, whose links have been checked. name: the name by which the caller knows it. is_narrowed:
    whether tensors that are stored in bfloat16 are read as float16; callers may set it. Methods raise ModelError."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        check_links(path)
        self.path, self.name = path, name or str(path)
        self.is_narrowed = False
        self._found: tuple[list[Path], list[Path]] | None = None

    def config(self) -> dict[str, Any]:
        path = self.path / "config.json"
        if not path.is_file():
            raise ModelError(f"There is no config.json in {self.path}.")
        return read_json(path)

    def files(self) -> list[Path]:
        """Return the files that hold tensors."""
        if self._found is None:
            self._found = tensor_files(self.path)
        shards, beside = self._found
        return [*shards, *beside]

    def read(self) -> FolderWeights:
        """Return all tensors, lazily."""
        weights = read_folder(self.path, self._found)
        if self.is_narrowed:
            narrow(weights)
        return weights

    def read_shards(self) -> FolderWeights:
        """Return the tensors of the shards lazily, without those of other files in the folder."""
        self.files()
        shards, beside = self._found or ([], [])
        return read_folder(self.path, (shards or beside, []))

    def image_settings(self) -> Mapping[str, Any]:
        """Return the settings by which images are preprocessed for the model."""
        return image_settings(self.path)

    def kind(self) -> Kind:
        """Return the kind of the folder: "model", "head", or a kind of drafter, for any format of its tensors. A folder with an MTP head
        alone needs no config.json."""
        names = set[str]()
        for path in self.files():
            found = check_header(path)
            prefix = "mtp." if is_bare_head(found) else ""
            names.update(prefix + name for name in found)
        kind = kind_by(names, {})
        return kind if kind == "head" else kind_by(names, self.config())

    def title(self) -> str:
        """Return what the folder holds, with its article: "an EAGLE-3 drafter"."""
        kind = self.kind()
        return title_of(kind, self.read() if kind in FOLDERS else ())
