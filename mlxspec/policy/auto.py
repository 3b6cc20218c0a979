"""Policy auto: asks lookups, asks a model where the controller expects a gain, cuts drafts, and tells the controller what came of them.

The controller works with numbers; this module holds the drafters, tokens and rows behind those numbers. Every offer is compared with the
text that comes, whoever drafted it. While no draft is expected to gain the rows rest: plain rounds run ahead of the host, and only lookups
are asked. Rows of other policies do not count. The only clock read here is that of drafting. What it says is learned with what the round
took, never before: ranks that decide alike must not decide by clocks of their own within a round.

A model's draft is not read before it is verified, unless cutting it gains more than waiting costs. So a round may be launched behind an
unread one (`propose_behind`): it is decided on what the rounds before that one gave, and its draft is read with it. A lookup needs the
text: where its offer is better than what a model is expected to gain, the next round waits for this one; and where that has come too late
often enough, every round does.
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
from mlxspec.policy.acceptance import PROBED, Offer
from mlxspec.policy.base import Policy
from mlxspec.policy.controller import PLAIN, Choice, Controller, Decision, PolicyRow, dearest
from mlxspec.policy.costs import DEPTHS, FADE, bucket

_LITTLE = 1 + DEPTHS[-1]  # tokens: the most that a round gives a row
# tokens a model drafter waits for at most where catching up cannot be paid: then it ends for the row, before it runs them by itself
ASLEEP = QUEUE_AT_MOST - _LITTLE
REST = int(PROBED)  # rounds at rest until models are weighed anew, twice as many where several rows rest
PRIMED = 8  # of so many rows one has its drafters read the prompt in any case: else no drafter would ever be seen to have become worth it
# tokens that a lookup gains where it begins in time, for each that its first draft is expected to: it drafts in bursts, of which a
# round is lost
LATE = 4.0
_NOTHING: dict[str, tuple[int, int]] = {}  # no models to choose from


class _Draft(NamedTuple):
    """What a drafter said for a row."""

    offer: Offer
    draft: Draft


@dataclass(kw_only=True)
class _Pending:
    """A draft waiting for its text. lasts: it is compared over several rounds, as probes are; others are judged by one. choice: of a
    model's draft that has not been read."""

    offer: Offer
    draft: Draft
    lasts: bool = False
    choice: Choice | None = None
    heard: list[int] = field(default_factory=list)

    def read(self) -> None:
        """Its round has been read, and the draft with it."""
        made = self.draft._replace(tokens=numbers(mx.array(self.draft.tokens)).tolist())
        if isinstance(made.confidences, mx.array):
            made = made._replace(confidences=numbers(made.confidences).tolist())
        self.draft, self.offer, self.choice = made, _offer(self.offer.drafter, made), None


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
    """queued: tokens each model drafter has not run. waiting: drafts whose text has not come; coming: those behind the round that has not
    been read. ran: the model drafter that has run that round's tokens, and how many of them it was told. looked_up: at which length of
    text lookups were asked last, and what they said. by_lookup: one of them drafts. late: tokens that knowing the text gains a round which
    no lookup drafted before. calm: plain rounds in a row that did not run ahead. emitted: tokens of the round just read."""

    __slots__ = ("by_lookup", "calm", "coming", "emitted", "late", "looked_up", "queued", "ran", "waiting")

    def __init__(self, kind: str, models: Sequence[str]) -> None:
        super().__init__(kind, 0)
        self.queued, self.waiting, self.coming = dict.fromkeys(models, 0), list[_Pending](), list[_Pending]()
        self.ran: tuple[str, int] | None = None
        self.looked_up: tuple[int, list[_Draft]] = 0, []
        self.by_lookup, self.late = False, 0.0
        self.calm = self.emitted = 0


