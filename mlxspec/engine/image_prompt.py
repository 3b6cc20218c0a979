"""Builds prompts with images: converts messages that hold images to the token ids and arrays of a request.

These functions run on the caller's thread, so decoding and resizing images never delays the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxspec.errors import ImageError
from mlxspec.images.prepared import PreparedImage
from mlxspec.images.source import ImageLimits, ImageSource, source_of
from mlxspec.loading.tokenizer import Tokenizer
from mlxspec.models.image_rows import ImageSpan, RowImages
from mlxspec.models.vision.base import Vision

NO_IMAGES = "This model reads no images: it has no vision tower that mlxspec can run."
LIMITS = ImageLimits()
_KINDS = ("image", "image_url")


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptWithImages:
    """A prompt with images. tokens: token ids, image tokens included. spans: for each image, in order, the range of places of its image
    tokens. images: the prepared inputs of the vision tower. notices: sentences on parts of the images that the model does not see."""

    tokens: Sequence[int]
    spans: Sequence[range]
    images: Sequence[PreparedImage]
    notices: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.tokens)


def row_images(prompt: PromptWithImages, vision: Vision) -> RowImages:
    """Return the images of the row that decodes this prompt."""
    spans = [ImageSpan(s, p) for s, p in zip(prompt.spans, prompt.images, strict=True)]
    return RowImages(spans, len(prompt.tokens), vision.prompt, vision.bidirectional)


def split_images(
    messages: Sequence[Mapping[str, Any]], limits: ImageLimits = LIMITS
) -> tuple[Sequence[Mapping[str, Any]], list[ImageSource]]:
    """Return the messages with {"type": "image"} in the place of each image, as chat templates read them, and the images in order.
    Messages without images are returned as the same objects. limits: on the size of images. Raises ImageError for a part that is no
    usable image."""
    found: list[ImageSource] = []
    split: list[Mapping[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if not isinstance(content, (list, tuple)) or not any(map(is_image, content)):
            split.append(message)
            continue
        parts: list[Any] = []
        for part in content:
            if is_image(part):
                found.append(source_of(part, limits))
                parts.append({"type": "image"})
            else:
                parts.append({"type": "text", "text": part} if isinstance(part, str) else part)
        split.append({**message, "content": parts})
    return split, found


def is_image(part: object) -> bool:
    """Return whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def prepared_prompt(
    text: str,
    sources: Sequence[ImageSource],
    vision: Vision,
    tokenizer: Tokenizer,
    *,
    limits: ImageLimits = LIMITS,
    max_pixels: int | None = None,
    **encoding: Any,
) -> PromptWithImages:
    """Encode a rendered conversation and prepare its images, and return the prompt. text: the chat template's output, with a placeholder
    for each image. sources: the images, in order. limits: on the size of images. max_pixels: most pixels of an image that has no
    limit of its own; None: the model's default. encoding: keyword arguments of `Tokenizer.encode`. Raises ImageError for an image
    that cannot be used, and where the numbers of placeholders and images differ."""
    family = vision.prompt
    spelled = tokenizer.token_text(family.placeholder)
    framed = family.framed(text, spelled) if spelled else text
    tokens = tokenizer.encode(framed, special=False, **encoding)
    if family.count(tokens) != len(sources):
        raise ImageError(
            f"The prompt has {family.count(tokens)} places for images, but {len(sources)} images were given: the chat template must know "
            "images, and messages must not spell image tokens themselves."
        )
    notices: list[str] = []
    images = [_prepared(source, vision, limits, max_pixels, notices) for source in sources]
    expanded = family.expand(tokens, [image.tokens for image in images])
    return PromptWithImages(
        tokens=expanded.tokens,
        spans=expanded.spans,
        images=tuple(images),
        notices=tuple(notices),
    )


def _prepared(
    source: ImageSource, vision: Vision, limits: ImageLimits, max_pixels: int | None, notices: list[str]
) -> PreparedImage:
    """Decode and resize an image, and return the vision tower's input. notices: receives sentences on parts of the image that the model
    does not see. Raises ImageError."""
    most = max_pixels if source.max_pixels is None else source.max_pixels
    try:
        decoded = source.decoded(limits)
        notices += source.notices(decoded)
        return vision.preprocessor.prepare(decoded, max_pixels=most)
    except ImageError as error:
        if not source.where:
            raise
        raise ImageError(f"{source.where}: {error}") from error
