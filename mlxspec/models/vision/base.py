"""The interface of vision towers, and the collection of all that a model has for images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import mlx.core as mx

from mlxspec.images.prepared import PreparedImage, Preprocessor
from mlxspec.images.prompt import ImagePrompt

# Layers of the text model in which the tokens of one image attend to each other, whatever their order.
Bidirectional = Literal["none", "windowed", "all"]


class VisionTower(Protocol):
    """The interface of a vision tower with its projection to the text model."""

    def __call__(self, prepared: PreparedImage) -> mx.array:
        """Return the rows (tokens, hidden size of the text model) of an image, lazily and in the text model's dtype. They replace the
        embeddings of the image tokens, without the factor by which some models multiply embeddings."""
        ...

    def scratch_bytes(self, tokens: int) -> int:
        """Return an upper bound of the bytes that a call for an image of `tokens` tokens takes while it runs, in addition to the
        weights."""
        ...


@dataclass(frozen=True, kw_only=True)
class Vision:
    """All that a model needs for images.

    bidirectional: in which layers of the text model the tokens of one image attend to each other; where it is not "none", a chunk of a
    prompt must not end within an image. parameters: number of the tower's parameters; nbytes: their bytes.
    """

    tower: VisionTower
    preprocessor: Preprocessor
    prompt: ImagePrompt
    bidirectional: Bidirectional = "none"
    parameters: int = 0
    nbytes: int = 0
