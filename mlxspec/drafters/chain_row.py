"""One row in the chain of drafters: its options, who drafts for it, and the tokens that its drafters have not heard."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

from mlxspec.config import SpecConfig
from mlxspec.drafters.base import Drafter, Heard
from mlxspec.sampling.row import RowSampler


@dataclass
class AskedDrafter:
    """A row's record of one drafter. calls: how often it was asked; seconds: what that took, together with other rows asked at once.
    judged: drafts whose first token was compared with the text, verified or not; right: those whose first token was the text's."""

    calls: int = 0
    seconds: float = 0.0
    judged: int = 0
    right: int = 0


@dataclass(kw_only=True)
class ChainRow:
    """ended: drafters that failed for it, or reached their context's end. asked: by drafter. queue: who drafts for it, in order, None to be
    found out anew; is_bound: whether its sampler was bound then; lookups: those of them that run no model, and the longest draft of each.
    unheard: what its drafters have not been told, tokens with their hiddens."""

    row: int
    spec: SpecConfig
    sampler: RowSampler
    notices: list[str] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)
    asked: defaultdict[str, AskedDrafter] = field(default_factory=lambda: defaultdict(AskedDrafter))
    queue: tuple[Drafter, ...] | None = None
    is_bound: bool = False
    lookups: tuple[tuple[Drafter, int], ...] = ()
    unheard: list[Heard] = field(default_factory=list)

    def end(self, name: str) -> None:
        """A drafter drafts no more for the row."""
        self.ended.add(name)
        self.queue = None

    @property
    def predicted(self) -> tuple[int, ...]:
        """Ids of what its request predicted."""
        given = self.spec.predicted
        return () if isinstance(given, str) else given  # an engine makes ids of a text before a row begins

    @property
    def is_blind(self) -> bool:
        """Whether nobody needs to see a token of it between drafting and verifying."""
        return not self.has_limits and not self.sampler.is_bound

    @cached_property
    def has_limits(self) -> bool:
        """Whether how sure a drafter was decides on what is verified."""
        return self.spec.p_min > 0 or self.spec.n_min > 0
