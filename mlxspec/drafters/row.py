"""A row as its drafters and its policy see it: its text, its options, who drafts for it, and what they have not been told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from mlxspec.config import SpecConfig
from mlxspec.drafters.base import Draft, Drafter, Heard
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.sampling.row import RowSampler


@dataclass
class AskedDrafter:
    """A row's record of one drafter. calls: number of requests for a draft; seconds: their duration, including other rows of the same
    calls. judged: drafts whose first token was compared with the text, verified or not; right: those whose first token equals the
    text's."""

    calls: int = 0
    seconds: float = 0.0
    judged: int = 0
    right: int = 0


class WaitingDraft(NamedTuple):
    """A draft that waits to be compared with the text. heard: the tokens of the text so far; lasts: the comparison goes on over several
    rounds."""

    draft: Draft
    heard: list[int]
    lasts: bool


@dataclass(kw_only=True, eq=False)
class DraftRow:
    """A row as drafters and policies see it.

    history: all its known tokens, which grow with the row. named: the drafters that may draft for it, in its order; forced: the drafter
    that precedes them while the row has a constraint. room: number of drafted tokens that the round being planned may verify; is_ahead:
    that round is planned before the previous one has been read. ended: names of drafters that failed for the row or reached the end of
    their context. asked: records by drafter name. unheard: tokens that its drafters have not received, with their hidden states. offers:
    drafts of drafters without a model, by name, made after `offered_at` tokens. waiting: drafts to be compared with text that does not
    exist yet. emitted: number of new tokens since its policy last learned of a round; decoded: since its answer began.
    """

    number: int
    spec: SpecConfig
    sampler: RowSampler
    history: Sequence[int]
    named: tuple[Drafter, ...]
    forced: Drafter
    room: int = 0
    is_ahead: bool = False
    notices: list[str] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)
    asked: defaultdict[str, AskedDrafter] = field(default_factory=lambda: defaultdict(AskedDrafter))
    unheard: list[Heard] = field(default_factory=list)
    offers: dict[str, Draft] = field(default_factory=dict)
    offered_at: int = -1
    waiting: list[WaitingDraft] = field(default_factory=list)
    emitted: int = 0
    decoded: int = 0
    _limits: tuple[tuple[Drafter, int], ...] | None = None
    _was_bound: bool = False

    @property
    def limits(self) -> tuple[tuple[Drafter, int], ...]:
        """Return the drafters that may draft for the row, in its order, each with the longest draft that the row takes of it."""
        if self._limits is None or self._was_bound != self.sampler.is_bound:
            self._was_bound = self.sampler.is_bound
            every = (self.forced, *self.named) if self._was_bound and self.spec.drafters else self.named
            self._limits = tuple((d, longest(d, self.spec)) for d in every if d.name not in self.ended)
        return self._limits

    def add(self, drafter: Drafter) -> None:
        """Let one more drafter draft for the row, after the others."""
        self.named, self._limits = (*self.named, drafter), None

    def end(self, name: str, why: str) -> None:
        """End a drafter for the row, with a notice that names the reason."""
        self.ended.add(name)
        self._limits = None
        self.notices.append(f"{name} drafting ended: {why}")

    @property
    def is_blind(self) -> bool:
        """Return whether the row's drafts may stay on the device until they are verified, because no limit or grammar has to see their
        tokens first."""
        return not self.has_limits and not self.sampler.is_bound

    @cached_property
    def has_limits(self) -> bool:
        """Return whether confidences decide how much of a draft is verified (p_min or n_min is set)."""
        return self.spec.p_min > 0 or self.spec.n_min > 0


def longest(drafter: Drafter, spec: SpecConfig) -> int:
    """Return the number of tokens of the longest draft that a row with these options takes of a drafter."""
    if drafter.max_draft is not None:
        asked = spec.n_max if isinstance(drafter, ModelDrafter) else None  # of what runs a model
        return drafter.max_draft if asked is None else min(drafter.max_draft, asked)
    return spec.model_depth if isinstance(drafter, ModelDrafter) else spec.ngram_m
