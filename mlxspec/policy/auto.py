"""Policy auto: asks lookups, asks a model where the controller expects a gain, cuts drafts, and tells the controller what came of them.

The controller works with numbers; this module holds the drafters, tokens and rows behind those numbers. Every draft is compared with the
text that comes, whoever drafted it and whether it was verified or not. While no draft is expected to gain, rows are at rest: plain rounds
run ahead of the host as under policy off, and lookups alone are asked. Rows of other policies do not count. The only clock read here is
that of drafting. Its readings are learned from when the round is read, never before: ranks that decide alike must not decide by clocks of
their own within a round.

A round may be decided before the round in front of it has been read (`propose_behind`), where models draft that can do so and nobody needs
to see a token between drafting and verifying. A lookup needs the text: where it offers more than a model is expected to gain, the next
round waits for this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import mlx.core as mx

from mlxspec.drafters.base import Ask, Draft, Drafter
from mlxspec.drafters.chain import Chain, Proposal
from mlxspec.drafters.chain_row import ChainRow
from mlxspec.drafters.model_based import QUEUE_AT_MOST, ModelDrafter
from mlxspec.drafters.plan import RoundPlan
from mlxspec.platform import device
from mlxspec.platform.host import numbers
from mlxspec.policy.acceptance import MODEL_DEPTH, Offer
from mlxspec.policy.base import Policy
from mlxspec.policy.controller import PLAIN, Choice, Controller, Decision, PolicyRow, dearest
from mlxspec.policy.costs import bucket

_LITTLE = (
    2 * MODEL_DEPTH
)  # tokens that a drafter catches up on for a state that is kept, whether it may draft or not
# tokens a model drafter waits for at most where catching up cannot be paid: then it ends for the row, before it runs them by itself
ASLEEP = QUEUE_AT_MOST - _LITTLE
REST = 8  # rounds at rest until models are weighed anew, twice as many where several rows rest


@dataclass(kw_only=True)
class Pending:
    """A draft that is compared with the text as it comes. is_behind: the tokens of an unread round come before its own. is_read: the host
    knows its tokens. lasts: it is compared over several rounds, as probes are; others are judged by one. heard: what has come."""

    offer: Offer
    draft: Draft
    is_behind: bool = False
    is_read: bool = True
    lasts: bool = False
    heard: list[int] = field(default_factory=list)

    def read(self) -> None:
        """Its round has been read, and the draft with it."""
        made = self.draft._replace(tokens=numbers(mx.array(self.draft.tokens)).tolist())
        if isinstance(made.confidences, mx.array):
            made = made._replace(confidences=numbers(made.confidences).tolist())
        self.draft, self.offer, self.is_read = made, _offer(self.offer.drafter, made), True

    def compare(self, tokens: Sequence[int]) -> int:
        """The text went on with `tokens`. Returns how many of the draft's tokens are those that came."""
        drafted = self.draft.tokens
        self.heard += tokens[: self.draft.length - len(self.heard)]
        return next((i for i, token in enumerate(self.heard) if token != drafted[i]), len(self.heard))


class _Launch(NamedTuple):
    """A decided round. blind: seconds that its drafts are expected to take, of which nobody reads a clock; None where drafts were read.
    is_warm: nobody who drafted for it compiled anything."""

    decision: Decision | None = None
    blind: float | None = None
    is_warm: bool = True


class _Asked(NamedTuple):
    """One call of a model drafter for several rows. seconds: what it took; is_warm: nothing was compiled in it."""

    name: str
    depth: int
    queued: int
    num_rows: int
    kind: str
    seconds: float
    is_warm: bool


class AutoRow(PolicyRow):
    """queued: tokens each model drafter has not run. waiting: drafts whose text has not come. ran: the model
    drafter that has run the tokens of a round that is not read, and how many of them it was told. looked_up: at which length of text
    lookups were asked last, and what they offered. plain_rounds: in a row. emitted: tokens of the round just read; answered: of all
    rounds."""

    __slots__ = ("answered", "emitted", "looked_up", "plain_rounds", "queued", "ran", "waiting")

    def __init__(self, kind: str, start: float, models: Sequence[str]) -> None:
        super().__init__(kind, 0, start)
        self.queued, self.waiting = dict.fromkeys(models, 0), list[Pending]()
        self.ran: tuple[str, int] | None = None
        self.looked_up: tuple[int, list[Pending]] = -1, []
        self.plain_rounds = self.emitted = self.answered = 0


