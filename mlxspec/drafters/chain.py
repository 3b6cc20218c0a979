"""Several drafters as one: facts go to all of them, and for each row the first that proposes anything wins the round.

Knows the users' limits (n_max, n_min, p_min) and applies them; knows no acceptance. A drafter that fails ends for the rows it was
asked about, with a notice; the request goes on without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import mlx.core as mx
import numpy as np

from mlxspec.config import SpecConfig
from mlxspec.drafters.base import NO_DRAFT, Ask, Draft, Drafter
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.sampling.sampler import BatchSampler, RowSampler
from mlxspec.speculation.verify import trim

T = TypeVar("T")


@dataclass(kw_only=True)
class ChainRow:
    """What the chain remembers of a row. ended: drafters that failed for it, or reached their context's end."""

    row: int
    spec: SpecConfig
    sampler: RowSampler
    notices: list[str] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One row's winning draft; drafter None and length 0 for a plain round."""

    drafter: str | None = None
    draft: Draft = NO_DRAFT


class Chain:
    """Drafters by name. Each row's own list says in which order they are asked for it."""

    def __init__(self, drafters: Iterable[Drafter]) -> None:
        self.drafters = {d.name: d for d in drafters}
        self._rows: dict[int, ChainRow] = {}
        self.seconds: dict[str, float] = dict.fromkeys(self.drafters, 0.0)

    @property
    def needs_hidden(self) -> bool:
        """Whether any drafter in use by any row wants hiddens."""
        return any(d.needs.hidden for r in self._rows.values() for d in self._of(r))

    def begin(self, row: int, spec: SpecConfig, sampler: RowSampler) -> ChainRow:
        state = self._rows[row] = ChainRow(row=row, spec=spec, sampler=sampler)
        for drafter in self._of(state):
            self._guard(drafter, [state], partial(drafter.begin, row))
        return state

    def observe(self, row: int, tokens: Sequence[int], hidden: mx.array | None) -> None:
        state = self._rows[row]
        for drafter in self._of(state):
            given = hidden if drafter.needs.hidden else None
            self._guard(drafter, [state], partial(drafter.observe, row, tokens, given))

    def truncate(self, row: int, length: int) -> None:
        state = self._rows[row]
        for drafter in self._of(state):
            self._guard(drafter, [state], partial(drafter.truncate, row, length))

    def close(self, row: int) -> None:
        self._rows.pop(row, None)
        for drafter in self.drafters.values():
            drafter.close(row)

    def longest_draft(self, spec: SpecConfig) -> int:
        """Tokens of the longest draft under `spec`, by the drafters it names or, if none, any."""
        names = [n for n in spec.drafters or self.drafters if n in self.drafters]
        return max((_limit(self.drafters[n], spec) for n in names), default=0)

    def propose(
        self, rooms: Mapping[int, int], histories: Mapping[int, Sequence[int]], vocab_size: int
    ) -> dict[int, Proposal]:
        """rooms: row -> how many drafted tokens it may verify. Rows without a proposal are absent."""
        won: dict[int, Proposal] = {}
        waiting = {row: [d.name for d in self._of(self._rows[row])] for row in rooms}
        while queues := [(row, names) for row, names in waiting.items() if names and row not in won]:
            name = queues[0][1][0]
            asks = []
            for row, names in queues:
                if names[0] != name:
                    continue
                names.pop(0)
                state = self._rows[row]
                limit = min(rooms[row], _limit(self.drafters[name], state.spec))
                if limit > 0:
                    asks.append(Ask(row, histories[row], limit, state.sampler))
            if asks:
                won |= self._ask(self.drafters[name], asks, vocab_size)
        return won

    def _ask(self, drafter: Drafter, asks: Sequence[Ask], vocab_size: int) -> dict[int, Proposal]:
        """Proposals of one drafter, for the rows for which it has any."""
        started = time.perf_counter()
        states = [self._rows[a.row] for a in asks]
        sampler = BatchSampler([a.sampler for a in asks], vocab_size)
        drafts = self._guard(drafter, states, partial(_propose, drafter, asks, sampler, states))
        for state, draft in zip(states, drafts or [], strict=drafts is not None):
            if draft.ended is not None:
                self._end(drafter, state, draft.ended)
        self.seconds[drafter.name] += time.perf_counter() - started
        pairs = zip(asks, drafts or [], strict=drafts is not None)
        return {ask.row: Proposal(drafter=drafter.name, draft=draft) for ask, draft in pairs if draft.length}

    def _of(self, state: ChainRow) -> list[Drafter]:
        names = [n for n in state.spec.drafters if n in self.drafters and n not in state.ended]
        return [self.drafters[n] for n in names]

    def _guard(self, drafter: Drafter, states: Sequence[ChainRow], work: Callable[[], T]) -> T | None:
        """Run `work`; if it fails, this drafter ends for these rows and says so."""
        try:
            return work()
        except Exception as error:  # whatever a drafter does must not end a request
            for state in states:
                self._end(drafter, state, f"{type(error).__name__}: {error}")
                drafter.close(state.row)
            return None

    def _end(self, drafter: Drafter, state: ChainRow, why: str) -> None:
        state.ended.add(drafter.name)
        state.notices.append(f"{drafter.name} drafting ended: {why}")


def _limit(drafter: Drafter, spec: SpecConfig) -> int:
    return spec.n_max if isinstance(drafter, ModelDrafter) else spec.ngram_m


def _propose(
    drafter: Drafter, asks: Sequence[Ask], sampler: BatchSampler, states: Sequence[ChainRow]
) -> list[Draft]:
    return _trimmed(drafter.propose(asks, sampler), states)


def _trimmed(drafts: Sequence[Draft], states: Sequence[ChainRow]) -> list[Draft]:
    """p_min and n_min, where a row asks for them. Only then do confidences cost a synchronisation."""
    wanted = [
        (i, d.confidences)
        for i, (d, s) in enumerate(zip(drafts, states, strict=True))
        if d.confidences is not None and (s.spec.p_min > 0 or s.spec.n_min > 0)
    ]
    mx.eval([c for _, c in wanted])
    out = list(drafts)
    for i, confidences in wanted:
        spec, draft = states[i].spec, out[i]
        length = trim(np.asarray(confidences).tolist(), p_min=spec.p_min, n_min=spec.n_min)
        out[i] = Draft(length, draft.tokens[:length], None) if length else NO_DRAFT
    return out
