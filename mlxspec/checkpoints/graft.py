"""An MTP head out of another folder or repository than the model's, opening (and fetching) only the files that hold it.

Knows files and names; what a head must be for a trunk is known to models/assemble.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from mlxspec.errors import ModelError
from mlxspec.loading import download, hub
from mlxspec.loading.folder import INDEX, tensor_files
from mlxspec.loading.safetensors import check_header
from mlxspec.loading.weights import Weights, read_file

_HEAD = re.compile(r"(?:model\.|language_model\.)*mtp\.")


def read_head(original: str, revision: str | None = None) -> Weights:
    """Its tensors, lazily, and the others of the same files. original: a folder or Hugging Face id. Raises ModelError if there is none."""
    found: Weights = {}
    for path in _files(original, revision):
        found |= read_file(path)
    if not any(_HEAD.match(name) for name in found):
        raise ModelError(
            f"{hub.shown(original)} holds no MTP head (no tensors named mtp.*); name the original repository."
        )
    return found


def _files(original: str, revision: str | None) -> list[Path]:
    if hub.is_local(original):
        return _holding_head(hub.resolve(original, revision=revision))
    hub.check_repo(original)
    folder = hub.cached(original, revision)
    if folder is not None:
        return _holding_head(folder)
    plan = download.plan(original, revision)
    sizes = {f.name: f for f in plan.files}
    wanted = [f for f in plan.files if f.name.endswith(".safetensors")]
    if INDEX in sizes:
        folder = download.fetch(plan._replace(files=(sizes[INDEX],)))
        names = _named(folder / INDEX)
        beside = [f.name for f in wanted if "mtp" in f.name]
        wanted = [f for f in wanted if f.name in names or f.name in beside]
    if not wanted:
        raise ModelError(
            f"{original} holds no MTP head (its index names no tensors mtp.*); name the original repository."
        )
    folder = download.fetch(plan._replace(files=tuple(wanted)))
    return [folder / f.name for f in wanted]


def _named(index: Path) -> set[str]:
    """The files that an index says hold the head."""
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
        return {str(file) for name, file in places if _HEAD.match(name)}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(f"{index.name} is damaged.") from error


def _holding_head(folder: Path) -> list[Path]:
    shards, beside = tensor_files(folder)
    return [p for p in shards if any(_HEAD.match(name) for name in check_header(p))] + beside