class Auto(Policy):
    """Drafts as a controller chooses. log: gets a line a row and round, if set. runs_ahead: drafted rounds are launched before the one in
    front of them is read. Only on a GPU: without one, host and model share the cores, so that hides nothing."""

    def __init__(self, chain: Chain, control: Controller) -> None:
        super().__init__(chain)
        self.control = control
        self.log: Callable[[str], None] | None = None
        self.runs_ahead = device.has_gpu()
        self._rows: dict[int, AutoRow] = {}
        self._launch, self._next = _Launch(), _Launch()  # the round that is read next, and the one behind it
        self._drafting = 0.0  # seconds of this round so far
        self._asked: list[_Asked] = []  # calls of models, of which nothing has been learned
        self._still = 0  # rounds at rest that are left until models are weighed again
        # shapes of drafts that have run: the first run of a shape compiles
        self._seen: set[tuple[object, ...]] = set()
        self._rested, self._rested_seconds = 0, 0.0  # plain rounds of which nothing has been learned
        self._resting: Sequence[ChainRow] = ()  # whose they were
        self._at_once = REST  # rounds at rest that are still learned from one by one

    # --- rows

    def begin(self, state: ChainRow) -> None:
        kind = "greedy" if state.sampler.is_greedy else "sampled"
        kind = kind if state.sampler.constraints is None else "constrained"
        models = [d.name for d in self.chain.drafters_of(state) if isinstance(d, ModelDrafter)]
        self._learn_rested()
        self._rows[state.row] = AutoRow(kind, self.control.bank.start, models)

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

    def primes(self, state: ChainRow, drafter: Drafter) -> bool:
        row = self._rows[state.row]
        if self._reads(row, drafter, num_tokens := row.queued.get(drafter.name, 0)):
            row.queued[drafter.name] = min(num_tokens, 1)
            return num_tokens > 1
        return False

    def keeps(self, state: ChainRow, drafter: Drafter) -> bool:
        row = self._rows[state.row]
        if (num_tokens := row.queued.get(drafter.name, 0)) > _LITTLE and not self._reads(
            row, drafter, num_tokens
        ):
            return False
        if drafter.name in row.queued:
            row.queued[drafter.name] = 0
        return True

    def resumes(self, state: ChainRow, drafter: Drafter, num_tokens: int) -> bool:
        row = self._rows[state.row]
        if drafter.name not in row.queued:
            return True
        runs_now = num_tokens > QUEUE_AT_MOST
        row.queued[drafter.name] = 1 if runs_now else num_tokens
        return not runs_now or self.control.should_read(row, drafter.name, num_tokens, is_beside=False)

    def _reads(self, row: AutoRow, drafter: Drafter, num_tokens: int) -> bool:
        return drafter.name in row.queued and self.control.should_read(row, drafter.name, num_tokens)

    def observe(self, state: ChainRow, num_tokens: int) -> None:
        """At rest the row's drafters need not hear tokens at once."""
        row = self._rows[state.row]
        row.emitted += num_tokens
        row.answered += num_tokens
        if not self._still or not row.plain_rounds or row.waiting or row.ran:
            self.tell(state)

    def tell(self, state: ChainRow) -> None:
        """The row's drafters hear what waits for them, and drafts that waited for the text are judged."""
        tokens = self.chain.tell(state)
        if not tokens:
            return
        row = self._rows[state.row]
        for name, queued in row.queued.items():
            if row.ran is not None and name == row.ran[0]:
                row.ran = name, len(tokens)
                continue
            queued += len(tokens)
            row.queued[name] = queued if queued <= QUEUE_AT_MOST else 1
        waiting, row.waiting = row.waiting, []
        for pending in waiting:
            if pending.is_behind:
                pending.is_behind = False
                row.waiting.append(pending)
                continue
            if not pending.is_read:
                pending.read()
                self.control.read(row, pending.offer)
            matched = pending.compare(tokens)
            if pending.lasts and matched == len(pending.heard) < pending.draft.length:
                row.waiting.append(pending)
                continue
            self.control.learn(row, pending.offer, matched, len(pending.heard))
            asked = state.asked[pending.offer.drafter]
            asked.judged += 1
            asked.right += matched > 0

    # --- planning a round

    def propose(self, plan: RoundPlan) -> dict[int, Proposal]:
        started = time.perf_counter()
        self._learn_rested()
        rows = [self._rows[s.row] for s in plan.rows]
        for row in rows:
            row.account.reserved = 0.0  # all rounds before have been read, or have failed
            row.ran = None
        found = self._look_up(plan.rows, plan)
        choices = self._choose(plan, rows, found)
        self._rest_or_wake(choices)
        looks = not self.runs_ahead or not all(map(self._may_be_blind, plan.rows, rows, choices))
        out, self._launch = self._submit(plan, rows, choices, found, looks=looks)
        self._next, self._drafting = _Launch(), time.perf_counter() - started
        return out

    def propose_behind(self, plan: RoundPlan) -> dict[int, Proposal] | None:
        """None where the round in front has to be read first: a lookup offers more, somebody needs to see tokens, or the accounts have
        nothing left beside that round's worst case."""
        if not self.runs_ahead:
            return None
        self._learn_rested()
        rows = [self._rows[s.row] for s in plan.rows]
        found = self._look_up(plan.rows, plan)
        for row in rows:
            row.ran = None
        choices = self._choose(plan, rows, found, is_ahead=True)
        if any(c.offer is not None for c in choices) or not self.control.affords(rows, choices):
            return None
        if not all(map(self._may_be_blind, plan.rows, rows, choices)):
            return None
        out, launch = self._submit(plan, rows, choices, found, looks=False)
        if launch.decision is None:
            return None
        self._next = launch
        return out

    def _submit(
        self,
        plan: RoundPlan,
        rows: Sequence[AutoRow],
        choices: Sequence[Choice],
        found: Sequence[Sequence[Pending]],
        *,
        looks: bool,
    ) -> tuple[dict[int, Proposal], _Launch]:
        """The round of these choices. Behind an unread round there is no decision where a model had nothing to propose."""
        drafts = [
            None if c.offer is None else given[c.offer] for c, given in zip(choices, found, strict=True)
        ]
        blind, is_warm = self._ask_models(plan, rows, choices, drafts, looks=looks)
        if plan.unread is not None and any(
            c.model and d is None for c, d in zip(choices, drafts, strict=True)
        ):
            self._undo()
            self.chain.take_back()
            return {}, _Launch()
        decision = self.control.trim(rows, [None if d is None else d.offer for d in drafts], choices)
        out = {}
        for state, row, choice, made, width in zip(
            plan.rows, rows, choices, drafts, decision.widths, strict=True
        ):
            row.plain_rounds = 0 if width or choice.model is not None else row.plain_rounds + 1
            beside = () if made is None or looks or choice.model is None else _unread(made.draft)
            if made is not None and width:
                out[state.row] = Proposal(
                    drafter=made.offer.drafter, draft=made.draft.cut(width), beside=beside
                )
            elif beside:
                out[state.row] = Proposal(beside=beside)
            if self.log is not None:
                self.log(_line(state.row, len(plan.histories[state.row]), choice, made, width))
        is_blind = not looks and any(c.model is not None for c in choices)
        return out, _Launch(decision, blind if is_blind else None, is_warm)

    def take_back(self) -> None:
        if self._next.decision is None:  # what the round in front took has been learned
            self._launch = _Launch()
        self._next = _Launch()
        for row in self._rows.values():
            row.account.reserved = 0.0
        self._undo()

    def _undo(self) -> None:
        """Nothing has been drafted behind the round in front: what was run for that has to be run again."""
        for row in self._rows.values():
            if row.ran is not None:
                row.queued[row.ran[0]] += row.ran[1]
            row.ran = None
            row.waiting = [w for w in row.waiting if w.is_read]

    def passed(self) -> None:
        self._launch, self._next = self._next, _Launch()

    def plain(self, rows: Sequence[ChainRow], plan: Callable[[], RoundPlan]) -> bool:
        """At rest models are not weighed, and lookups are asked for one row a round, in turns: a text that begins to repeat itself does so
        for longer than a turn."""
        own = [self._rows[s.row] for s in rows]
        if not all(r.plain_rounds for r in own):
            return False
        if self._still:
            self._still -= 1
            turn = rows[self._still % len(rows)]
            self.tell(turn)
            if not self.chain.may_look_up(turn):
                return True
            found = self._look_up([turn], plan())
            offers = [[d.offer for d in found[0]] if s is turn else [] for s in rows]
            if all(c is PLAIN for c in self.control.choose(own, offers, [{}] * len(own))):
                return True
        else:
            planned = plan()
            if self._rest_or_wake(self._choose(planned, own, self._look_up(rows, planned))):
                return True
        self.wake()
        for row in own:
            row.plain_rounds = 0
        return False

    def _rest_or_wake(self, choices: Sequence[Choice]) -> bool:
        """Whether nobody drafts, so that rows rest: for so many rounds models are not weighed anew, whose gain changes slowly."""
        rests = all(c is PLAIN for c in choices)
        self._still = (1 + (len(choices) > 1)) * REST - 1 if rests else 0
        return rests

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
        known = replace(plan, unread=None)  # a lookup goes on from what is known
        for drafter, wanted in asks.items():
            drafts = self.chain.ask_all(drafter, [ask for _, ask in wanted], known)
            for (row, _), draft in zip(wanted, drafts, strict=True):
                if draft.length:
                    made = Pending(offer=_offer(drafter.name, draft), draft=draft)
                    row.looked_up[1].append(made)
                    row.waiting.append(made)
        return found

    def _choose(
        self,
        plan: RoundPlan,
        rows: Sequence[AutoRow],
        found: Sequence[Sequence[Pending]],
        *,
        is_ahead: bool = False,
    ) -> list[Choice]:
        """Between what lookups offer and what models are expected to gain. A drafter whose catch-up no account could ever pay is closed for
        the row before it has to run so much by itself."""
        models: list[dict[str, tuple[int, int]]] = []
        for state, row in zip(plan.rows, rows, strict=True):
            row.bucket, row.room, asked = bucket(len(plan.histories[state.row])), plan.rooms[state.row], {}
            for name, queued in row.queued.items():
                drafter = self.chain.drafters[name]
                limit = min(plan.rooms[state.row], self.chain.limit(drafter, state))
                if limit < 1 or name in state.ended:
                    continue
                if queued >= ASLEEP and not self.control.can_catch_up(rows, name, queued):
                    self.chain.dismiss(drafter, state)
                elif not is_ahead or (isinstance(drafter, ModelDrafter) and drafter.runs_behind):
                    asked[name] = limit, queued
            models.append(asked)
        offers = [[d.offer for d in given] for given in found]
        return self.control.choose(rows, offers, models, is_ahead=is_ahead)

    def _ask_models(
        self,
        plan: RoundPlan,
        rows: Sequence[AutoRow],
        choices: Sequence[Choice],
        drafts: list[Pending | None],
        *,
        looks: bool,
    ) -> tuple[float, bool]:
        """Drafts of the models that were chosen, into `drafts`. Returns what they are expected to take, in seconds, and whether nothing was
        compiled. looks: they are read at once."""
        expected, all_warm, plain = 0.0, True, self.control.curve(rows).plain
        for name in dict.fromkeys(c.model for c in choices if c.model is not None):
            places = [i for i, c in enumerate(choices) if c.model == name]
            asks = [self._ask(plan, plan.rows[i], rows[i], choices[i], looks=looks) for i in places]
            queued = sum(rows[i].queued[name] for i in places)
            if plan.unread is not None:
                queued += len(places)
            drafter = self.chain.drafters[name]
            if isinstance(drafter, ModelDrafter):
                drafter.is_warm = True
            started = time.perf_counter()
            made = self.chain.ask_all(drafter, asks, plan.at(places), looks=looks)
            seconds = time.perf_counter() - started
            depth = max((d.length for d in made), default=0) or max(a.limit for a in asks)
            shape = name, depth > 1, len(asks), plan.unread is not None
            is_warm = getattr(drafter, "is_warm", True) and shape in self._seen
            self._seen.add(shape)
            kind = dearest([rows[i] for i in places])
            expected += self.control.costs.draft(name, kind, plain).seconds(depth, queued, len(asks))
            all_warm = all_warm and is_warm
            # a refusal says nothing of what a draft costs
            if looks and (not is_warm or any(d.length for d in made)):
                self._asked.append(_Asked(name, depth, queued, len(asks), kind, seconds, is_warm))
            for i, draft in zip(places, made, strict=True):
                row = rows[i]
                if plan.unread is None or draft.length:
                    row.queued[name] = 0
                    self.control.asked(row, choices[i])
                if draft.length:
                    made_for = drafts[i] = Pending(
                        offer=_offer(name, draft),
                        draft=draft,
                        is_behind=plan.unread is not None,
                        is_read=looks,
                        lasts=choices[i].probe,
                    )
                    row.waiting.append(made_for)
                    if looks:
                        self.control.read(row, made_for.offer)
                    if plan.unread is not None:
                        row.ran = name, 0
        return expected, all_warm

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

    def _may_be_blind(self, state: ChainRow, row: AutoRow, choice: Choice) -> bool:
        """Whether nobody needs to see a token between drafting and verifying, and what the draft costs is known."""
        if choice.model is None:
            return True
        is_seen = state.has_limits or state.sampler.constraints is not None
        return not is_seen and not self.control.costs.is_guess(choice.model, row.kind)

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
        """A round was read. Rounds that compile say nothing of what a width costs. The plain round behind drafts cannot run ahead: what it
        takes longer is a cost of those drafts. Plain rounds at rest are learned from several at once: that costs the host less."""
        if ahead and is_warm and num_tokens == num_rows == len(states) and self._launch.decision is None:
            if self._rested and self._resting != states:
                self._learn_rested()
            self._launch, self._next, self._resting = self._next, _Launch(), states
            self._rested += 1
            self._rested_seconds += seconds
            if self._at_once or self._rested >= REST:
                self._at_once = max(0, self._at_once - 1)
                self._learn_rested()
            return
        self._learn_rested()
        launch, self._launch, self._next = self._launch, self._next, _Launch()
        rows = [r for s in states if (r := self._rows.get(s.row)) is not None and r.emitted]
        if not rows:
            return
        curve = self.control.curve(rows, num_rows)
        drafting, compiling = (0.0, 0.0) if ahead else (self._drafting, self._learn_drafts(curve.plain))
        if launch.blind is not None:
            drafting = launch.blind
        if not ahead:
            self._drafting = 0.0
        spent = max(0.0, seconds - drafting)
        is_plain, calm = num_tokens == num_rows, min(r.plain_rounds for r in rows)
        if not is_warm or not launch.is_warm:
            usual = curve.seconds(num_tokens)
            self.control.costs.compiled(num_rows, num_tokens, None if is_warm else spent - usual)
            spent = min(spent, usual)
        else:
            self.control.costs.compiled(num_rows, num_tokens, None)
            if ahead or not is_plain or calm > 1:
                curve.refine(num_tokens, spent)
            elif calm == 1:
                usual = curve.plain
                self.control.paused(rows, num_rows, max(0.0, min(spent - usual, usual)))
        took = spent + max(0.0, drafting - compiling)
        self.control.spent([(r, r.emitted) for r in rows], num_rows, took, launch.decision)
        for row in rows:
            row.emitted = 0

    def _learn_rested(self) -> None:
        """Learn what the plain rounds at rest took."""
        num, seconds, states = self._rested, self._rested_seconds, self._resting
        if not num:
            return
        self._rested, self._rested_seconds = 0, 0.0
        rows = [r for s in states if (r := self._rows.get(s.row)) is not None and r.emitted]
        if rows:
            self.control.costs.compiled(len(states), len(states), None)
            self.control.curve(rows, len(states)).refine(len(states), seconds / num)
            self.control.spent([(r, r.emitted) for r in rows], len(states), seconds, num_rounds=num)
        for row in rows:
            row.emitted = 0

    def _learn_drafts(self, plain: float) -> float:
        """What models' drafts took; returns seconds in which they compiled."""
        compiling, costs = 0.0, self.control.costs
        asked, self._asked = self._asked, []
        for name, depth, queued, num_rows, kind, seconds, is_warm in asked:
            if is_warm:
                costs.refine_draft(name, kind, depth, queued, num_rows, seconds, plain)
            else:
                expected = costs.draft(name, kind, plain).seconds(depth, queued, num_rows)
                compiling += max(0.0, seconds - expected)
        return compiling

    @property
    def readings(self) -> tuple[float, tuple[tuple[float, bool], ...]]:
        """Of what has not been learned: seconds of choosing and drafting, and each call's seconds and whether nothing was compiled in
        it."""
        return self._drafting, tuple((a.seconds, a.is_warm) for a in self._asked)

    def read_anew(self, seconds: float, asked: Sequence[tuple[float, bool]]) -> None:
        """Readings of another clock in their place."""
        self._drafting = seconds
        self._asked = [
            a._replace(seconds=s, is_warm=warm) for a, (s, warm) in zip(self._asked, asked, strict=True)
        ]


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
    name, length = made.offer.drafter, made.offer.length
    if choice.probe:
        return f"row {row} at {place}: {name} probed for {length}, verifies {width}"
    return f"row {row} at {place}: {name} drafts {length}, verifies {width} (worth {choice.gain:.2f} tokens)"
