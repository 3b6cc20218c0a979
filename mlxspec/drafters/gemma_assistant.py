"""Drafting with a Gemma 4 assistant, the MTP head of that family: it reads the target's own keys and values, so it keeps nothing but the
hidden that the newest token was sampled from.

Knows rows and which hidden goes with which token; the loop over a draft is model_based.py's, the steps are the assistant's. There is
nothing to catch up: whatever has been observed, a draft costs its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mlx.core as mx

from mlxspec.cache.model_cache import ModelCache
from mlxspec.cache.snapshot import Snapshot
from mlxspec.drafters.base import NO_DRAFT, Ask, Draft, Needs
from mlxspec.drafters.model_based import DraftStep, ModelDrafter, _Row
from mlxspec.models.base import Output
from mlxspec.models.gemma4_assistant import Gemma4Assistant
from mlxspec.models.head_rows import HeadRows
from mlxspec.sampling.sampler import BatchSampler


class _Borrowed(ModelCache):
    """The target's keys and values during a draft, used in place of a cache of the assistant's own. Nothing is written, so a fork is the
    object itself.

    views: keys and values in the form that the assistant reads, for the rows of the draft; positions: of these rows' newest known tokens.
    """

    def __init__(self, assistant: Gemma4Assistant, cache: ModelCache, rows: Sequence[int]) -> None:
        super().__init__([], len(rows))
        self.views = assistant.views(cache, rows)
        self.positions = [cache.lengths[r] for r in rows]

    def fork(self, *, tails: bool = False) -> _Borrowed:
        return self

    def commit(self, kept: Sequence[int] | None = None) -> None:
        """Do nothing: the assistant writes nothing into the cache."""


class GemmaAssistant(ModelDrafter):
    """A drafter that drafts with Gemma 4's assistant model and the target's keys and values. Registered as `mtp`. `attach` must be called
    before `draft`."""

    name = "mtp"
    needs = Needs(hidden=True, newest=True, cache=True)
    sees_images = True  # in the target's keys and values
    turns_by_axes = False

    def __init__(
        self, assistant: Gemma4Assistant, max_context: int, head_rows: HeadRows | None = None
    ) -> None:
        """Draft with `assistant`. max_context: the target's, in tokens. head_rows: the rows of the assistant's language-model head to
        score, None for all."""
        super().__init__(assistant, max_context, head_rows)
        self._newest: dict[int, mx.array] = {}  # row -> hidden (1, H)
        self._target: ModelCache | None = None
        self._places: dict[int, int] = {}

    def attach(self, cache: ModelCache, order: Sequence[int]) -> None:
        self._target, self._places = cache, {row: place for place, row in enumerate(order)}

    def begin(self, row: int) -> None:
        self._newest.pop(row, None)

    def hear(self, row: int, tokens: Sequence[int], hidden: mx.array | None) -> None:
        if tokens and hidden is not None:
            # a copy: the whole round's hiddens need not stay for one of them
            self._newest[row] = mx.contiguous(hidden[-1:])

    def snapshot(self, row: int, length: int, start: int) -> None:
        """Return None: the hidden state that the assistant needs is given with the next token."""

    def resume(self, row: int, tokens: Sequence[int], state: Snapshot | None) -> None:
        """Do nothing: the assistant reads the prompt in the target's cache."""

    def forget(self, row: int) -> None:
        self._newest.pop(row, None)
        if self.reduced is not None:
            self.reduced.forget(row)
        if not self._newest:
            self._target, self._places = None, {}

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._newest.values())

    def row_bytes(self, length: int) -> int:
        return 0 if self.reduced is None else self.reduced.own_bytes(length)

    def draft(self, asks: Sequence[Ask], sampler: BatchSampler) -> list[Draft]:
        """Return one draft for each of `asks`. Raises ValueError where `attach` was not called."""
        if self._target is None:
            raise ValueError("an assistant drafts beside its target's cache only")
        ready = {a.row: a for a in asks if self._is_ready(a, self._target)}
        if not ready:
            return [NO_DRAFT] * len(asks)
        self._order = sorted(ready, key=self._places.__getitem__)
        self._cache = _Borrowed(self.model, self._target, [self._places[row] for row in self._order])
        for row, ask in ready.items():
            self._rows[row] = waiting = _Row()
            waiting.tokens, waiting.hidden = [ask.history[-1]], [self._newest[row]]
        fits = [a._replace(limit=min(a.limit, self.max_context - len(a.history))) for a in ready.values()]
        try:
            done = self._draft(fits, sampler, {a.row: i for i, a in enumerate(asks)})
            # views of the target's buffers must be gone when its verify writes there, or MLX copies those buffers whole
            mx.eval([[d.tokens, d.confidences] for d in done.values()])
        finally:
            self._cache, self._order = None, []
            self._rows.clear()
        return [done.get(a.row, NO_DRAFT) for a in asks]

    def _is_ready(self, ask: Ask, target: ModelCache) -> bool:
        """Return whether a row can be drafted for: the drafter holds the hidden state that the row's newest token was sampled from, the
        target's cache has all of the row's tokens but the newest, and at least one, and the row is shorter than `max_context`."""
        place, length = self._places.get(ask.row), len(ask.history)
        if place is None or ask.row not in self._newest or length >= self.max_context:
            return False
        return target.lengths[place] == length - 1 > 0

    def _forward(self, step: DraftStep) -> Output:
        tokens, hidden, rows, cache = step.tokens, step.hidden, step.rows, step.cache
        if hidden is None or not isinstance(cache, _Borrowed):
            raise ValueError("an assistant needs the newest hidden, and its target's keys and values")
        positions = [cache.positions[r] for r in rows.active]
        views = {kind: [seen[r] for r in rows.active] for kind, seen in cache.views.items()}
        if self.proposals is None:
            return self.model.step(tokens, hidden, positions, views)
        head = partial(self.proposals.logits, rows=[self._order[r] for r in rows.active])
        return self.model.step(tokens, hidden, positions, views, head=head)
