"""Policy auto: asks lookups, asks a model where the controller expects a gain, cuts drafts, and tells the controller what came of them.

The controller works with numbers; this module holds the drafters, tokens and rows behind those numbers. Every offer is compared with the
text that comes, whoever drafted it. While no draft is expected to gain the rows rest: plain rounds run ahead of the host, and only lookups
are asked now and then. Rows of other policies do not count. The only clock read here is that of drafting. What it says is learned with
what the round took, never before: ranks that decide alike must not decide by clocks of their own within a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mlxspec.drafters.base import Ask, Draft, Drafter
from mlxspec.drafters.chain import Chain, Proposal
from mlxspec.drafters.chain_row import ChainRow
from mlxspec.drafters.model_based import QUEUE_AT_MOST, ModelDrafter
from mlxspec.drafters.plan import RoundPlan
from mlxspec.policy.acceptance import SPELL, Offer
from mlxspec.policy.auto_row import AutoRow, PendingDraft, Picked
from mlxspec.policy.base import Policy
from mlxspec.policy.controller import PLAIN, Choice, Controller, Decision, PolicyRow
from mlxspec.policy.costs import DEPTHS, bucket
from mlxspec.sampling.acceptance import DraftOutline, ForMatch, Limits, Submission, submit_for_rejection

_LITTLE = 1 + DEPTHS[-1]  # tokens: the most that a round gives a row
# tokens a model drafter waits for at most where catching up cannot be paid: then it ends for the row, before it runs them by itself
ASLEEP = QUEUE_AT_MOST - _LITTLE
CALM = 1  # plain rounds in a row before rounds run ahead
REST = int(SPELL)  # rounds until models are weighed anew, twice as many where several rows rest
LONGEST_REST = 4  # times as long, where nothing pays again and again
_TOLD_TOGETHER = 2 * REST  # rounds at rest that the controller is told of at once

Offered = Mapping[int, Sequence[tuple[Offer, Draft]]]  # by row


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """One call of a model drafter for several rows. seconds: what it took; is_warm: nothing was compiled in it; has_run: it drafted
    anything."""

    name: str
    depth: int
    queued: int
    num_rows: int
    seconds: float
    is_warm: bool
    has_run: bool


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
        self._longer = 1  # how many times as long the next rest is
        self._resting: list[AutoRow] = []  # whose plain rounds have not been told
        self._num_rows, self._num_rounds, self._seconds = 0, 0, 0.0  # of those rounds
        self._seen: set[tuple[object, ...]] = set()  # shapes that have run: the first run of a shape compiles

    # --- rows

    def begin(self, state: ChainRow) -> None:
        kind = "greedy" if state.sampler.is_greedy else "rejected" if state.rejects else "sampled"
        models = [d.name for d in self.chain.drafters_of(state) if isinstance(d, ModelDrafter)]
        self._settle()
        self._rows[state.row] = AutoRow(control=self.control.open(kind, 0), queued=dict.fromkeys(models, 0))

    def close(self, row: int) -> None:
        self._settle()
        found = self._rows.pop(row, None)
        if found is not None:
            self.control.close(found.control)

    def wake(self) -> None:
        """Rows have changed, of this policy or another, or somebody may draft: whether rows rest is found out anew."""
        self._still, self._longer = 0, 1

    def primes(self, state: ChainRow, drafter: Drafter) -> bool:
        """Whether a drafter catches up on the prompt before the answer begins: where it is expected to draft, and for one row of a spell
        anyway, for else nobody would find out that it had become worth it."""
        row = self._rows[state.row]
        if row.queued.get(drafter.name, 0) > 1 and self._would_draft(state, drafter):
            row.queued[drafter.name] = 1
            return True
        return False

    def _would_draft(self, state: ChainRow, drafter: Drafter) -> bool:
        control = self._rows[state.row].control
        return state.row % int(SPELL) == 0 or self.control.would_draft(control, drafter.name)

    def keeps(self, state: ChainRow, drafter: Drafter) -> bool:
        """Whether a drafter runs what it has queued so that its state can be kept: where that is little, or it is expected to draft."""
        row = self._rows[state.row]
        queued = row.queued.get(drafter.name, 0)
        if queued > _LITTLE and not self.control.would_draft(row.control, drafter.name):
            return False
        if queued:
            row.queued[drafter.name] = 0
        return True

    def resumes(self, state: ChainRow, drafter: Drafter, num_tokens: int) -> bool:
        """Whether a drafter goes on behind a beginning that the prefix store had: not where it would first have to run many tokens
        of it and is not expected to draft, for the answer is to begin at once. It is done with this row then."""
        row = self._rows[state.row]
        if drafter.name not in row.queued:
            return True
        if num_tokens <= QUEUE_AT_MOST:
            row.queued[drafter.name] = num_tokens
            return True
        row.queued[drafter.name] = 1  # it runs them at once
        return self._would_draft(state, drafter)

    def plain_seconds(self, row: int) -> float | None:
        """What a token of a row would have taken in plain rounds, its fellow rows beside it; None before the first round."""
        self._settle()
        tokens, seconds = self._rows[row].plain if row in self._rows else (0, 0.0)
        return seconds / tokens if tokens else None

    def observe(self, state: ChainRow, num_tokens: int) -> None:
        """At rest the row's drafters need not hear tokens at once."""
        row = self._rows[state.row]
        row.emitted = num_tokens
        if not self._still or row.calm < CALM or row.waiting:
            self.tell(state)

    def tell(self, state: ChainRow) -> None:
        """The row's drafters hear what waits for them, and drafts that waited for the text are judged."""
        tokens = self.chain.tell(state)
        if tokens:
            self._rows[state.row].observe(tokens, self.control, QUEUE_AT_MOST)

    # --- planning a round

    def propose(self, plan: RoundPlan) -> dict[int, Proposal]:
        started, states = time.perf_counter(), plan.rows
        rows = [self._rows[s.row] for s in states]
        for row in rows:
            row.control.account.reserved = 0.0  # all rounds before have been read, or have failed
        offered = self._look_up(states, plan)
        if self._still and not self._is_taken(states, rows, offered):
            self._still -= 1
            picked = [Picked(choice=PLAIN)] * len(rows)
        else:
            picked = self._pick(plan, rows, offered)
            self._rest_or_wake(picked)
            self._ask_models(plan, rows, picked)
        lookahead = [not s.rejects or p.choice.model is None for s, p in zip(states, picked, strict=True)]
        offers, choices = [p.offer for p in picked], [p.choice for p in picked]
        self._decision = self.control.trim([r.control for r in rows], offers, choices, lookahead=lookahead)
        out = {}
        for state, row, pick, width in zip(states, rows, picked, self._decision.widths, strict=True):
            row.calm = 0 if width or pick.choice.model is not None else row.calm + 1
            row.used_lookup = pick.choice.offer is not None
            if state.rejects and _is_drawn(pick):
                row.forget_behind(pick.offer, width)
            if width and pick.draft is not None and pick.offer is not None:
                out[state.row] = Proposal(
                    drafter=pick.offer.drafter,
                    draft=pick.draft.cut(width),
                    submission=_submission(state, pick.offer, width),
                )
            if self.log is not None:
                self.log(_line(state.row, len(plan.histories[state.row]), pick, width))
        self._drafting = time.perf_counter() - started
        return out

    def stays_plain(self, states: Sequence[ChainRow]) -> bool:
        """Rows at rest go on so while models are not weighed anew yet and the row whose turn it is to be looked up for has no place to
        draft from."""
        if not self._still:
            return False
        if len(states) == 1 or self._still % 2 == 0:
            turn = states[self._turn(states)]
            self.tell(turn)
            if self.chain.may_look_up(turn):
                return False
        self._still -= 1
        return True

    def _turn(self, states: Sequence[ChainRow]) -> int:
        """For which of these rows a lookup is asked next."""
        return self._still // 2 % len(states)

    def plain(self, plan: RoundPlan) -> bool:
        """See `Policy.plain`.

        Between two weighings of models lookups are asked for a row alone each round, for one of several every second round, in turns. All
        of them at once would cost the host as many times as much, and a text that begins to repeat itself does so for longer than a turn.
        """
        states, rows = plan.rows, [self._rows[s.row] for s in plan.rows]
        if any(r.calm < CALM for r in rows):
            return False
        for row in rows:
            row.ask_anew()
        if self._still:
            turn = self._turn(states)
            offered = self._look_up(states[turn : turn + 1], plan)
            if not self._is_taken(states, rows, offered):
                self._still -= 1
                return True
            offered |= self._look_up([*states[:turn], *states[turn + 1 :]], plan)
        else:
            offered = self._look_up(states, plan)
        if self._rest_or_wake(self._pick(plan, rows, offered)):
            return True
        for row in rows:
            row.calm = 0
            row.ask_anew()  # when the round is launched
        return False

    def _rest_or_wake(self, picked: Sequence[Picked]) -> bool:
        """Whether nobody drafts, so that rows rest: for so many rounds models are not weighed anew, whose gain changes slowly. Each time
        that nothing pays the rest is twice as long."""
        if any(p.choice is not PLAIN for p in picked):
            self.wake()
            return False
        self._still = self._longer * ((1 + (len(picked) > 1)) * REST - 1)
        self._longer = min(2 * self._longer, LONGEST_REST)
        return True

    def _look_up(self, states: Sequence[ChainRow], plan: RoundPlan) -> dict[int, list[tuple[Offer, Draft]]]:
        """What lookups offer, for rows that are offered anything; judged when the text has come, taken or not."""
        asks: dict[Drafter, list[Ask]] = {}
        for state in states:
            self.tell(state)
            for drafter, longest in self.chain.lookups_of(state):
                limit = min(plan.rooms[state.row], longest)
                if limit > 0:
                    asks.setdefault(drafter, []).append(plan.ask(state, limit))
        offered: dict[int, list[tuple[Offer, Draft]]] = {}
        for drafter, wanted in asks.items():
            for ask, draft in zip(wanted, self.chain.ask_all(drafter, wanted, plan), strict=True):
                if draft.length:
                    offer = _offer(drafter.name, draft)
                    if draft.scores is not None and self.chain.state(ask.row).rejects:
                        # later confidences depend on tokens drawn before them, which must have no say in what is verified
                        offer = offer._replace(confidences=None)
                    offered.setdefault(ask.row, []).append((offer, draft))
                    self._rows[ask.row].waiting.append(PendingDraft(offer=offer, tokens=_tokens(draft)))
        return offered

    def _is_taken(self, states: Sequence[ChainRow], rows: Sequence[AutoRow], offered: Offered) -> bool:
        """Whether one of these offers is expected to gain."""
        if not offered:
            return False
        offers = [[o for o, _ in offered.get(s.row, ())] for s in states]
        return self.control.takes_any([r.control for r in rows], offers)

    def _pick(self, plan: RoundPlan, rows: Sequence[AutoRow], offered: Offered) -> list[Picked]:
        """Choose between what lookups offer and what models are expected to gain."""
        self._settle()
        states, given = plan.rows, [offered.get(s.row, ()) for s in plan.rows]
        models: list[dict[str, tuple[int, int]]] = [{} for _ in states]
        controls = [r.control for r in rows]
        for state, row, found in zip(states, rows, models, strict=True):
            row.control.bucket = bucket(len(plan.histories[state.row]))
            for name, queued in row.queued.items():
                drafter = self.chain.drafters[name]
                limit = min(plan.rooms[state.row], self.chain.limit(drafter, state))
                if limit < 1 or name in state.ended:
                    continue
                if self._may_catch_up(state, drafter, queued, controls):
                    found[name] = limit, queued
        choices = self.control.choose(controls, [[o for o, _ in row] for row in given], models)
        return [_picked(c, offers) for c, offers in zip(choices, given, strict=True)]

    def _may_catch_up(
        self, state: ChainRow, drafter: Drafter, queued: int, rows: Sequence[PolicyRow]
    ) -> bool:
        """Whether the rows' account could ever pay for running what a drafter has not run. If not, it is closed for the row before it has
        to run so much by itself."""
        if queued < ASLEEP or self.control.can_catch_up(rows, drafter.name, queued):
            return True
        self.chain.dismiss(drafter, state)
        return False

    def _ask_models(self, plan: RoundPlan, rows: Sequence[AutoRow], picked: Sequence[Picked]) -> None:
        """Drafts of the models that were chosen, into `picked`."""
        for name in dict.fromkeys(p.choice.model for p in picked if p.choice.model is not None):
            places = [i for i, p in enumerate(picked) if p.choice.model == name]
            asks = [plan.ask(plan.rows[i], picked[i].choice.depth) for i in places]
            depth, queued = max(a.limit for a in asks), sum(rows[i].queued[name] for i in places)
            drafter = self.chain.drafters[name]
            if isinstance(drafter, ModelDrafter):
                drafter.is_warm = True
            started = time.perf_counter()
            drafts = self.chain.ask_all(drafter, asks, plan)
            seconds = time.perf_counter() - started
            shape = name, depth > 1, len(asks)
            is_warm = getattr(drafter, "is_warm", True) and shape in self._seen
            self._seen.add(shape)
            self._asked.append(
                _Asked(
                    name=name,
                    depth=depth,
                    queued=queued,
                    num_rows=len(asks),
                    seconds=seconds,
                    is_warm=is_warm,
                    has_run=any(d.length for d in drafts),
                )
            )
            for i, draft in zip(places, drafts, strict=True):
                row, pick, offer = rows[i], picked[i], _offer(name, draft)
                row.queued[name] = 0
                self.control.drafted(row.control, offer, len(rows), pick.choice)
                if draft.length:
                    pick.draft, pick.offer = draft, offer
                    row.waiting.append(
                        PendingDraft(offer=offer, tokens=_tokens(draft), lasts=pick.choice.probe)
                    )

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
        """A round was read. Plain rounds that run ahead are all alike, so several of them are told at once. Rounds that compile say nothing
        of what a width costs. The plain round behind drafts cannot run ahead: what it takes longer is a cost of those drafts."""
        rows = [self._rows[s.row] for s in states if s.row in self._rows]
        is_plain = num_tokens == num_rows
        if ahead and is_plain and is_warm:
            self._rest(rows, num_rows, seconds)
            return
        self._settle()
        drafting, compiling = self._drafting, self._learn_drafts()
        decision, self._decision, self._drafting = self._decision, None, 0.0
        rows = [r for r in rows if r.emitted]
        if not rows:
            return
        controls = [r.control for r in rows]
        curve, spent = self.control.curve(controls, num_rows), seconds - drafting
        if not is_warm:
            spent = min(spent, curve.seconds(num_tokens))
        elif not is_plain or min(r.calm for r in rows) > CALM:
            curve.refine(num_tokens, spent)
        elif not ahead and rows[0].calm == CALM:
            usual = curve.seconds(num_rows)
            self.control.paused(controls, num_rows, max(0.0, min(spent - usual, usual)))
        self._tell(rows, num_rows, spent + drafting - compiling, 1, decision)

    def _rest(self, rows: list[AutoRow], num_rows: int, seconds: float) -> None:
        """A plain round that ran ahead was read."""
        if rows != self._resting or num_rows != self._num_rows:
            self._settle()
            self._resting, self._num_rows = rows, num_rows
        for row in rows:
            row.rested += row.emitted
            row.emitted = 0
        self._num_rounds += 1
        self._seconds += seconds
        if self._num_rounds >= _TOLD_TOGETHER:
            self._settle()

    def _settle(self) -> None:
        """Tell the controller of rounds at rest; comes before it decides anything."""
        if not self._num_rounds:
            return
        rows, num_rounds, seconds = [r for r in self._resting if r.rested], self._num_rounds, self._seconds
        self._resting, self._num_rounds, self._seconds = [], 0, 0.0
        if rows:
            curve = self.control.curve([r.control for r in rows], self._num_rows)
            curve.refine(self._num_rows, seconds / num_rounds, num_rounds)
            self._tell(rows, self._num_rows, seconds, num_rounds, None)

    def _tell(
        self,
        rows: Sequence[AutoRow],
        num_rows: int,
        seconds: float,
        num_rounds: int,
        decision: Decision | None,
    ) -> None:
        parts = [(r.control, r.rested + r.emitted, r.used_lookup and decision is not None) for r in rows]
        plain = self.control.curve([r.control for r in rows], num_rows).seconds(num_rows)
        self.control.spent(parts, num_rows, seconds, num_rounds, decision)
        for row, (_, num_tokens, _) in zip(rows, parts, strict=True):
            row.plain = row.plain[0] + num_tokens, row.plain[1] + num_tokens * plain
            row.emitted = row.rested = 0

    def _learn_drafts(self) -> float:
        """What models' drafts took; returns seconds in which they compiled."""
        compiling, costs = 0.0, self.control.costs
        asked, self._asked = self._asked, []
        for call in asked:
            if not call.is_warm:
                expected = costs.draft(call.name).seconds(call.depth, call.queued, call.num_rows)
                compiling += max(0.0, call.seconds - expected)
            elif call.has_run:
                costs.refine_draft(call.name, call.depth, call.queued, call.num_rows, call.seconds)
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
            replace(a, seconds=s, is_warm=warm) for a, (s, warm) in zip(self._asked, asked, strict=True)
        ]


def _picked(choice: Choice, offers: Sequence[tuple[Offer, Draft]]) -> Picked:
    if choice.offer is None:
        return Picked(choice=choice)
    offer, draft = offers[choice.offer]
    return Picked(choice=choice, offer=offer, draft=draft)


def _is_drawn(pick: Picked) -> bool:
    """Whether its tokens were drawn, by a model or a drafter of one's own. What a lookup says follows from the text."""
    return pick.draft is not None and (pick.choice.model is not None or pick.draft.scores is not None)


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


def _line(row: int, place: int, pick: Picked, width: int) -> str:
    """`row 0 at 153: mtp drafts 3, verifies 2 (worth 0.41 tokens)`"""
    choice, offer = pick.choice, pick.offer
    if offer is None:
        return f"row {row} at {place}: plain"
    if choice.probe:
        return f"row {row} at {place}: {offer.drafter} shows {offer.length}, verifies {width}"
    return f"row {row} at {place}: {offer.drafter} drafts {offer.length}, verifies {width} (worth {choice.gain:.2f} tokens)"