class Auto(Policy):
    """Drafts as a controller chooses. log: gets a line a row and round, if set. runs_ahead: drafted rounds are launched behind unread ones.
    Only on a GPU: without one, host and model share the cores, so that hides nothing, and each pair of widths in a row compiles."""

    def __init__(self, chain: Chain, control: Controller) -> None:
        super().__init__(chain)
        self.control = control
        self.log: Callable[[str], None] | None = None
        self.runs_ahead = device.has_gpu()
        self._rows: dict[int, AutoRow] = {}
        self._launch, self._next = _Launch(), _Launch()  # the round that is read next, and the one behind it
        self._drafting = 0.0  # seconds of this round so far
        self._num_rows = 1  # of the last round that was decided
        self._asked: list[_Asked] = []  # calls of models, of which nothing has been learned
        self._still = 0  # rounds at rest that are left until models are weighed again
        self._seen: set[tuple[object, ...]] = set()  # shapes that have run: the first run of a shape compiles

    # --- rows

    def begin(self, state: ChainRow) -> None:
        kind = "greedy" if state.sampler.is_greedy else "sampled"
        kind = kind if state.sampler.constraints is None else "constrained"
        models = [d.name for d in self.chain.drafters_of(state) if isinstance(d, ModelDrafter)]
        self._rows[state.row] = AutoRow(kind, models)

    def close(self, row: int) -> None:
        self._rows.pop(row, None)

    def wake(self) -> None:
        """Rows have changed, of this policy or another, or somebody may draft: whether rows rest is found out anew."""
        self._still = 0

    def primes(self, state: ChainRow, drafter: Drafter) -> bool:
        queued = self._rows[state.row].queued
        if queued.get(drafter.name, 0) > 1 and self._would_draft(state, drafter):
            queued[drafter.name] = 1
            return True
        return False

    def keeps(self, state: ChainRow, drafter: Drafter) -> bool:
        row = self._rows[state.row]
        if row.queued.get(drafter.name, 0) > _LITTLE and not self.control.would_draft(row, drafter.name):
            return False
        if drafter.name in row.queued:
            row.queued[drafter.name] = 0
        return True

    def resumes(self, state: ChainRow, drafter: Drafter, num_tokens: int) -> bool:
        queued = self._rows[state.row].queued
        if drafter.name not in queued:
            return True
        runs_now = num_tokens > QUEUE_AT_MOST
        queued[drafter.name] = 1 if runs_now else num_tokens
        return not runs_now or self._would_draft(state, drafter)

    def _would_draft(self, state: ChainRow, drafter: Drafter) -> bool:
        return state.row % PRIMED == 0 or self.control.would_draft(self._rows[state.row], drafter.name)

    def observe(self, state: ChainRow, num_tokens: int) -> None:
        """At rest the row's drafters need not hear tokens at once."""
        row = self._rows[state.row]
        row.emitted = num_tokens
        if not self._still or not row.calm or row.waiting or row.ran:
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
        waiting, row.waiting, row.coming = row.waiting, row.coming, []
        for pending in waiting:
            if pending.choice is not None:
                choice = pending.choice
                pending.read()
                self.control.read(row, pending.offer, self._num_rows, choice)
            drafted, heard = _tokens(pending.draft), pending.heard
            heard += tokens[: len(drafted) - len(heard)]
            matched = next((i for i, token in enumerate(heard) if token != drafted[i]), len(heard))
            if pending.lasts and matched == len(heard) < len(drafted):
                row.waiting.append(pending)
            else:
                self.control.learn(row, pending.offer, matched, len(heard))
                asked = state.asked[pending.offer.drafter]
                asked.judged += 1
                asked.right += matched > 0

    # --- planning a round

    def propose(self, plan: RoundPlan) -> dict[int, Proposal]:
        started, states = time.perf_counter(), plan.rows
        rows = [self._rows[s.row] for s in states]
        for row in rows:
            row.account.reserved = 0.0  # all rounds before have been read, or have failed
            row.ran = None
        found = self._look_up(states, plan)
        choices = self._choose(plan, rows, found)
        self._better(plan, rows, choices)
        self._rest_or_wake(choices)
        blind = self.runs_ahead and all(map(_may_be_blind, states, choices))
        looks = not blind or self.control.looks(choices)
        out, self._launch = self._submit(plan, rows, choices, found, looks=looks)
        self._next, self._drafting = _Launch(), time.perf_counter() - started
        return out

    def propose_behind(self, plan: RoundPlan) -> dict[int, Proposal] | None:
        if not self.runs_ahead:
            return None
        states, rows = plan.rows, [self._rows[s.row] for s in plan.rows]
        found = self._look_up(states, plan)
        for row in rows:
            row.ran = None
        choices = self._unhurried(plan, rows, found)
        if choices is None or not all(map(_may_be_blind, states, choices)):
            return None
        out, launch = self._submit(plan, rows, choices, found, looks=False)
        if launch.decision is None:
            return None
        self._next = launch
        return out

    def _unhurried(
        self, plan: RoundPlan, rows: Sequence[AutoRow], found: Sequence[Sequence[_Draft]]
    ) -> list[Choice] | None:
        """What is chosen once the round in front has been read, as far as that is known; None where it has to be read first: a lookup says
        what a model is not expected to say, or the accounts have nothing left beside that round's worst case."""
        reserved = [row.account.reserved for row in rows]
        for row in rows:
            row.account.reserved = 0.0
        choices = self._choose(plan, rows, found)
        own, wait = self._better(plan, rows, choices), self.control.waiting(rows)
        if sum(c.gain for c in choices) - sum(c.gain for c in own) < wait:
            choices = list(own)
        for row, worst in zip(rows, reserved, strict=True):
            row.account.reserved = worst
        waits = LATE * sum(row.late for row in rows) > wait
        waits = waits or any(c.offer is not None or not self._runs_behind(c.model) for c in choices)
        if any(c.model is not None for c in choices) and not waits:
            waits = self.control.looks(choices) or not self.control.affords(rows, choices)
        return None if waits else list(choices)

    def _better(
        self, plan: RoundPlan, rows: Sequence[AutoRow], choices: Sequence[Choice]
    ) -> Sequence[Choice]:
        """What would be chosen if lookups said nothing. Where one begins to draft only now, it could not earlier for want of the text."""
        own = choices
        if any(c.offer is not None for c in choices):
            own = self._choose(plan, rows, [[] for _ in rows])
        for row, choice, other in zip(rows, choices, own, strict=True):
            if not row.by_lookup:
                row.late += 2.0 * FADE * (max(0.0, choice.gain - other.gain) - row.late)
            row.by_lookup = choice.offer is not None
        return own

    def _runs_behind(self, name: str | None) -> bool:
        """Whether a model that drafts needs no text; None: nobody drafts."""
        drafter = None if name is None else self.chain.drafters[name]
        return not isinstance(drafter, ModelDrafter) or drafter.runs_behind

    def _submit(
        self,
        plan: RoundPlan,
        rows: Sequence[AutoRow],
        choices: Sequence[Choice],
        found: Sequence[Sequence[_Draft]],
        *,
        looks: bool,
    ) -> tuple[dict[int, Proposal], _Launch]:
        """The round of these choices. Behind an unread round there is no decision where a model had nothing to say."""
        self._num_rows = len(rows)
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
            row.calm = 0 if width or choice.model is not None else row.calm + 1
            if made is not None:
                beside = _unread(made.draft) if choice.model is not None and not looks else ()
                if width:
                    name = made.offer.drafter
                    cut = made.draft.cut(width)
                    out[state.row] = Proposal(drafter=name, draft=cut, beside=beside)
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
            row.ran, row.coming = None, []
            row.waiting = [w for w in row.waiting if w.choice is None]

    def passed(self) -> None:
        self._launch, self._next = self._next, _Launch()

    def plain(self, rows: Sequence[ChainRow], plan: Callable[[], RoundPlan]) -> bool:
        """At rest models are not weighed, and lookups are asked for one row a round, in turns: all of them at once would cost the host as
        many times as much, and a text that begins to repeat itself does so for longer than a turn."""
        own = [self._rows[s.row] for s in rows]
        if not all(r.calm for r in own):
            return False
        if self._still:
            self._still -= 1
            turn = rows[self._still % len(rows)]
            self.tell(turn)
            if not self.chain.may_look_up(turn):
                return True
            planned = plan()
            found = self._look_up([turn], planned)
            offers = [[d.offer for d in found[0]] if s is turn else [] for s in rows]
            if all(c is PLAIN for c in self.control.choose(own, offers, [_NOTHING] * len(own))):
                return True
        else:
            planned = plan()
            if self._rest_or_wake(self._choose(planned, own, self._look_up(rows, planned))):
                return True
        self.wake()
        for row in own:
            row.calm = 0
        return False

    def _rest_or_wake(self, choices: Sequence[Choice]) -> bool:
        """Whether nobody drafts, so that rows rest: for so many rounds models are not weighed anew, whose gain changes slowly."""
        rests = all(c is PLAIN for c in choices)
        self._still = (1 + (len(choices) > 1)) * REST - 1 if rests else 0
        return rests

    def _look_up(self, states: Sequence[ChainRow], plan: RoundPlan) -> list[list[_Draft]]:
        """What lookups offer each of these rows; judged when the text has come, taken or not."""
        asks: dict[Drafter, list[tuple[int, Ask]]] = {}
        found: list[list[_Draft]] = []
        for i, state in enumerate(states):
            self.tell(state)
            row, length = self._rows[state.row], len(plan.histories[state.row])
            if row.looked_up[0] != length:
                row.looked_up = length, []
                for drafter, longest in self.chain.lookups_of(state):
                    limit = min(plan.rooms[state.row], longest)
                    if limit > 0:
                        asks.setdefault(drafter, []).append((i, plan.ask(state, limit)))
            found.append(row.looked_up[1])
        known = replace(plan, unread=None)  # a lookup goes on from what is known
        for drafter, wanted in asks.items():
            drafts = self.chain.ask_all(drafter, [ask for _, ask in wanted], known)
            for (i, ask), draft in zip(wanted, drafts, strict=True):
                if draft.length:
                    offer = _offer(drafter.name, draft)
                    found[i].append(_Draft(offer, draft))
                    self._rows[ask.row].waiting.append(_Pending(offer=offer, draft=draft))
        return found

    def _choose(
        self, plan: RoundPlan, rows: Sequence[AutoRow], found: Sequence[Sequence[_Draft]]
    ) -> list[Choice]:
        """Between what lookups offer and what models are expected to gain. A drafter whose catch-up no account could ever pay is closed for
        the row before it has to run so much by itself."""
        models: list[dict[str, tuple[int, int]]] = []
        for state, row in zip(plan.rows, rows, strict=True):
            row.bucket, asked = bucket(len(plan.histories[state.row])), {}
            for name, queued in row.queued.items():
                drafter = self.chain.drafters[name]
                limit = min(plan.rooms[state.row], self.chain.limit(drafter, state))
                if limit < 1 or name in state.ended:
                    continue
                if queued < ASLEEP or self.control.can_catch_up(rows, name, queued):
                    asked[name] = limit, queued
                else:
                    self.chain.dismiss(drafter, state)
            models.append(asked)
        offers = [[d.offer for d in given] for given in found]
        return self.control.choose(rows, offers, models, is_ahead=self.runs_ahead)

    def _ask_models(
        self,
        plan: RoundPlan,
        rows: Sequence[AutoRow],
        choices: Sequence[Choice],
        drafts: list[_Draft | None],
        *,
        looks: bool,
    ) -> tuple[float, bool]:
        """Drafts of the models that were chosen, into `drafts`. Returns what they are expected to take, in seconds, and whether nothing was
        compiled. looks: they are read at once."""
        expected, all_warm = 0.0, True
        for name in dict.fromkeys(c.model for c in choices if c.model is not None):
            places = [i for i, c in enumerate(choices) if c.model == name]
            asks = [plan.ask(plan.rows[i], choices[i].depth) for i in places]
            depth, queued = max(a.limit for a in asks), sum(rows[i].queued[name] for i in places)
            if plan.unread is not None:
                queued += len(places)
            drafter = self.chain.drafters[name]
            if isinstance(drafter, ModelDrafter):
                drafter.is_warm = True
            started = time.perf_counter()
            made = self.chain.ask_all(drafter, asks, plan.at(places), looks=looks)
            seconds = time.perf_counter() - started
            shape = name, depth > 1, len(asks), plan.unread is not None
            is_warm = getattr(drafter, "is_warm", True) and shape in self._seen
            self._seen.add(shape)
            kind = dearest([rows[i] for i in places])
            expected += self.control.costs.draft(name, kind).seconds(depth, queued, len(asks))
            all_warm = all_warm and is_warm
            # a refusal says nothing of what a draft costs
            if looks and (not is_warm or any(d.length for d in made)):
                self._asked.append(_Asked(name, depth, queued, len(asks), kind, seconds, is_warm))
            for i, draft in zip(places, made, strict=True):
                row, choice, offer = rows[i], choices[i], _offer(name, draft)
                if plan.unread is None or draft.length:
                    row.queued[name] = 0
                    self.control.asked(row, name, len(rows), choice)
                if looks:
                    self.control.read(row, offer, len(rows), choice)
                if draft.length:
                    drafts[i] = _Draft(offer, draft)
                    pending = _Pending(
                        offer=offer, draft=draft, lasts=choice.probe, choice=None if looks else choice
                    )
                    if plan.unread is None:
                        row.waiting.append(pending)
                    else:
                        row.coming.append(pending)
                        row.ran = name, 0
        return expected, all_warm

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
        takes longer is a cost of those drafts."""
        launch, self._launch, self._next = self._launch, self._next, _Launch()
        drafting, compiling = (0.0, 0.0) if ahead else (self._drafting, self._learn_drafts())
        if launch.blind is not None:
            drafting = launch.blind
        if not ahead:
            self._drafting = 0.0
        rows = [r for s in states if (r := self._rows.get(s.row)) is not None and r.emitted]
        if not rows:
            return
        curve, spent = self.control.curve(rows, num_rows), max(0.0, seconds - drafting)
        is_plain, calm = num_tokens == num_rows, min(r.calm for r in rows)
        if not is_warm or not launch.is_warm:
            spent = min(spent, curve.seconds(num_tokens))
        elif ahead or not is_plain or calm > 1:
            curve.refine(num_tokens, spent)
        elif calm == 1:
            usual = curve.seconds(num_rows)
            self.control.paused(rows, num_rows, max(0.0, min(spent - usual, usual)))
        took = spent + max(0.0, drafting - compiling)
        self.control.spent([(r, r.emitted) for r in rows], num_rows, took, launch.decision)
        for row in rows:
            row.emitted = 0

    def _learn_drafts(self) -> float:
        """What models' drafts took; returns seconds in which they compiled."""
        compiling, costs = 0.0, self.control.costs
        asked, self._asked = self._asked, []
        for name, depth, queued, num_rows, kind, seconds, is_warm in asked:
            if is_warm:
                costs.refine_draft(name, depth, queued, num_rows, seconds, kind)
            else:
                compiling += max(0.0, seconds - costs.draft(name, kind).seconds(depth, queued, num_rows))
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


def _may_be_blind(state: ChainRow, choice: Choice) -> bool:
    """Whether nobody needs to see a token between drafting and verifying."""
    return choice.model is None or not (state.has_limits or state.sampler.constraints is not None)


def _unread(draft: Draft) -> tuple[mx.array, ...]:
    """What of a draft is on the device."""
    return tuple(x for x in (draft.tokens, draft.confidences) if isinstance(x, mx.array))


def _tokens(draft: Draft) -> list[int]:
    if not isinstance(draft.tokens, list):
        raise TypeError("these drafts are on the host")
    return draft.tokens


def _line(row: int, place: int, choice: Choice, made: _Draft | None, width: int) -> str:
    """`row 0 at 153: mtp drafts 3, verifies 2 (worth 0.41 tokens)`"""
    if made is None:
        return f"row {row} at {place}: plain"
    name, length = made.offer.drafter, made.offer.length
    if choice.probe:
        return f"row {row} at {place}: {name} shows {length}, verifies {width}"
    return f"row {row} at {place}: {name} drafts {length}, verifies {width} (worth {choice.gain:.2f} tokens)"
