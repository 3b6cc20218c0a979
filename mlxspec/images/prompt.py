"""Replaces each image's placeholder in a prompt by one token for each row that the image takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxspec.errors import ImageError


@dataclass(frozen=True, kw_only=True)
class ExpandedPrompt:
    """A prompt with all its image tokens. tokens: the whole prompt. spans: for each image, in order, the range of its image tokens in
    `tokens`."""

    tokens: list[int]
    spans: tuple[range, ...]


@dataclass(frozen=True, kw_only=True)
class ImagePrompt:
    """The tokens and texts by which a model family marks images in a prompt.

    placeholder: id that the chat template writes once per image. image: id of an image token. before, behind: ids around an image's tokens;
    together they replace the placeholder. lookup: id that is embedded at image positions. The vision tower's output then replaces these
    embeddings, but per-layer embeddings keep them. frame: texts that are put before and after a placeholder before tokenization.
    """

    placeholder: int
    image: int
    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    lookup: int
    frame: tuple[str, str] = ("", "")

    def framed(self, text: str, placeholder: str) -> str:
        """Return `text` with the family's text before and after each placeholder. placeholder: the placeholder's spelling in `text`."""
        return text.replace(placeholder, placeholder.join(self.frame)) if any(self.frame) else text

    def count(self, tokens: Sequence[int]) -> int:
        """Return the number of placeholders in a prompt that has not been expanded."""
        return tokens.count(self.placeholder)

    def expand(self, tokens: Sequence[int], num_tokens: Sequence[int]) -> ExpandedPrompt:
        """Replace each placeholder of a prompt by the tokens of its image, and return the expanded prompt.

        tokens: with one placeholder for each image. num_tokens: `PreparedImage.tokens` of each image, in order. Raises ImageError where the
        numbers of images and placeholders differ.
        """
        if self.count(tokens) != len(num_tokens):
            raise ImageError(
                f"The prompt has {self.count(tokens)} places for images, but {len(num_tokens)} images were given."
            )
        expanded: list[int] = []
        spans = []
        sizes = iter(num_tokens)
        for token in tokens:
            if token != self.placeholder:
                expanded.append(token)
                continue
            start = len(expanded) + len(self.before)
            size = next(sizes)
            spans.append(range(start, start + size))
            expanded += [*self.before, *[self.image] * size, *self.behind]
        return ExpandedPrompt(tokens=expanded, spans=tuple(spans))
