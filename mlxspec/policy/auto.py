"""Policy auto: asks lookups, asks a model where the controller expects a gain, cuts drafts, and tells the controller what came of them.

The controller works with numbers; this module holds the drafters, tokens and rows behind those numbers. Every draft is compared with the
text that comes, whoever drafted it and whether it was verified or not. While no draft is expected to gain, rows are at rest: plain rounds
run ahead of the host as under policy off, and lookups alone are asked. Rows of other policies do not count. No clock is read here: costs
are learned from what whole rounds take, so ranks that are told the same times decide alike.

A round may be decided before the round in front of it has been read (`propose_behind`), where a model drafts that can do so and nobody
needs to see a token between drafting and verifying. A lookup needs the text: where one is expected to gain most, the next round waits for
this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import mlx.core as mx

from mlxspec.drafters.base import Ask, Draft, Drafter
from mlxspec.drafters.chain import Chain, Proposal
from mlxspec.drafters.chain_row import ChainRow
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.drafters.plan import RoundPlan
from mlxspec.platform import device
from mlxspec.platform.host import numbers
from mlxspec.policy.acceptance import Offer
from mlxspec.policy.base import Policy
from mlxspec.policy.controller import PLAIN, PLAIN_ROUND, Choice, Controller, Decision, PolicyRow, dearest
from mlxspec.policy.costs import DraftCall, bucket

REST = 8  # rounds at rest until models are weighed anew


@dataclass(kw_only=True)
class Pending:
    """A draft that is compared with the text as it comes. offer: None while the draft is on the device and nobody has read it. lasts: it is
    compared over several rounds, as probes are; others are judged by one. heard: what has come."""

    drafter: str
    draft: Draft
    offer: Offer | None
    lasts: bool = False
    heard: list[int] = field(default_factory=list)

    def read(self) -> Offer:
        """Its round has been read, and the draft with it."""
        made = self.draft._replace(tokens=numbers(mx.array(self.draft.tokens)).tolist())
        if isinstance(made.confidences, mx.array):
            made = made._replace(confidences=numbers(made.confidences).tolist())
        self.draft, self.offer = made, _offer(self.drafter, made)
        return self.offer

    def compare(self, tokens: Sequence[int]) -> int:
        """The text went on with `tokens`. Returns how many of the draft's tokens are those that came."""
        drafted = self.draft.tokens
        self.heard += tokens[: self.draft.length - len(self.heard)]
        return next((i for i, token in enumerate(self.heard) if token != drafted[i]), len(self.heard))


class Decided(NamedTuple):
    """One row's part of a round: the round's decision, what was chosen for the row, and the draft of a model."""

    decision: Decision
    choice: Choice
    made: Pending | None


class AutoRow(PolicyRow):
    """waiting: drafts whose text has not come. looked_up: at which length of text lookups were asked last, and what they offered.
    emitted: tokens of rounds that nothing was learned of; answered: of all rounds."""

    __slots__ = ("answered", "emitted", "looked_up", "waiting")

    def __init__(self, kind: str, start: float) -> None:
        super().__init__(kind, 0, start)
        self.waiting = list[Pending]()
        self.looked_up: tuple[int, list[Pending]] = -1, []
        self.emitted = self.answered = 0


