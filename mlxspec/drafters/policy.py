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
    """A policy's choice for one row in a round. drafter: its name, None for a plain round. length: number of its drafted tokens that are
    verified; for a drafter that has no draft yet, the number of tokens to draft. is_probe: the whole draft is compared with the text
    over several rounds, beyond the tokens that are verified. stops: a function that a token-by-token drafter calls with the
    confidences of all drafted tokens so far, and that returns True to end the draft; None where the policy does not end it early."""

    drafter: str | None = None
    length: int = 0
    is_probe: bool = False
    stops: Callable[[Sequence[float]], bool] | None = None


PLAIN = RowChoice()


class ModelCall(NamedTuple):
    """One call of a model drafter for several rows. depth: tokens of the longest draft; queued: known tokens that the model had to run
    first."""

    name: str
    depth: int
    queued: int
    rows: Sequence[DraftRow]


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """A planned round, by row. drafts: the drafts, each with its drafter and the number of tokens that are verified; choices: what policies
    chose. calls: the calls of models that drafted anything."""

    drafts: Mapping[int, Draft] = field(default_factory=dict)
    choices: Mapping[int, RowChoice] = field(default_factory=dict)
    calls: Sequence[ModelCall] = ()

    def draft(self, row: int) -> Draft:
        """Return the draft of this row, NO_DRAFT where its round is plain."""
        return self.drafts.get(row, NO_DRAFT)


class LearnedRound(NamedTuple):
    """A round whose result has been read, as its policy receives it. rows, choices: those that follow this policy; a choice is None for a
    row without one, as in plain rounds that run ahead. num_rows, num_tokens: of the whole round. ahead: the round was launched before
    the previous one was read. is_warm: nothing was compiled in it."""

    rows: Sequence[DraftRow]
    choices: Sequence[RowChoice | None]
    calls: Sequence[ModelCall]
    num_rows: int
    num_tokens: int
    seconds: float
    ahead: bool
    is_warm: bool


class RowTexts(Protocol):
    """The interface by which a policy has new tokens of its rows given to their drafters, and gets drafts of those without a model;
    `Drafts` implements it."""

    def tell(self, row: DraftRow) -> None: ...

    def may_look_up(self, row: DraftRow) -> bool: ...

    def look_up(self, rows: Sequence[DraftRow]) -> list[dict[str, Draft]]: ...


class Policy(ABC):
    """A rule that chooses for each round which drafter drafts for each row, and how many tokens are verified. A subclass must define
    `choose` and `learn`.

    looks_up: drafters without a model are asked before the first `choose`, and every draft is compared with the text by `judge`, which is
    called for such a policy only. runs_ahead: a drafted round may be decided before the previous round is read; its drafts then stay on the
    device and are read together with the result of their verify. False where `choose` needs the result of the previous round. is_resting:
    the policy's rows decode plainly for now, so their drafters may receive the new tokens later, several rounds' at once.
    """

    looks_up = False
    runs_ahead = True
    is_resting = False

    @abstractmethod
    def choose(self, rows: Sequence[DraftRow], offers: Sequence[Mapping[str, Draft]]) -> Sequence[RowChoice]:
        """Return one choice for each row. offers: by row, the existing drafts by drafter name; empty n-gram drafts are left out. If a
        chosen drafter has no draft in `offers`, it is asked, and `choose` is called again with its draft, which may be empty, among the
        offers."""

    @abstractmethod
    def learn(self, done: LearnedRound) -> None:
        """Learn what a round took. Called in the order of the rounds."""

    def begin(self, row: DraftRow) -> None:  # noqa: B027
        """Begin a row that follows this policy."""

    def end(self, row: DraftRow) -> None:  # noqa: B027
        """Release what the policy holds for a row."""

    def wake(self) -> None:  # noqa: B027
        """End the rest of the policy's rows (`is_resting`: they decode plainly for some rounds), so that the next round chooses drafters
        again. Called when a row of any policy begins. Does nothing by default."""

    def judge(self, row: DraftRow, draft: Draft, matched: int, known: int) -> None:  # noqa: B027
        """Learn how a draft compares with the text, verified or not: `known` of its first tokens have been compared, and the first
        `matched` were right. Called where `looks_up` is true: for all drafts of n-gram drafters, used or not and at full length, and for
        each draft of a model. A policy that needs the result of its own choice keeps the drafter and the length that it chose."""

    def rests(self, rows: Sequence[DraftRow], texts: RowTexts) -> bool:
        """Return whether the next round of these rows is plain, so that it may be launched before this one is read."""
        return False
