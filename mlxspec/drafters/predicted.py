"""Drafting from a text that the request brought along as what its answer will probably be (OpenAI's predicted outputs).

Where the answer stands in it is found by alignment.py. Behind a place that has just been found a draft is short, as few tokens speak for
it. Costs no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxspec.drafters.alignment import Alignment
from mlxspec.drafters.base import NO_DRAFT, Ask, Draft, Drafter
from mlxspec.sampling.sampler import BatchSampler

_FIRST = 16  # tokens of a draft before anything of the answer is known


class _Row:
    """What a row's answer is compared with. unread: tokens of the prompt that have not been heard."""

    def __init__(self, predicted: Sequence[int], num_prompt: int) -> None:
        self.alignment, self.unread, self.is_begun = Alignment(predicted), num_prompt, False


class Predicted(Drafter):
    """Asked before all other drafters but what a grammar forces, for rows whose request brought a text."""

    name = "predicted"
    max_draft = 63  # tokens: with the row's own a width that compiles

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def expect(self, row: int, predicted: Sequence[int], num_prompt: int) -> None:
        """Told in place of `begin`. predicted: ids of the text; num_prompt: tokens of the row's history before the answer."""
        self._rows[row] = _Row(predicted, num_prompt)

    def observe(self, row: int, tokens: Sequence[int], hidden: mx.array | None) -> None:
        state = self._rows[row]
        answer = tokens[state.unread :]
        state.unread = max(0, state.unread - len(tokens))
        if answer:
            state.is_begun = True
            state.alignment.push(answer)

    def propose(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        return [self._draft(self._rows[ask.row], ask.limit) for ask in asks]

    def _draft(self, state: _Row, limit: int) -> Draft:
        agreed = state.alignment.agreed
        most = 2 ** min(agreed, 6) if state.is_begun else _FIRST  # twice as many for each token that agrees
        tokens = state.alignment.next(min(limit, most))
        return Draft(len(tokens), tokens, backing=agreed) if tokens else NO_DRAFT

    def may_draft(self, row: int) -> bool:
        return self._rows[row].alignment.place is not None

    def close(self, row: int) -> None:
        self._rows.pop(row, None)

    @property
    def nbytes(self) -> int:
        return sum(row.alignment.nbytes for row in self._rows.values())
