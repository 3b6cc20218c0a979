"""Policy auto: asks lookups, asks a model where the controller expects a gain, cuts drafts, and tells the controller what came of them.

The controller works with numbers; this module holds the rows and drafts behind those numbers. Every draft is compared with the text that
comes, whoever drafted it and whether it was verified or not. While no draft is expected to gain, rows are at rest: plain rounds run ahead
of the host as under policy off, and lookups alone are asked. Rows of other policies do not count. No clock is read here: costs are learned
from what whole rounds take, so ranks that are told the same times decide alike.

A round may be decided before the round in front of it has been read, where a model drafts that can do so and nobody needs to see a token
between drafting and verifying. A lookup needs the text: where one is expected to gain most, the next round waits for this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlxspec.drafters.base import Draft
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.drafters.policy import LearnedRound, ModelCall, Policy, RowChoice, RowTexts
from mlxspec.drafters.row import DraftRow
from mlxspec.platform import device
from mlxspec.policy import controller
from mlxspec.policy.acceptance import Offer
from mlxspec.policy.controller import PLAIN, PLAIN_ROUND, Controller, Decision, PolicyRow, dearest
from mlxspec.policy.costs import DraftCall, bucket

REST = 8  # rounds at rest until models are weighed anew


@dataclass(frozen=True, kw_only=True)
class Decided(RowChoice):
    """A policy's choice for a row together with the controller's choice for the row and its decision on the round."""

    chosen: controller.Choice
    decision: Decision


class Auto(Policy):
    """The policy that drafts as a controller chooses. log: a function that receives one line for each row and round, if set. runs_ahead:
    drafted rounds are launched before the previous round is read. Only on a GPU: without one, host and model share the cores, so that
    would hide nothing."""

    looks_up = True

    def __init__(self, control: Controller) -> None:
        self.control = control
        self.log: Callable[[str], None] | None = None
        self.runs_ahead = device.has_gpu()
        self._rows: dict[int, PolicyRow] = {}
        self._chosen: Sequence[controller.Choice] = ()  # of the round whose models are being asked
        self._still = 0  # rounds at rest that are left until models are weighed again
        self._rested, self._rested_seconds = 0, 0.0  # plain rounds of which nothing has been learned
        self._resting: Sequence[DraftRow] = ()  # whose they were

    # --- rows

    def begin(self, row: DraftRow) -> None:
        kind = "greedy" if row.sampler.is_greedy else "sampled"
        kind = "constrained" if row.sampler.is_bound else kind
        self._learn_rested()
        self._rows[row.number] = self.control.row(kind)

    def end(self, row: DraftRow) -> None:
        self._learn_rested()
        own = self._rows.pop(row.number)
        if row.decoded:
            self.control.ended(own, row.decoded)

    def wake(self) -> None:
        """Decide anew whether rows rest, because rows or drafters have changed."""
        self._still = 0

    @property
    def is_resting(self) -> bool:  # type: ignore[override]
        return self._still > 0

    def judge(self, row: DraftRow, draft: Draft, matched: int, known: int) -> None:
        self.control.learn(self._rows[row.number], _offer(draft), matched, known)

    # --- planning a round

    def choose(self, rows: Sequence[DraftRow], offers: Sequence[Mapping[str, Draft]]) -> list[RowChoice]:
        own, ahead = [self._rows[row.number] for row in rows], rows[0].is_ahead
        chosen, self._chosen = self._chosen, ()
        if not any(c.model in given for c, given in zip(chosen, offers, strict=False)):
            self._learn_rested()
            if not ahead:
                for each in own:
                    each.account.reserved = 0.0  # all rounds before have been read, or have failed
            chosen = self._choose(rows, own, offers)
            if ahead and any(c.offer is not None or c.probe for c in chosen):
                return [RowChoice() for _ in rows]  # what that needs is not known yet
            if not ahead:
                self._rest_or_wake(own, chosen)
            if any(c.model is not None for c in chosen):
                self._chosen = chosen
                looks = not self.runs_ahead or not all(row.is_blind for row in rows)
                return [
                    self._asked(*each, is_alone=looks and len(rows) == 1)
                    for each in zip(rows, own, chosen, offers, strict=True)
                ]
        drafts = [_taken(c, given) for c, given in zip(chosen, offers, strict=True)]
        decision = self.control.trim(own, [None if d is None else _offer(d) for d in drafts], chosen)
        found: list[RowChoice] = []
        for row, c, draft, width in zip(rows, chosen, drafts, decision.widths, strict=True):
            name = None if draft is None else draft.drafter
            found.append(Decided(drafter=name, length=width, is_probe=c.probe, chosen=c, decision=decision))
            if self.log is not None:
                self.log(_line(row, c, draft, width))
        return found

    def _choose(
        self,
        rows: Sequence[DraftRow],
        own: Sequence[PolicyRow],
        offers: Sequence[Mapping[str, Draft]],
    ) -> Sequence[controller.Choice]:
        """Return the controller's choice for each row between the n-gram drafts in `offers` and the drafts that models are expected to
        make."""
        models: list[dict[str, tuple[int, int]]] = []
        for row, each in zip(rows, own, strict=True):
            each.bucket, each.room, asked = bucket(len(row.history)), row.room, {}
            for drafter, longest in row.limits:
                if isinstance(drafter, ModelDrafter) and min(row.room, longest) > 0:
                    queued = (
                        drafter.num_queued(row.number) + row.is_ahead
                    )  # of an unread round a token at least
                    asked[drafter.name] = min(row.room, longest), queued
            models.append(asked)
        return self.control.choose(own, [_offers(given) for given in offers], models)

    def _asked(
        self,
        row: DraftRow,
        own: PolicyRow,
        chosen: controller.Choice,
        given: Mapping[str, Draft],
        *,
        is_alone: bool,
    ) -> RowChoice:
        """Return the choice of a row whose draft does not exist yet, or is not cut yet. A model that drafts token by token for a single
        row, whose drafts are read, stops where the next token is not expected to pay."""
        if chosen.offer is not None:
            return RowChoice(drafter=[*given][chosen.offer], length=chosen.depth)
        name = chosen.model
        if name is None:
            return RowChoice()
        drafter = next(d for d, _ in row.limits if d.name == name)
        is_stepwise = isinstance(drafter, ModelDrafter) and not drafter.drafts_at_once
        may_stop = is_alone and is_stepwise and not chosen.probe and chosen.depth > 1
        stops = (lambda sure: self.control.stops(own, name, sure)) if may_stop else None
        return RowChoice(drafter=name, length=chosen.depth, stops=stops)

    def rests(self, rows: Sequence[DraftRow], texts: RowTexts) -> bool:
        """Return whether the next round is plain. While rows rest, models are not weighed, and n-gram drafts are requested for one row
        in each round, in turns: a text that begins to repeat itself does so for longer than a turn."""
        own = [self._rows[row.number] for row in rows]
        if any(each.is_drafting for each in own):
            return False
        if self._still:
            self._still -= 1
            turn = rows[self._still % len(rows)]
            texts.tell(turn)
            rests = not texts.may_look_up(turn)
            if not rests:
                (given,) = texts.look_up([turn])
                offers = [_offers(given) if row is turn else [] for row in rows]
                rests = all(c is PLAIN for c in self.control.choose(own, offers, [{}] * len(own)))
        else:
            rests = self._rest_or_wake(own, self._choose(rows, own, texts.look_up(rows)))
        if not rests:
            self.wake()
        return rests

    def _rest_or_wake(self, rows: Sequence[PolicyRow], chosen: Sequence[controller.Choice]) -> bool:
        """Return whether no drafter drafts, so that the next round is plain. Rows then rest: for REST rounds models, whose gain changes
        slowly, are not weighed again. After the first plain round, which measures what plain decoding takes, rows choose again."""
        rests = all(c is PLAIN for c in chosen)
        curve = self.control.curve(rows)
        self._still = REST - 1 if rests and self.control.is_sure(curve) else 0
        return rests and curve.is_timed

    # --- what rounds took

    def learn(self, done: LearnedRound) -> None:
        """Learn what a round took. Plain rounds of resting rows are learned several at a time, which costs the host less."""
        decided = [c if isinstance(c, Decided) else None for c in done.choices]
        decision = next((c.decision for c in decided if c is not None), PLAIN_ROUND)
        for row, c in zip(done.rows, decided, strict=True):
            if c is not None and c.chosen.model is not None:
                self.control.asked(self._rows[row.number], c.chosen)
        is_plain = not any(decision.widths) and decision.worst is None
        if is_plain and done.ahead and done.is_warm and done.num_tokens == done.num_rows == len(done.rows):
            if self._resting != done.rows:
                self._learn_rested()
            self._rested, self._resting = self._rested + 1, done.rows
            self._rested_seconds += done.seconds
            if self.control.costs.is_in_doubt or self._rested >= REST:
                self._learn_rested()
            return
        self._learn_rested()
        if parts := self._emitted(done.rows):
            decision = decision._replace(calls=tuple(map(self._call, done.calls)))
            self.control.spent(
                parts,
                done.num_rows,
                done.num_tokens,
                done.seconds,
                decision,
                is_ahead=done.ahead,
                is_warm=done.is_warm,
            )

    def _call(self, call: ModelCall) -> DraftCall:
        kind = dearest([self._rows[row.number] for row in call.rows if row.number in self._rows])
        return DraftCall(call.name, kind, call.depth, call.queued, len(call.rows))

    def _learn_rested(self) -> None:
        """Give the number, duration and tokens of the plain rounds that `learn` has collected to the controller at once, and begin a new
        collection."""
        num, seconds, width = self._rested, self._rested_seconds, len(self._resting)
        self._rested, self._rested_seconds = 0, 0.0
        if num and (parts := self._emitted(self._resting, num)):
            self.control.spent(parts, width, width, seconds, is_ahead=True, num_rounds=num)

    def _emitted(self, rows: Sequence[DraftRow], most: int | None = None) -> list[tuple[PolicyRow, int]]:
        """Return the rows that got tokens of which nothing has been learned, and how many tokens each got. most: of a row's tokens, only
        its first ones are of the rounds that are learned now; the others are those of a round with drafts behind these."""
        found = []
        for row in rows:
            own, num = self._rows.get(row.number), row.emitted if most is None else min(row.emitted, most)
            if own is not None and num:
                found.append((own, num))
                row.emitted -= num
        return found


def _taken(chosen: controller.Choice, given: Mapping[str, Draft]) -> Draft | None:
    """Return the existing draft that was chosen, None where there is none."""
    if chosen.offer is not None:
        return [*given.values()][chosen.offer]
    draft = None if chosen.model is None else given[chosen.model]
    return draft if draft is not None and draft.length else None


def _offers(given: Mapping[str, Draft]) -> list[Offer]:
    return [_offer(draft) for draft in given.values()]


def _offer(draft: Draft) -> Offer:
    sure = draft.confidences
    return Offer(draft.drafter, draft.length, sure if isinstance(sure, list) else None, draft.backing)


def _line(row: DraftRow, chosen: controller.Choice, draft: Draft | None, width: int) -> str:
    """Return the log line of a row's choice: `row 0 at 153: mtp drafts 3, verifies 2 (worth 0.41 tokens)`."""
    start = f"row {row.number} at {len(row.history)}"
    if draft is None:
        return f"{start}: plain"
    if chosen.probe:
        return f"{start}: {draft.drafter} probed for {draft.length}, verifies {width}"
    return (
        f"{start}: {draft.drafter} drafts {draft.length}, verifies {width} (worth {chosen.gain:.2f} tokens)"
    )
