"""Policies as the engine sees them: two functions. `choose` says who drafts for each row and how much of a draft is verified, `learn` is
told what a round cost.

Whatever a policy chooses, the text stays that of plain decoding, because the target decides what is accepted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from mlxspec.drafters.base import NO_DRAFT, Draft
from mlxspec.drafters.row import DraftRow


@dataclass(frozen=True, kw_only=True)
class RowChoice:
    """The part of one row in a round. drafter: None for a plain round. length: tokens of its draft that are verified; of a drafter that has
    not been asked, tokens that it is asked for. is_probe: the draft is made to be compared with the text that comes, to its end and over
    several rounds, beyond the tokens of it that are verified. stops: as `Ask` has it."""

    drafter: str | None = None
    length: int = 0
    is_probe: bool = False
    stops: Callable[[Sequence[float]], bool] | None = None


PLAIN = RowChoice()


class ModelCall(NamedTuple):
    """One call of a model drafter for several rows. depth: tokens of the longest draft; queued: known tokens that it had to run first."""

    name: str
    depth: int
    queued: int
    rows: Sequence[DraftRow]


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """A planned round, by row. drafts: with their drafters and the width that is verified; choices: what policies chose, as they gave it.
    calls: of models that drafted anything."""

    drafts: Mapping[int, Draft] = field(default_factory=dict)
    choices: Mapping[int, RowChoice] = field(default_factory=dict)
    calls: Sequence[ModelCall] = ()

    def draft(self, row: int) -> Draft:
        """The row's, NO_DRAFT where it is plain."""
        return self.drafts.get(row, NO_DRAFT)


class LearnedRound(NamedTuple):
    """A round that has been read. rows, choices: those of the policy that is told; choices are None for rows that were not asked, as in
    plain rounds that run ahead. num_rows, num_tokens: of the whole round. ahead: it was launched before the round in front of it was read.
    is_warm: nothing was compiled in it."""

    rows: Sequence[DraftRow]
    choices: Sequence[RowChoice | None]
    calls: Sequence[ModelCall]
    num_rows: int
    num_tokens: int
    seconds: float
    ahead: bool
    is_warm: bool


class RowTexts(Protocol):
    """A way for a policy to look at the texts of its rows, see `Drafts`."""

    def tell(self, row: DraftRow) -> None: ...

    def may_look_up(self, row: DraftRow) -> bool: ...

    def look_up(self, rows: Sequence[DraftRow]) -> list[dict[str, Draft]]: ...


class Policy(ABC):
    """A subclass must give `choose` and `learn`.

    looks_up: drafters without a model are asked before the first `choose`, and every draft is compared with the text by `judge`, which is
    called for such a policy only. runs_ahead: a drafted round may be decided before the previous round is read; its drafts then stay on the
    device and are read together with the result of their verify. False where `choose` needs what came of the previous round. is_resting:
    its rows decode plainly for now, so their drafters may receive the new tokens later, several rounds' at once.
    """

    looks_up = False
    runs_ahead = True
    is_resting = False

    @abstractmethod
    def choose(self, rows: Sequence[DraftRow], offers: Sequence[Mapping[str, Draft]]) -> Sequence[RowChoice]:
        """Return one choice a row. offers: by row, drafts at hand by drafter; a lookup that found nothing is not among them. A drafter that
        is chosen and not among them is asked, and `choose` is called again with its draft, which may be empty, among the offers."""

    @abstractmethod
    def learn(self, done: LearnedRound) -> None:
        """Learn what a round took. Called in the order of the rounds."""

    def begin(self, row: DraftRow) -> None:  # noqa: B027
        """Take up a new row."""

    def end(self, row: DraftRow) -> None:  # noqa: B027
        """Forget a row."""

    def wake(self) -> None:  # noqa: B027
        """Find out anew whether rows rest: a row has begun, of this policy or another."""

    def judge(self, row: DraftRow, draft: Draft, matched: int, known: int) -> None:  # noqa: B027
        """Learn how a draft fared, verified or not: of its first `known` tokens, to which the text has come, the first `matched` are right.
        Called where `looks_up` is true: for all that lookups offered, chosen or not and at full length, and for each draft of a model. A
        policy that wants to know how its own choice fared keeps the drafter and the length that it chose."""

    def rests(self, rows: Sequence[DraftRow], texts: RowTexts) -> bool:
        """Whether the next round of these rows is plain, so that it may be launched before this one is read."""
        return False