class Auto(Policy):
    """Drafts as a controller chooses. log: gets a line a row and round, if set. runs_ahead: drafted rounds are launched before the one in
    front of them is read. Only on a GPU: without one, host and model share the cores, so that hides nothing."""

    def __init__(self, chain: Chain, control: Controller) -> None:
        super().__init__(chain)
        self.control = control
        self.log: Callable[[str], None] | None = None
        self.runs_ahead = device.has_gpu()
        self._rows: dict[int, AutoRow] = {}
        self._decision = PLAIN_ROUND  # of the round that is being read
        self._still = 0  # rounds at rest that are left until models are weighed again
        self._rested, self._rested_seconds = 0, 0.0  # plain rounds of which nothing has been learned
        self._resting: Sequence[ChainRow] = ()  # whose they were

    # --- rows

    def begin(self, state: ChainRow) -> None:
        kind = "greedy" if state.sampler.is_greedy else "sampled"
        kind = "constrained" if state.sampler.is_bound else kind
        self._learn_rested()
        self._rows[state.row] = AutoRow(kind, self.control.bank.start)

    def close(self, row: int) -> None:
        self._learn_rested()
        gone = self._rows.pop(row, None)
        if gone is not None and gone.answered:
            self.control.ended(gone, gone.answered)

    def wake(self) -> None:
        """Rows have changed, of this policy or another, or somebody may draft: whether rows rest is found out anew."""
        self._still = 0

    def answers(self, state: ChainRow) -> None:
        row = self._rows[state.row]
        row.emitted = row.answered = 0

    def observe(self, state: ChainRow, num_tokens: int) -> None:
        """At rest the row's drafters need not hear tokens at once."""
        row = self._rows[state.row]
        row.emitted += num_tokens
        row.answered += num_tokens
        if not self._still or row.is_drafting or row.waiting:
            self.tell(state)

    def tell(self, state: ChainRow) -> None:
        """The row's drafters hear what waits for them, and drafts that waited for the text are judged."""
        tokens = self.chain.tell(state)
        if not tokens:
            return
        row = self._rows[state.row]
        waiting, row.waiting = row.waiting, []
        for pending in waiting:
            offer = pending.offer
            if offer is None:
                offer = pending.read()
            matched = pending.compare(tokens)
            if pending.lasts and matched == len(pending.heard) < offer.length:
                row.waiting.append(pending)
                continue
            self.control.learn(row, offer, matched, len(pending.heard))
            asked = state.asked[pending.drafter]
            asked.judged += 1
            asked.right += matched > 0

    # --- planning a round

    def propose(self, plan: RoundPlan) -> dict[int, Proposal]:
        self._learn_rested()
        rows = [self._rows[s.row] for s in plan.rows]
        for row in rows:
            row.account.reserved = 0.0  # all rounds before have been read, or have failed
        found = self._look_up(plan.rows, plan)
        choices = self._choose(plan, rows, found)
        self._rest_or_wake(rows, choices)
        looks = not self.runs_ahead or not all(s.is_blind for s in plan.rows)
        return self._submit(plan, rows, choices, found, looks=looks) or {}

    def propose_behind(self, plan: RoundPlan) -> dict[int, Proposal] | None:
        """None where the round in front has to be read first: a lookup offers more, a model is probed, or it cannot draft behind it."""
        if not self.runs_ahead:
            return None
        self._learn_rested()
        rows = [self._rows[s.row] for s in plan.rows]
        found = self._look_up(plan.rows, plan)
        choices = self._choose(plan, rows, found)
        if any(c.offer is not None or c.probe for c in choices):
            return None
        return self._submit(plan, rows, choices, found, looks=False)

    def _submit(
        self,
        plan: RoundPlan,
        rows: Sequence[AutoRow],
        choices: Sequence[Choice],
        found: Sequence[Sequence[Pending]],
        *,
        looks: bool,
    ) -> dict[int, Proposal] | None:
        """The round of these choices; None behind an unread round where a model had nothing to propose."""
        drafts = [
            None if c.offer is None else given[c.offer] for c, given in zip(choices, found, strict=True)
        ]
        calls = self._ask_models(plan, rows, choices, drafts, looks=looks)
        empty = [c.model is not None and d is None for c, d in zip(choices, drafts, strict=True)]
        if plan.unread is not None and any(empty):
            return None
        decision = self.control.trim(
            rows, [None if d is None else _offer(d.drafter, d.draft) for d in drafts], choices
        )
        decision = decision._replace(calls=tuple(calls))
        out = {}
        for i, (state, choice, made) in enumerate(zip(plan.rows, choices, drafts, strict=True)):
            width = decision.widths[i]
            beside = () if made is None or made.offer is not None else _unread(made.draft)
            decided = Decided(decision, choice, None if choice.model is None else made)
            given = Proposal(beside=beside, decided=decided)
            if made is not None and width:
                given = replace(given, drafter=made.drafter, draft=made.draft.cut(width))
            out[state.row] = given
            if self.log is not None:
                self.log(_line(state.row, len(plan.histories[state.row]), choice, made, width))
        return out

    def take_up(self, rows: Mapping[int, object]) -> None:
        decided = {row: found for row, found in rows.items() if isinstance(found, Decided)}
        self._decision = PLAIN_ROUND
        for name, found in decided.items():
            self._learn_rested()
            self._decision, row = found.decision, self._rows[name]
            if found.choice.model is not None:
                self.control.asked(row, found.choice)
            if found.made is not None:
                row.waiting.append(found.made)

    def plain(self, rows: Sequence[ChainRow], plan: Callable[[], RoundPlan]) -> bool:
        """At rest models are not weighed, and lookups are asked for one row a round, in turns: a text that begins to repeat itself does so
        for longer than a turn."""
        own = [self._rows[s.row] for s in rows]
        if any(r.is_drafting for r in own):
            return False
        if self._still:
            self._still -= 1
            turn = rows[self._still % len(rows)]
            self.tell(turn)
            rests = not self.chain.may_look_up(turn)
            if not rests:
                found = self._look_up([turn], plan())
                offers = [[_offer(d.drafter, d.draft) for d in found[0]] if s is turn else [] for s in rows]
                rests = all(c is PLAIN for c in self.control.choose(own, offers, [{}] * len(own)))
        else:
            planned = plan()
            rests = self._rest_or_wake(own, self._choose(planned, own, self._look_up(rows, planned)))
        if not rests:
            self.wake()
        return rests

    def _rest_or_wake(self, rows: Sequence[AutoRow], choices: Sequence[Choice]) -> bool:
        """Whether nobody drafts, so that rows rest: for so many rounds models are not weighed anew, whose gain changes slowly. Behind the
        first plain round, which tells what the others take, rows choose again; in doubt plain rounds run ahead, as others do."""
        rests = all(c is PLAIN for c in choices)
        curve = self.control.curve(rows)
        self._still = REST - 1 if rests and self.control.is_sure(curve) else 0
        return rests and curve.is_timed

    def _look_up(self, states: Sequence[ChainRow], plan: RoundPlan) -> list[list[Pending]]:
        """What lookups offer each of these rows; judged when the text has come, taken or not."""
        asks: dict[Drafter, list[tuple[AutoRow, Ask]]] = {}
        found: list[list[Pending]] = []
        for state in states:
            self.tell(state)
            row, length = self._rows[state.row], len(plan.histories[state.row])
            if row.looked_up[0] != length:
                row.looked_up = length, []
                for drafter, longest in self.chain.lookups_of(state):
                    limit = min(plan.rooms[state.row], longest)
                    if limit > 0:
                        asks.setdefault(drafter, []).append((row, plan.ask(state, limit)))
            found.append(row.looked_up[1])
        # a lookup goes on from what is known
        known = plan if plan.unread is None else replace(plan, unread=None)
        for drafter, wanted in asks.items():
            drafts = self.chain.ask_all(drafter, [ask for _, ask in wanted], known)
            for (row, _), draft in zip(wanted, drafts, strict=True):
                if draft.length:
                    made = Pending(drafter=drafter.name, draft=draft, offer=_offer(drafter.name, draft))
                    row.looked_up[1].append(made)
                    row.waiting.append(made)
        return found

    def _choose(
        self, plan: RoundPlan, rows: Sequence[AutoRow], found: Sequence[Sequence[Pending]]
    ) -> list[Choice]:
        """Between what lookups offer and what models are expected to gain."""
        models: list[dict[str, tuple[int, int]]] = []
        for state, row in zip(plan.rows, rows, strict=True):
            row.bucket, row.room, asked = bucket(len(plan.histories[state.row])), plan.rooms[state.row], {}
            for drafter in self.chain.drafters_of(state):
                limit = min(row.room, self.chain.limit(drafter, state))
                if not isinstance(drafter, ModelDrafter) or limit < 1:
                    continue
                asked[drafter.name] = limit, _num_queued(drafter, state)
            models.append(asked)
        offers = [[_offer(d.drafter, d.draft) for d in given] for given in found]
        return self.control.choose(rows, offers, models)

    def _ask_models(
        self,
        plan: RoundPlan,
        rows: Sequence[AutoRow],
        choices: Sequence[Choice],
        drafts: list[Pending | None],
        *,
        looks: bool,
    ) -> list[DraftCall]:
        """Drafts of the models that were chosen, into `drafts`. Returns the calls in which a model drafted anything; a refusal says nothing
        of what a draft costs. looks: they are read at once."""
        calls, is_behind = list[DraftCall](), plan.unread is not None
        for name in dict.fromkeys(c.model for c in choices if c.model is not None):
            drafter, places = self.chain.drafters[name], [i for i, c in enumerate(choices) if c.model == name]
            asks = [self._ask(plan, plan.rows[i], rows[i], choices[i], looks=looks) for i in places]
            queued = sum(_num_queued(drafter, plan.rows[i]) + is_behind for i in places)
            made = self.chain.ask_all(drafter, asks, plan.at(places), looks=looks)
            if depth := max(d.length for d in made):
                kind = dearest([rows[i] for i in places])
                calls.append(DraftCall(name, kind, depth, queued, len(asks)))
            for i, draft in zip(places, made, strict=True):
                if draft.length:
                    offer = _offer(name, draft) if looks else None
                    drafts[i] = Pending(drafter=name, draft=draft, offer=offer, lasts=choices[i].probe)
        return calls

    def _ask(self, plan: RoundPlan, state: ChainRow, row: AutoRow, choice: Choice, *, looks: bool) -> Ask:
        """What is asked of the chosen model. One that drafts token by token for one row that reads its drafts stops where the next token
        is not expected to pay."""
        ask, name = plan.ask(state, choice.depth), choice.model or ""
        drafter = self.chain.drafters[name]
        is_stepwise = isinstance(drafter, ModelDrafter) and not drafter.drafts_at_once
        if not (looks and is_stepwise and len(plan.rows) == 1) or choice.probe or choice.depth < 2:
            return ask
        too_unsure = ask.stops or (lambda _: False)
        return ask._replace(stops=lambda sure: too_unsure(sure) or self.control.stops(row, name, sure))

    # --- what rounds took

    def took(
        self,
        states: Sequence[ChainRow],
        num_rows: int,
        num_tokens: int,
        seconds: float,
        *,
        ahead: bool,
        is_warm: bool,
    ) -> None:
        """A round was read. Plain rounds at rest are learned from several at once: that costs the host less."""
        decision = self._decision
        if decision is PLAIN_ROUND and ahead and is_warm and num_tokens == num_rows == len(states):
            if self._resting != states:
                self._learn_rested()
            self._rested, self._resting = self._rested + 1, states
            self._rested_seconds += seconds
            if self.control.costs.is_in_doubt or self._rested >= REST:
                self._learn_rested()
            return
        self._learn_rested()
        if rows := self._emitted(states):
            self.control.spent(rows, num_rows, num_tokens, seconds, decision, is_ahead=ahead, is_warm=is_warm)

    def _learn_rested(self) -> None:
        """Learn what the plain rounds at rest took."""
        num, seconds, width = self._rested, self._rested_seconds, len(self._resting)
        self._rested, self._rested_seconds = 0, 0.0
        if num and (rows := self._emitted(self._resting)):
            self.control.spent(rows, width, width, seconds, is_ahead=True, num_rounds=num)

    def _emitted(self, states: Sequence[ChainRow]) -> list[tuple[AutoRow, int]]:
        """Those of these rows that got tokens since this was last asked, and how many each."""
        found = []
        for state in states:
            row = self._rows.get(state.row)
            if row is not None and row.emitted:
                found.append((row, row.emitted))
                row.emitted = 0
        return found


def _num_queued(drafter: Drafter, state: ChainRow) -> int:
    """Known tokens of the row that a model drafter has not run."""
    return drafter.num_queued(state.row) if isinstance(drafter, ModelDrafter) else 0


def _offer(name: str, draft: Draft) -> Offer:
    sure = draft.confidences
    return Offer(name, draft.length, sure if isinstance(sure, list) else None, draft.backing)


def _unread(draft: Draft) -> tuple[mx.array, ...]:
    """What of a draft is on the device."""
    return tuple(x for x in (draft.tokens, draft.confidences) if isinstance(x, mx.array))


def _line(row: int, place: int, choice: Choice, made: Pending | None, width: int) -> str:
    """`row 0 at 153: mtp drafts 3, verifies 2 (worth 0.41 tokens)`"""
    if made is None:
        return f"row {row} at {place}: plain"
    name, length = made.drafter, made.draft.length
    if choice.probe:
        return f"row {row} at {place}: {name} probed for {length}, verifies {width}"
    return f"row {row} at {place}: {name} drafts {length}, verifies {width} (worth {choice.gain:.2f} tokens)"
