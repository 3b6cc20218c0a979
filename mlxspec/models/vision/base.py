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
    """A tower with its projection to the text model."""

    def __call__(self, prepared: PreparedImage) -> mx.array:
        """(tokens, hidden size of the text model) in the text model's dtype, lazy. The rows replace the embeddings of the image tokens as
        they are: a scale of embeddings is not applied to them."""
        ...

    def scratch_bytes(self, tokens: int) -> int:
        """Return the bytes that a call for an image of `tokens` tokens takes in addition to the weights while it runs, at most."""
        ...


@dataclass(frozen=True, kw_only=True)
class Vision:
    """All that a model has for images.

    bidirectional: in which layers of the text model the tokens of one image attend to each other; then a chunk of a prompt must not end
    within an image. parameters, nbytes: of the tower, in numbers and in bytes of memory.
    """

    tower: VisionTower
    preprocessor: Preprocessor
    prompt: ImagePrompt
    bidirectional: Bidirectional = "none"
    parameters: int = 0
    nbytes: int = 0
