"""Writes a model folder completely or not at all. Knows files and bytes; knows no model."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxspec.errors import ConfigError, StorageError
from mlxspec.loading import progress
from mlxspec.loading.weights import Weights

SHARD_AT_MOST = 5 << 30  # bytes, as mlx-lm has it
_SPARE = 256 << 20  # bytes of the disk to be left alone


def check_target(folder: Path) -> None:
    """Raise ConfigError unless `folder` is absent or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already; name another folder, or empty it.")


@contextlib.contextmanager
def whole_folder(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a temporary folder to write to, in the same place as `folder`. It is renamed to `folder` when the block ends, and deleted
    when the block raises.

    Raises ConfigError where `folder` exists and is not empty, StorageError where `num_bytes` do not fit on the disk or the folder cannot
    be written.
    """
    check_target(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if num_bytes + _SPARE > free:
            raise StorageError(
                f"{folder} would take {progress.amount(num_bytes)}, and its disk has {progress.amount(free)} left; free some or name "
                "another."
            )
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name[:64]}.", dir=folder.parent))
    except OSError as error:
        raise StorageError(f"{folder} cannot be written to: {error.strerror}.") from error
    try:
        yield draft
        draft.chmod(0o755)
        draft.replace(folder)
    except OSError as error:
        raise StorageError(f"{folder} could not be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def save_model(folder: Path, weights: Weights, step: progress.Step) -> None:
    """Write the tensors to model*.safetensors files and write their index, as mlx-lm does. Empties `weights` meanwhile, so that at most
    one file's tensors are in memory. step: called with the bytes of each written tensor."""
    shards = _shards({k: v.nbytes for k, v in weights.items()})
    total = sum(v.nbytes for v in weights.values())
    placed: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = (
            "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        )
        save(folder / file, {name: weights.pop(name) for name in names}, step)
        placed |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def save(path: Path, weights: Weights, step: progress.Step) -> None:
    """Write tensors to one safetensors file. They are evaluated one after another, so that the sources of a tensor are released before
    the next is read. step: called with the bytes of each tensor. Raises StorageError where the file cannot be written."""
    try:
        for value in weights.values():
            mx.eval(value)
            step(value.nbytes)
        mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})
    except RuntimeError as error:
        raise StorageError(
            f"{path.name} could not be written: the disk is full, or a source file cannot be read."
        ) from error


def write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=4) + "\n", encoding="utf-8")


def _shards(sizes: dict[str, int]) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    room = SHARD_AT_MOST
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD_AT_MOST
        shards[-1].append(name)
        room -= size
    return shards
