"""Finds the drafter that `scripts/adapt` adapted to its user's texts. It is kept in the cache folder, beside models and never in them: one
for each model (its own MTP head), and one for each pair of a model and a drafter with a folder of its own.

A model is told by its files: config.json, and the header, the first and the last bytes of each file of tensors. So a drafter is found
wherever the same files lie, and not for another model or version. Its file holds a card too: what was used, when, and what was measured.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxspec.errors import ModelError, StorageError
from mlxspec.loading import hub
from mlxspec.loading.weights import Weights, read_file
from mlxspec.models.folder import ModelFolder
from mlxspec.platform import folders

_FOLDER = "adapted"
_SAMPLE = 1 << 16  # bytes of a file's beginning and of its end
_DIGITS = 32
CARD_KEY = "mlxspec_card"
CARD_FILE = "mlxspec-card.json"  # of a drafter that was made anew, in its folder
_LARGEST = 16 << 20  # bytes of it


@dataclass(frozen=True, kw_only=True)
class Card:
    """What is known of an adapted drafter. before, after: shares of drafted tokens accepted at each depth on held-out text, of the drafter
    as it drafts. texts: the files that were read. made: a date, ISO 8601."""

    model: str
    made: str
    before: tuple[float, ...]
    after: tuple[float, ...]
    tokens: int
    texts: tuple[str, ...] = field(default=())

    def told(self) -> str:
        """One line: "23.1 % → 35.0 % of drafted tokens accepted on held-out text, 12,800 tokens read, made 2026-11-26"."""
        shares = " → ".join(f"{100 * depths[0]:.1f} %" for depths in (self.before, self.after))
        return f"{shares} of drafted tokens accepted on held-out text, {self.tokens:,} tokens read, made {self.made}"


@dataclass(frozen=True, kw_only=True)
class AdaptedHead:
    """path: of its weights, by the names that a folder has for them; norms of an MTP head shifted."""

    path: Path
    card: Card

    def weights(self) -> Weights:
        """Lazily. Raises ModelError for a damaged file."""
        # whatever holds an MTP head alone is read as if its names began with mtp.
        return {name.removeprefix("mtp."): value for name, value in read_file(self.path).items()}


def find(model: ModelFolder, beside: ModelFolder | None = None) -> AdaptedHead | None:
    """What was adapted of this model's own head, or of the drafter `beside` it; None where there is none whose card can be read."""
    try:
        path = path_of(model, beside)
    except StorageError:  # a cache folder that cannot be used keeps nothing
        return None
    if not path.is_file():
        return None
    try:
        _, metadata = mx.load(str(path), return_metadata=True)
        card = _card(json.loads(metadata[CARD_KEY]))
    except (RuntimeError, ValueError, LookupError, RecursionError):
        return None
    return None if card is None else AdaptedHead(path=path, card=card)


def card_in(folder: Path) -> Card | None:
    """Of a drafter that was made anew; None where there is none that can be read."""
    try:
        path = folder / CARD_FILE
        return _card(json.loads(path.read_bytes())) if path.stat().st_size <= _LARGEST else None
    except (OSError, ValueError, RecursionError):
        return None


def files_of(model: ModelFolder) -> list[Path]:
    """Of all that was adapted for a model, or of the drafter in a folder for any model. Raises ModelError, StorageError."""
    path = path_of(model)
    return sorted(path.parent.glob(f"*{path.stem}*{path.suffix}"))


def folder_of(name: str) -> ModelFolder:
    """The folder of a model of this name; nothing is downloaded. Raises ModelError where the model is not on this machine."""
    return ModelFolder(hub.resolve(hub.named(name), download=False))


def path_of(model: ModelFolder, beside: ModelFolder | None = None) -> Path:
    """The file of what was adapted, whether or not it is there. Raises ModelError, StorageError."""
    folder, why = folders.private_folder(_FOLDER)
    if why is not None:
        raise StorageError(why)
    digests = (_digest(part) for part in (model, beside) if part is not None)
    return folder / f"{'-'.join(digests)}.safetensors"


def _digest(model: ModelFolder) -> str:
    found = hashlib.sha256()
    try:
        found.update((model.path / "config.json").read_bytes())
        for path in sorted(model.files(), key=lambda path: path.name):
            size = path.stat().st_size
            with path.open("rb") as file:
                found.update(f"{path.name} {size}".encode() + file.read(_SAMPLE))
                file.seek(max(0, size - _SAMPLE))
                found.update(file.read(_SAMPLE))
    except OSError as error:
        raise ModelError(f"{model.path} cannot be read: {error.strerror}.") from error
    return found.hexdigest()[:_DIGITS]


def _card(data: Any) -> Card | None:
    try:
        shares = [tuple(float(x) for x in data[name]) for name in ("before", "after")]
        texts = tuple(str(path) for path in data["texts"])
        card = Card(
            model=str(data["model"]),
            made=str(data["made"]),
            before=shares[0],
            after=shares[1],
            tokens=int(data["tokens"]),
            texts=texts,
        )
    except (LookupError, TypeError, ValueError, OverflowError):
        return None
    return card if all(depths and all(0 <= x <= 1 for x in depths) for depths in shares) else None
