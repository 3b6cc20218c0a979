"""Finds the files of a model folder that hold tensors: the shards, and an MTP head or a vision tower beside them. Checks names and links.

Heads lie beside a model in three ways: as `mtp.safetensors` or `model-mtp.safetensors` next to the shards, with or without a place in
the index, and as `mtp/*.safetensors`. Towers lie among the shards, or in `vision.safetensors`, where `mlxspec convert` puts them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from mlxspec.errors import ModelError
from mlxspec.loading.names import printable

INDEX = "model.safetensors.index.json"
VISION_FILE = "vision.safetensors"
_BESIDE = ("*mtp*.safetensors", "mtp/*.safetensors", VISION_FILE)


def tensor_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """(the model's shards: those that the index names, else model*.safetensors; files beside them that are no shards). Raises ModelError
    when there are none at all, or one is missing."""
    beside = sorted(p for pattern in _BESIDE for p in folder.glob(pattern) if p.is_file())
    index = folder / INDEX
    if index.is_file():
        named = _named(index)
        return named, [p for p in beside if p not in named]
    found = sorted(p for p in folder.glob("model*.safetensors") if p not in beside)
    if not found and not beside:
        raise ModelError(f"There are no model*.safetensors files in {folder}.")
    return found, beside


def is_head_file(name: str) -> bool:
    """Whether a file of a repository, by its name, is an MTP head kept beside a model."""
    return (
        re.fullmatch(r"mtp/[\w.-]+\.safetensors|[\w.-]*mtp[\w.-]*\.safetensors", name, re.ASCII) is not None
    )


def _named(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(f"{index.name} is damaged.") from error
    if not names:
        raise ModelError(f"{index.name} names no shard.")
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"(?:mtp/)?[\w.-]+\.safetensors", name, re.ASCII):
            raise ModelError(f"{index.name} names a shard {printable(name)}, which is no plain file name.")
        if not (index.parent / name).is_file():
            raise ModelError(f"The shard {name} is missing in {index.parent}.")
    return sorted(index.parent / name for name in names)


def check_links(folder: Path) -> None:
    """Raise ModelError for a link to a file outside of the folder and of Hugging Face's cache, where snapshots are made of links."""
    from huggingface_hub.constants import HF_HUB_CACHE

    allowed = (folder.resolve(), Path(HF_HUB_CACHE).resolve())
    for path in (folder, *folder.glob("*"), *folder.glob("mtp/*")):
        if path != folder and path.is_symlink():
            try:
                target = path.resolve()
            except (OSError, RuntimeError) as error:  # a loop
                raise ModelError(
                    f"{printable(path.name)} in {folder} is a link that leads nowhere."
                ) from error
            if not any(target.is_relative_to(place) for place in allowed):
                raise ModelError(
                    f"{printable(path.name)} in {folder} is a link out of that folder; copy the file it stands for."
                )
