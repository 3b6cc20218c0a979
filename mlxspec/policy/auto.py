"""Policy auto: asks lookups, asks a model where the controller expects a gain, cuts drafts, and tells the controller what came of them.

The controller works with numbers; this module holds the drafters, tokens and rows behind those numbers. Every offer is compared with the
text that comes, whoever drafted it. While no draft is expected to gain the rows rest: plain rounds run ahead of the host, and only lookups
are asked. Rows of other policies do not count. The only clock read here is that of drafting. What it says is learned with what the round
took, never before: ranks that decide alike must not decide by clocks of their own within a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mlxspec.drafters.base import Ask, Draft, Drafter
from mlxspec.drafters.chain import Chain, Proposal
from mlxspec.drafters.chain_row import ChainRow
from mlxspec.drafters.model_based import QUEUE_AT_MOST, ModelDrafter
from mlxspec.drafters.plan import RoundPlan
from mlxspec.policy.acceptance import PROBED, Offer
from mlxspec.policy.base import Policy
from mlxspec.policy.controller import PLAIN, Choice, Controller, Decision, PolicyRow, dearest
from mlxspec.policy.costs import DEPTHS, bucket
from mlxspec.sampling.acceptance import DraftOutline, ForMatch, Limits, Submission, submit_for_rejection

_LITTLE = 1 + DEPTHS[-1]  # tokens: the most that a round gives a row
# tokens a model drafter waits for at most where catching up cannot be paid: then it ends for the row, before it runs them by itself
ASLEEP = QUEUE_AT_MOST - _LITTLE
REST = int(PROBED)  # rounds at rest until models are weighed anew, twice as many where several rows rest
PRIMED = 8  # of so many rows one has its drafters read the prompt in any case: else no drafter would ever be seen to have become worth it
_NOTHING: dict[str, tuple[int, int]] = {}  # no models to choose from


class _Draft(NamedTuple):
    """What a drafter said for a row."""

    offer: Offer
    draft: Draft


@dataclass(kw_only=True)
class _Pending:
    """A draft waiting for its text. lasts: it is compared over several rounds, as probes are; others are judged by one."""

    offer: Offer
    tokens: list[int]
    lasts: bool = False
    heard: list[int] = field(default_factory=list)


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
    """queued: tokens each model drafter has not run. waiting: drafts whose text has not come. calm: plain rounds in a row that did
    not run ahead. emitted: tokens of the round just read."""

    __slots__ = ("calm", "emitted", "queued", "waiting")

    def __init__(self, kind: str, models: Sequence[str]) -> None:
        super().__init__(kind, 0)
        self.queued, self.waiting = dict.fromkeys(models, 0), list[_Pending]()
        self.calm = self.emitted = 0


class Auto(Policy):
    """Drafts as a controller chooses. log: gets a line a row and round, if set."""

    def __init__(self, chain: Chain, control: Controller) -> None:
        super().__init__(chain)
        self.control = control
        self.log: Callable[[str], None] | None = None
        self._rows: dict[int, AutoRow] = {}
        self._decision: Decision | None = None  # of the round that has not been read
        self._drafting = 0.0  # seconds of this round so far
        self._asked: list[_Asked] = []  # calls of models, of which nothing has been learned
        self._still = 0  # rounds at rest that are left until models are weighed again
        self._seen: set[tuple[object, ...]] = set()  # shapes that have run: the first run of a shape compiles

    # --- rows

    def begin(self, state: ChainRow) -> None:
        kind = "greedy" if state.sampler.is_greedy else "rejected" if state.rejects else "sampled"
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
        if not self._still or not row.calm or row.waiting:
            self.tell(state)

    def tell(self, state: ChainRow) -> None:
        """The row's drafters hear what waits for them, and drafts that waited for the text are judged."""
        tokens = self.chain.tell(state)
        if not tokens:
            return
        row = self._rows[state.row]
        for name, queued in row.queued.items():
            queued += len(tokens)
            row.queued[name] = queued if queued <= QUEUE_AT_MOST else 1
        waiting, row.waiting = row.waiting, []
        for pending in waiting:
            drafted, heard = pending.tokens, pending.heard
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
        found = self._look_up(states, plan)
        choices = self._choose(plan, rows, found)
        self._rest_or_wake(choices)
        drafts = [
            None if c.offer is None else given[c.offer] for c, given in zip(choices, found, strict=True)
        ]
        self._ask_models(plan, rows, choices, drafts)
        offers = [None if d is None else d.offer for d in drafts]
        self._decision = self.control.trim(rows, offers, choices)
        out = {}
        for state, row, choice, made, width in zip(
            states, rows, choices, drafts, self._decision.widths, strict=True
        ):
            row.calm = 0 if width or choice.model is not None else row.calm + 1
            if made is not None:
                # what a lookup says follows from the text; other drafts are drawn
                if state.rejects and (choice.model is not None or made.draft.scores is not None):
                    _forget_unverified(row, made.offer, width)
                if width:
                    submission = _submission(state, made.offer, width)
                    name = made.offer.drafter
                    out[state.row] = Proposal(
                        drafter=name, draft=made.draft.cut(width), submission=submission
                    )
            if self.log is not None:
                self.log(_line(state.row, len(plan.histories[state.row]), choice, made, width))
        self._drafting = time.perf_counter() - started
        return out

    def plain(self, rows: Sequence[ChainRow], plan: Callable[[], RoundPlan]) -> bool:
        """At rest models are not weighed, and lookups are asked for one row a round, in turns: all of them at once would cost the host as
        many times as much, and a text that begins to repeat itself does so for longer than a turn."""
        own = [self._rows[s.row] for s in rows]
        if not all(r.calm for r in own):
            return False
        for row in own:
            if row.waiting:  # what was offered for this text is asked for again
                row.waiting = [w for w in row.waiting if w.lasts]
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
            row.waiting = [w for w in row.waiting if w.lasts]  # asked for when the round is launched
        return False

    def _rest_or_wake(self, choices: Sequence[Choice]) -> bool:
        """Whether nobody drafts, so that rows rest: for so many rounds models are not weighed anew, whose gain changes slowly."""
        rests = all(c is PLAIN for c in choices)
        self._still = (1 + (len(choices) > 1)) * REST - 1 if rests else 0
        return rests

    def _look_up(self, states: Sequence[ChainRow], plan: RoundPlan) -> list[list[_Draft]]:
        """What lookups offer each of these rows; judged when the text has come, taken or not."""
        asks: dict[Drafter, list[tuple[int, Ask]]] = {}
        for i, state in enumerate(states):
            self.tell(state)
            for drafter, longest in self.chain.lookups_of(state):
                limit = min(plan.rooms[state.row], longest)
                if limit > 0:
                    asks.setdefault(drafter, []).append((i, plan.ask(state, limit)))
        found: list[list[_Draft]] = [[] for _ in states]
        for drafter, wanted in asks.items():
            drafts = self.chain.ask_all(drafter, [ask for _, ask in wanted], plan)
            for (i, ask), draft in zip(wanted, drafts, strict=True):
                if draft.length:
                    offer = _offer(drafter.name, draft)
                    if draft.scores is not None and states[i].rejects:
                        # later confidences depend on tokens drawn before them, which must have no say in what is verified
                        offer = offer._replace(confidences=None)
                    found[i].append(_Draft(offer, draft))
                    self._rows[ask.row].waiting.append(_Pending(offer=offer, tokens=_tokens(draft)))
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
        return self.control.choose(rows, [[d.offer for d in given] for given in found], models)

    def _ask_models(
        self,
        plan: RoundPlan,
        rows: Sequence[AutoRow],
        choices: Sequence[Choice],
        drafts: list[_Draft | None],
    ) -> None:
        """Drafts of the models that were chosen, into `drafts`."""
        for name in dict.fromkeys(c.model for c in choices if c.model is not None):
            places = [i for i, c in enumerate(choices) if c.model == name]
            asks = [plan.ask(plan.rows[i], choices[i].depth) for i in places]
            depth, queued = max(a.limit for a in asks), sum(rows[i].queued[name] for i in places)
            drafter = self.chain.drafters[name]
            if isinstance(drafter, ModelDrafter):
                drafter.is_warm = True
            started = time.perf_counter()
            made = self.chain.ask_all(drafter, asks, plan)
            seconds = time.perf_counter() - started
            shape = name, depth > 1, len(asks)
            is_warm = getattr(drafter, "is_warm", True) and shape in self._seen
            self._seen.add(shape)
            if not is_warm or any(d.length for d in made):  # a refusal says nothing of what a draft costs
                kind = dearest([rows[i] for i in places])
                self._asked.append(_Asked(name, depth, queued, len(asks), kind, seconds, is_warm))
            for i, draft in zip(places, made, strict=True):
                row, choice, offer = rows[i], choices[i], _offer(name, draft)
                row.queued[name] = 0
                self.control.drafted(row, offer, len(rows), choice)
                if draft.length:
                    drafts[i] = _Draft(offer, draft)
                    row.waiting.append(_Pending(offer=offer, tokens=_tokens(draft), lasts=choice.probe))

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
        drafting, compiling, decision = self._drafting, self._learn_drafts(), None
        if not ahead:
            decision, self._decision, self._drafting = self._decision, None, 0.0
        rows = [r for s in states if (r := self._rows.get(s.row)) is not None and r.emitted]
        if not rows:
            return
        curve, spent = self.control.curve(rows, num_rows), seconds - (0.0 if ahead else drafting)
        is_plain, calm = num_tokens == num_rows, min(r.calm for r in rows)
        if not is_warm:
            spent = min(spent, curve.seconds(num_tokens))
        elif ahead or not is_plain or calm > 1:
            curve.refine(num_tokens, spent)
        elif calm == 1:
            usual = curve.seconds(num_rows)
            self.control.paused(rows, num_rows, max(0.0, min(spent - usual, usual)))
        took = spent + (0.0 if ahead else drafting - compiling)
        self.control.spent([(r, r.emitted) for r in rows], num_rows, took, decision)
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


