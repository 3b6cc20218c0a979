"""Drafting from everything said before: earlier texts of the same owner, and what the answer copies from its own prompt.

Earlier texts are looked up by the longest suffix (text_index.py). A text is learned when its row closes, and only of rows that this drafter
heard. An answer that has copied COPIED tokens of its prompt in a row is followed there by alignment (alignment.py), as a predicted output
is: so a file in the prompt drafts its own edit, whatever format the answer has. What agrees with more of the text's last tokens drafts.
Other repetitions within a text are `ngram-simple`'s. Costs no model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import mlx.core as mx

from mlxspec.drafters.alignment import TOKEN_ALIGNED, Alignment
from mlxspec.drafters.base import NO_DRAFT, Ask, Draft, Drafter
from mlxspec.drafters.text_index import TextIndex
from mlxspec.sampling.sampler import BatchSampler

COPIED = 16  # tokens in a row: the answer copies its prompt
BEFORE, BEHIND = 2048, 6144  # tokens of the prompt around such a place that are followed
_BLOCK = COPIED // 2  # tokens of the blocks of the prompt by which copies are noticed


class _Row:
    """tokens: prompt and answer; source: what of the prompt is followed, tokens `begin` to `end` of it."""

    def __init__(self, owner: str, num_prompt: int) -> None:
        self.owner = hashlib.sha256(owner.encode()).hexdigest()[:32]
        self.tokens: list[int] = []
        self.source: Alignment | None = None
        self._num_prompt, self._begin, self._end = num_prompt, 0, 0
        self._blocks: dict[tuple[int, ...], int] | None = None  # -> the place behind it

    def extend(self, tokens: Sequence[int]) -> None:
        unread = max(0, self._num_prompt - len(self.tokens))
        self.tokens += tokens[:unread]
        for token in tokens[unread:]:
            self.tokens.append(token)
            self._follow(token)

    def _follow(self, token: int) -> None:
        """A token of the answer."""
        if self.source is not None:
            self.source.push((token,))
        if self._blocks is None:
            ends = range(2 * _BLOCK, self._num_prompt, _BLOCK)
            self._blocks = {tuple(self.tokens[end - _BLOCK : end]): end for end in ends}
        end = self._blocks.get(tuple(self.tokens[-_BLOCK:]))
        if end is None or self._begin <= end <= self._end:
            return
        if (
            self.tokens[-COPIED:] == self.tokens[end - COPIED : end]
            and len(self.tokens) - self._num_prompt >= COPIED
        ):
            self._begin, self._end = max(0, end - BEFORE), min(self._num_prompt, end + BEHIND)
            self.source = Alignment(self.tokens[self._begin : self._end])
            self.source.start(end - self._begin, self.tokens[-COPIED:])

    def copied(self, limit: int) -> Draft:
        """How the prompt goes on where the answer copies it."""
        if self.source is None or not self.source.agreed:
            return NO_DRAFT
        tokens = self.source.next(min(limit, 2 ** min(self.source.agreed, 6)))
        text = next((tokens[:i] for i, token in enumerate(tokens) if token < 0), tokens)
        return Draft(len(text), text, backing=self.source.agreed) if text else NO_DRAFT


class Suffix(Drafter):
    """index: None keeps and finds nothing."""

    name = "suffix"
    max_draft = 63  # tokens: with the row's own a width that compiles

    def __init__(self, index: TextIndex | None = None) -> None:
        self.index = index or TextIndex(0)
        self._rows: dict[int, _Row] = {}

    def expect(self, row: int, owner: str, num_prompt: int) -> None:
        """Told in place of `begin`. owner: whose earlier texts may be drafted from; num_prompt: tokens of the row before its answer."""
        self._rows[row] = _Row(owner, num_prompt)

    def observe(self, row: int, tokens: Sequence[int], hidden: mx.array | None) -> None:
        self._rows[row].extend(tokens)

    def propose(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        return [self._draft(self._rows[ask.row], ask.limit) for ask in asks]

    def _draft(self, row: _Row, limit: int) -> Draft:
        copied = row.copied(limit)
        found = self.index.find(row.owner, row.tokens, limit)
        if found is None or not found.tokens or (copied.backing or 0) >= found.length:
            return copied
        return Draft.of(found.tokens, found.confidences)

    def may_draft(self, row: int) -> bool:
        return self._draft(self._rows[row], 1) is not NO_DRAFT

    def close(self, row: int) -> None:
        known = self._rows.pop(row, None)
        if known is not None:
            self.index.add(known.owner, known.tokens)

    @property
    def nbytes(self) -> int:
        sources = sum(TOKEN_ALIGNED * (BEFORE + BEHIND) for row in self._rows.values() if row.source)
        return sources + sum(8 * len(row.tokens) for row in self._rows.values())
