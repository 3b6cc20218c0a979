"""Keeps image tokens out of lookups: they are like no token, so no n-gram that holds one occurs twice, and none is proposed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from mlxspec.drafters.base import NO_DRAFT, Draft

_NO_TOKEN = (
    1 << 30
)  # above every vocabulary, and with a number for each token of a context below 32 bits, as the tables keep tokens


class TextOnly:
    """Of a drafter's rows those with images; it does nothing to the others."""

    def __init__(self) -> None:
        self._rows: dict[int, Iterator[int]] = {}  # numbers that are used once

    def see(self, row: int) -> None:
        """The row's prompt holds images."""
        self._rows[row] = count(_NO_TOKEN)

    def tokens(self, row: int, tokens: Sequence[int]) -> Sequence[int]:
        """What a lookup remembers of these tokens: for each image token a number that stands nowhere else."""
        unlike = self._rows.get(row)
        return tokens if unlike is None else [t if t >= 0 else next(unlike) for t in tokens]

    def draft(self, row: int, draft: Draft) -> Draft:
        """What of a draft of host tokens comes before the first image token."""
        if row not in self._rows:
            return draft
        length = next((i for i, token in enumerate(draft.tokens) if token >= _NO_TOKEN), draft.length)
        if length == draft.length:
            return draft
        sure = None if draft.confidences is None else draft.confidences[:length]
        return Draft(length, draft.tokens[:length], sure, backing=draft.backing) if length else NO_DRAFT

    def close(self, row: int) -> None:
        self._rows.pop(row, None)
