"""Reads an MTP head from another folder or repository than the model's, and opens or fetches only the files that hold it.

Knows files and names; what a head must be for a trunk is known to models/assemble_drafter.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from mlxspec.errors import ModelError
from mlxspec.loading import hub, ranges, repositories
from mlxspec.loading.folder import INDEX, is_head_file, tensor_files
from mlxspec.loading.names import NAME_LENGTH, printable
from mlxspec.loading.qwen_weights import HEAD, is_raw, split_mtp
from mlxspec.loading.ranges import Repository, Selection
from mlxspec.loading.safetensors import check_header
from mlxspec.loading.weights import Weights, is_bare_head, read_file
from mlxspec.platform.folders import temporary_folder


class GraftedHead(NamedTuple):
    """An MTP head that was read from another folder or repository than the model's. weights: its lazy tensors, under the names that they
    have there. raw: whether its norms are zero-centred, None where only the values can show that."""

    weights: Weights
    raw: bool | None


class RemoteHead(NamedTuple):
    """An MTP head of a repository, not fetched yet. selection: its tensors in the repository's files; raw: as in GraftedHead."""

    selection: Selection
    raw: bool | None


def read_head(original: str) -> GraftedHead:
    """Read the MTP head of a model and return it. original: a folder or a repository. Where a repository is not in the cache, only the
    bytes of the head are fetched, into a temporary file that is removed when the process ends. Raises ModelError where there is no
    head."""
    local = hub.is_local(original)
    if not local:
        repositories.check_repo(original)
    folder = hub.resolve(original) if local else hub.cached(original)
    if folder is None:
        remote = head_in(ranges.look(original))
        if remote is None:
            raise _no_head(original)
        wanted = remote.selection
        path = ranges.fetch(wanted, temporary_folder() / f"{wanted.key}.safetensors")
        return GraftedHead(read_file(path), remote.raw)
    found: Weights = {}
    for path in _holding_head(folder):
        found |= read_file(path)
    rest, head = split_mtp(found)
    if not head:
        raise _no_head(original)
    return GraftedHead({k: v for k, v in found.items() if k not in rest}, is_raw(rest) if rest else None)


def head_in(where: Repository) -> RemoteHead | None:
    """Find the MTP head in a repository on the hub and return its place; None where the repository holds none. Fetches the index and the
    headers of the files that may hold it. Raises ModelError where those are damaged or cannot be fetched."""
    files = [name for name in where.sizes if name.endswith(".safetensors")]
    beside = [name for name in files if is_head_file(name)]
    places = _places(where)
    if places is None:
        shards = {name for name in files if re.fullmatch(r"model[\w.-]*", name)}
    else:
        shards = {file for name, file in places.items() if HEAD.match(name)} & set(files)
    held = ranges.headers(where, sorted({*beside, *shards}))
    bare = {name for name in beside if is_bare_head(held[name][1])}
    selection = ranges.select(where, held, lambda file, name: file in bare or HEAD.match(name) is not None)
    if not selection.tensors:
        return None
    # conventions are told by names and shapes: no value is needed
    shapes = {name: e.shape for file in shards for name, e in held[file][1].items()}
    rest = {
        name: mx.zeros(shapes.get(name, (1,))) for name in {*(places or ()), *shapes} if not HEAD.match(name)
    }
    return RemoteHead(selection, is_raw(rest) if rest else None)


def _no_head(original: str) -> ModelError:
    return ModelError(
        f"{printable(original, NAME_LENGTH)} holds no MTP head (no tensors named mtp.*); name the original repository."
    )


def _places(where: Repository) -> dict[str, str] | None:
    """Return the file name of each tensor by the repository's index, None where the repository has no index. Raises ModelError where it
    is damaged."""
    if INDEX not in where.sizes:
        return None
    places = ranges.read_json(where, INDEX).get("weight_map")
    if not isinstance(places, dict):
        raise ModelError(f"{INDEX} of {where.repo} is damaged.")
    return {name: str(file) for name, file in places.items()}


def _holding_head(folder: Path) -> list[Path]:
    shards, beside = tensor_files(folder)
    return [p for p in shards if any(HEAD.match(name) for name in check_header(p))] + beside
