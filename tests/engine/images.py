"""What tests of prompts with images share: a tower that is one matrix, images of any size without pixels, and prompts with them.

What a real tower computes is compared elsewhere; here only matters that every image token has a row of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxspec.engine.image_prompt import PromptWithImages
from mlxspec.images.prepared import PreparedImage
from mlxspec.images.prompt import ImagePrompt
from mlxspec.models.vision.base import Bidirectional, Vision
from tests import tiny_models

IMAGE, LOOKUP = 94, 90  # ids of the tiny vocabulary
_PIXELS = 12


class OneMatrix(nn.Module):
    """A tower of one matrix. runs: digests of the images that went through it. scratch: bytes that it says a token of an image takes."""

    def __init__(self, hidden: int = 64, seed: int = 11, scratch: int = 0) -> None:
        super().__init__()
        drawn = np.random.default_rng(seed).normal(0.0, 1.0, (_PIXELS, hidden)) / np.sqrt(_PIXELS)
        self.weight = mx.array(drawn.astype(np.float32))
        self._runs: list[bytes] = []
        self._scratch = scratch

    @property
    def runs(self) -> list[bytes]:
        return self._runs

    def __call__(self, prepared: PreparedImage) -> mx.array:
        self._runs.append(prepared.digest)
        return mx.array(prepared.pixels) @ self.weight

    def scratch_bytes(self, tokens: int) -> int:
        return self._scratch * tokens


def vision(
    *, hidden: int = 64, seed: int = 11, bidirectional: Bidirectional = "none", scratch: int = 0
) -> Vision:
    """No test prepares images of real pixels with it."""
    return Vision(
        tower=OneMatrix(hidden, seed, scratch),
        preprocessor=None,  # type: ignore[arg-type]
        prompt=ImagePrompt(placeholder=IMAGE, image=IMAGE, lookup=LOOKUP),
        bidirectional=bidirectional,
    )


def image(height: int, width: int, seed: int, *, axes: bool = True) -> PreparedImage:
    """An image of height x width tokens. axes: whether positions have three axes, as in Qwen's family."""
    pixels = np.random.default_rng(seed).normal(0.0, 1.0, (height * width, _PIXELS)).astype(np.float32)
    rows, columns = np.divmod(np.arange(height * width), width)
    return PreparedImage(
        pixels=pixels,
        grid=(1, 2 * height, 2 * width),
        tokens=height * width,
        positions=np.stack([0 * rows, rows, columns], axis=1).astype(np.int32) if axes else None,
        digest=hashlib.sha256(pixels.tobytes()).digest(),
    )


def prompt(*parts: Sequence[int] | PreparedImage) -> PromptWithImages:
    """Of stretches of text and images."""
    tokens: list[int] = []
    spans, images = [], []
    for part in parts:
        if isinstance(part, PreparedImage):
            spans.append(range(len(tokens), len(tokens) + part.tokens))
            tokens += [IMAGE] * part.tokens
            images.append(part)
        else:
            tokens += part
    return PromptWithImages(tokens=tokens, spans=spans, images=images)


def text(num: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, IMAGE - 8, num).tolist()


def random_prompt(seed: int, *, axes: bool = True, most: int = 5) -> PromptWithImages:
    """One to three images between stretches of text, some of which repeat each other; the same image may come twice."""
    rng = np.random.default_rng(seed)
    parts: list[Sequence[int] | PreparedImage] = []
    stretch = text(int(rng.integers(2, 9)), seed)
    for i in range(int(rng.integers(1, 4))):
        parts.append(stretch if rng.random() < 0.5 else text(int(rng.integers(1, 30)), seed + i))
        height, width = (int(n) for n in rng.integers(1, most + 1, 2))
        parts.append(image(height, width, int(rng.integers(0, 2)) + 100 * height + 10 * width, axes=axes))
    parts.append(stretch * 2 if rng.random() < 0.5 else text(int(rng.integers(1, 30)), seed + 9))
    return prompt(*parts)


def positions(given: PromptWithImages, num_more: int = 0) -> np.ndarray:
    """(N + num_more, 3): what Qwen's rule says, written once more: an image begins where the text has come to, and the text goes on behind
    the larger of its sides."""
    found: list[tuple[int, int, int]] = []
    at, place = 0, 0
    for span, prepared in [*zip(given.spans, given.images, strict=True), (None, None)]:
        stop = len(given.tokens) + num_more if span is None else span.start
        found += [(p, p, p) for p in range(at, at + stop - place)]
        at += stop - place
        if span is not None and prepared is not None:
            height, width = prepared.grid[1] // 2, prepared.grid[2] // 2
            found += [(at, at + y, at + x) for y in range(height) for x in range(width)]
            at += max(height, width)
            place = span.stop
    return np.asarray(found, np.int32)


def greedy(model, given: PromptWithImages, num: int, tower: OneMatrix) -> list[int]:  # type: ignore[no-untyped-def]
    """The continuation that a forward over everything gives, once more for every token: no cache, no chunks, no positions in between."""
    return greedy_with_logprobs(model, given, num, tower)[0]


def greedy_with_logprobs(model, given: PromptWithImages, num: int, tower: OneMatrix):  # type: ignore[no-untyped-def]
    """(tokens, their log-probabilities)"""
    from mlxspec.kernels.flat import FlatRows
    from mlxspec.models.image_rows import ImageInput

    answer: list[int] = []
    sure: list[float] = []
    rows = tuple(
        (span.start, tower(prepared)) for span, prepared in zip(given.spans, given.images, strict=True)
    )
    ids = list(given.tokens)
    for span in given.spans:
        ids[span.start : span.stop] = [LOOKUP] * len(span)
    for _ in range(num):
        tokens = [*ids, *answer]
        out = model.forward(
            mx.array(tokens, mx.int32),
            FlatRows((len(tokens),)),
            model.make_cache(1),
            certain=True,
            logits_at="last",
            images=ImageInput(rows=rows, positions=positions(given, len(answer))),
        )
        answer.append(int(mx.argmax(out.logits[-1]).item()))
        sure.append(float((out.logits[-1].max() - mx.logsumexp(out.logits[-1])).item()))
    return answer, sure


__all__ = [
    "IMAGE",
    "OneMatrix",
    "greedy",
    "image",
    "positions",
    "prompt",
    "random_prompt",
    "text",
    "tiny_models",
    "vision",
]