def _forget_unverified(row: AutoRow, offer: Offer, width: int) -> None:
    """By rejection more is accepted than equals the text: only what is verified tells how much."""
    if row.waiting and row.waiting[-1].offer is offer:
        last = row.waiting.pop()
        if width:
            sure = offer.confidences
            cut = offer._replace(length=width, confidences=None if sure is None else sure[:width])
            row.waiting.append(_Pending(offer=cut, tokens=last.tokens[:width]))


def _offer(name: str, draft: Draft) -> Offer:
    sure = draft.confidences
    return Offer(name, draft.length, sure if isinstance(sure, list) else None, draft.backing)


def _tokens(draft: Draft) -> list[int]:
    if not isinstance(draft.tokens, list):
        raise TypeError("these drafts are on the host")
    return draft.tokens


def _submission(state: ChainRow, offer: Offer, width: int) -> Submission:
    """`width` was found without the tokens behind it where the row demands that."""
    if not state.rejects:
        return ForMatch(width)
    tops = None if offer.confidences is None else tuple(offer.confidences[:width])
    return submit_for_rejection(DraftOutline(length=width, tops=tops), Limits())


def _line(row: int, place: int, choice: Choice, made: _Draft | None, width: int) -> str:
    """`row 0 at 153: mtp drafts 3, verifies 2 (worth 0.41 tokens)`"""
    if made is None:
        return f"row {row} at {place}: plain"
    name, length = made.offer.drafter, made.offer.length
    if choice.probe:
        return f"row {row} at {place}: {name} shows {length}, verifies {width}"
    return f"row {row} at {place}: {name} drafts {length}, verifies {width} (worth {choice.gain:.2f} tokens)"
