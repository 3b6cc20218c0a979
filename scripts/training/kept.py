"""Stores what was adapted in the place where `load` finds it (mlxspec/checkpoints/adapted_head.py), one run at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx

from mlxspec.checkpoints.adapted_head import CARD_KEY, Card, path_of
from mlxspec.errors import ConfigError, StorageError
from mlxspec.models.folder import ModelFolder


def keep(
    model: ModelFolder, weights: Mapping[str, mx.array], card: Card, beside: ModelFolder | None = None
) -> Path:
    """Put a drafter in the place of the one before. Raises StorageError; the one before is there then."""
    path = path_of(model, beside)
    new = path.with_name(f"{path.stem}.new.safetensors")
    try:
        mx.save_safetensors(
            str(new), dict(weights), metadata={"format": "mlx", CARD_KEY: json.dumps(asdict(card))}
        )
        new.replace(path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise StorageError(f"The adapted drafter cannot be kept in {path.parent}: {error}.") from error
    return path


def lock_of(model: ModelFolder, beside: ModelFolder | None = None) -> Path:
    """A file that is held by who adapts this drafter. Raises ModelError, StorageError."""
    path = path_of(model, beside).with_suffix(".lock")
    path.touch()
    return path


@contextlib.contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Holds a file or a folder that is there. Raises ConfigError where another process holds it."""
    held = os.open(lock, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError("Another run adapts this drafter already; wait for it, or end it.") from error
        yield
    finally:
        os.close(held)
