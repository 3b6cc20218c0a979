"""Finds the files of a model folder that hold tensors: the shards, and an MTP head or a vision tower beside them. Checks names and links.

Heads lie beside a model in three ways: as `mtp.safetensors` or `model-mtp.safetensors` next to the shards, with or without a place in
the index, and as `mtp/*.safetensors`. Towers lie among the shards, or in `vision.safetensors`, where `mlxspec convert` puts them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Set
from fnmatch import fnmatchcase
from pathlib import Path

from mlxspec.errors import ModelError
from mlxspec.loading.names import printable

INDEX = "model.safetensors.index.json"
VISION_FILE = "vision.safetensors"
_SHARD = re.compile(r"model-(\d{1,6})-of-(\d{1,6})\.safetensors", re.ASCII)
_PLAIN = re.compile(r"(?:mtp/)?[\w.-]+\.safetensors", re.ASCII)
_BLOB = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")  # how the hub's cache names a file's content
_BESIDE = ("*mtp*.safetensors", "mtp/*.safetensors", VISION_FILE)


def tensor_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the paths of the model's shards in a folder, and those of its other safetensors files (MTP heads, vision tower). Raises
    ModelError where there are none or one is missing."""
    shards, beside = tensor_names(folder, _names(folder))
    return [folder / name for name in shards], [folder / name for name in beside]


def tensor_names(folder: Path, there: Set[str]) -> tuple[list[str], list[str]]:
    """Return the names of the model's shards, and those of other safetensors files of the model (MTP heads, vision tower). The shards
    are those that the index names, else model*.safetensors. A stale index (see `stale_index`) and hidden files are ignored.

    there: names of the safetensors files that the folder holds, or will hold once they are fetched. Raises ModelError where there are
    none, or the index is damaged or names a missing file.
    """
    beside = sorted(n for n in there if any(fnmatchcase(n, p) for p in _BESIDE) and not is_hidden(Path(n)))
    found = sorted(n for n in there if fnmatchcase(n, "model*.safetensors") and n not in beside)
    if (folder / INDEX).is_file() and not stale_index(folder, there):
        named = _named(folder / INDEX, there)
        return named, [n for n in beside if n not in named]
    if not found and not beside:
        is_pytorchs = any(folder.glob("pytorch_model*.bin"))
        why = " but PyTorch's .bin files, which mlxspec does not read; fetch the model in safetensors"
        raise ModelError(f"There are no model*.safetensors files in {folder}{why if is_pytorchs else ''}.")
    return found, beside


def _names(folder: Path) -> set[str]:
    """Return the names of the safetensors files in a folder and in its `mtp` folder, relative to the former."""
    found = [p for pattern in ("*.safetensors", "mtp/*.safetensors") for p in folder.glob(pattern)]
    return {p.relative_to(folder).as_posix() for p in found if p.is_file()}


def is_hidden(path: Path) -> bool:
    """Return whether a file is hidden. macOS writes a hidden `._NAME` for every file on drives of other systems."""
    return path.name.startswith(".")


def stale_index(folder: Path, there: Set[str] | None = None) -> bool:
    """Return whether the folder's index is stale: it names none of the files that are there, although their own names form a complete
    set of shards. there: names of the safetensors files, None for those in the folder."""
    there = _names(folder) if there is None else there
    found = [name for name in there if fnmatchcase(name, "model*.safetensors")]
    numbered = [m for m in map(_SHARD.fullmatch, found) if m is not None]
    sets = {m[2] for m in numbered}
    is_whole = "model.safetensors" in found or (
        len(sets) == 1 and {int(m[1]) for m in numbered} == set(range(1, int(*sets) + 1))
    )
    try:
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        are_plain = all(isinstance(name, str) and _PLAIN.fullmatch(name) for name in names)
        return bool(names) and is_whole and are_plain and not names & there
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return False  # a damaged one is reported where it is read


def is_head_file(name: str) -> bool:
    """Return whether the name of a repository's file is that of an MTP head outside the model's shards."""
    return (
        re.fullmatch(r"mtp/[\w.-]+\.safetensors|[\w.-]*mtp[\w.-]*\.safetensors", name, re.ASCII) is not None
    )


def _named(index: Path, there: Set[str]) -> list[str]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(f"{index.name} is damaged.") from error
    if not names:
        raise ModelError(f"{index.name} names no shard.")
    for name in names:
        if not isinstance(name, str) or not _PLAIN.fullmatch(name):
            raise ModelError(f"{index.name} names a shard {printable(name)}, which is no plain file name.")
        if name not in there:
            raise ModelError(f"The shard {name} is missing in {index.parent}.")
    return sorted(names)


def check_links(folder: Path) -> None:
    """Raise ModelError where an entry of a model folder is neither a file nor a folder, or is a link that is broken or leads to a file
    that may not be part of a model. (`convert` copies files, so a link must not draw in a private one.)

    Allowed are links within the folder or into Hugging Face's cache; links named *.safetensors, whose files are checked when they are
    read and never copied; links to a blob of another cache of the hub's layout; and links to the file of the same name in another
    model's folder.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    allowed = (folder.resolve(), Path(HF_HUB_CACHE).resolve())
    for path in (
        *folder.glob("*"),
        *folder.glob("mtp/*"),
        *folder.glob("1_Pooling/*"),
        *folder.glob("?_Dense/*"),
    ):
        if is_hidden(path):
            continue
        if path.exists() and not (path.is_file() or path.is_dir()):  # opening a pipe waits for ever
            raise ModelError(f"{printable(path.name)} in {folder} is neither a file nor a folder.")
        if not path.is_symlink():
            continue
        if not path.exists():
            raise ModelError(
                f"{printable(path.name)} in {folder} is a link that leads nowhere; is the drive of its file connected?"
            )
        target = path.resolve()
        is_inside = any(target.is_relative_to(place) for place in allowed)
        if not (is_inside or target.is_dir() or _is_of_a_model(path, target)):
            raise ModelError(
                f"{printable(path.name)} in {folder} is a link out of that folder; copy the file it stands for."
            )


def _is_of_a_model(link: Path, target: Path) -> bool:
    place = target.parent
    is_blob = (
        _BLOB.fullmatch(target.name) and place.name == "blobs" and place.parent.name.startswith("models--")
    )
    is_twin = target.name == link.name and (place / "config.json").is_file()
    return link.suffix == ".safetensors" or bool(is_blob) or is_twin
