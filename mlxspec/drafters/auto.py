"""Drafting as the controller chooses: asks lookups, asks a model where that promises to pay, cuts, and tells the controller what came
of it.

The controller thinks in numbers; here are the drafters, tokens and rows those numbers stand for. Every offer is compared with the text
that comes, whoever drafted it. While nothing promises to pay the rows are at rest: plain rounds may then run ahead of the host, and
only lookups are asked in passing. Rows that do not follow the controller are left out of its sums. Knows no target model and no clock but
that of drafting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxspec.drafters.base import Ask, Draft, Drafter
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.speculation.controller import PLAIN, Choice, Controller, Offer
from mlxspec.speculation.cost import Curve, bucket
from mlxspec.speculation.row import RowControl
from mlxspec.speculation.verify import DraftOutline, ForMatch, Limits, Submission, submit_for_rejection

if TYPE_CHECKING:
    from mlxspec.drafters.chain import Chain, ChainRow

CALM = 1  # plain rounds in a row before rounds run ahead
ASLEEP = (
    448  # tokens a model drafter waits for at most where it is not worth looking at: then it ends for the row
)
_PRIMED_ANYWAY = 8
_PAUSE_FOLLOW = 0.1

_LITTLE = 64  # tokens
_CATCH_UP = 512  # tokens a model drafter runs by itself


@dataclass(kw_only=True)
class _Said:
    """A draft waiting for its text. lasts: whether it is compared over several rounds, as probes are; others are judged by one."""

    offer: Offer
    tokens: list[int]
    lasts: bool = False
    heard: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class _AutoRow:
    """queued: tokens each model drafter has not run. calm: plain rounds in a row. emitted: tokens of the round just read. plain:
    tokens so far, and the seconds they would have taken in plain rounds."""

    control: RowControl
    said: list[_Said] = field(default_factory=list)
    queued: dict[str, int] = field(default_factory=dict)
    calm: int = 0
    emitted: int = 0
    looked_up: bool = False
    plain: tuple[int, float] = (0, 0.0)


@dataclass(kw_only=True)
class _Picked:
    """What a row's draft of this round is, before it is cut to what pays."""

    choice: Choice = PLAIN
    draft: Draft | None = None
    offer: Offer | None = None


class Auto:
    """Drafts for the rows of a chain whose policy is auto. log: gets a line a row and round, if set."""

    def __init__(self, chain: Chain, control: Controller) -> None:
        self._chain, self.control = chain, control
        self.log: Callable[[str], None] | None = None
        self._rows: dict[int, _AutoRow] = {}
        self._drafting = 0.0  # seconds of this round so far
        self._after: tuple[Curve, int, float, int] | None = (
            None  # the last round, if it verified drafts: see `took`
        )
        self._seen: set[tuple[object, ...]] = set()  # shapes that have run: the first run of a shape compiles

    def begin(self, state: ChainRow) -> None:
        kind = "greedy" if state.sampler.is_greedy else "rejected" if state.rejects else "sampled"
        models = [d.name for d in self._chain.drafters_of(state) if isinstance(d, ModelDrafter)]
        self._rows[state.row] = _AutoRow(control=self.control.open(kind, 0), queued=dict.fromkeys(models, 0))

    def primes(self, state: ChainRow, drafter: Drafter) -> bool:
        """Whether a drafter catches up on the prompt before the answer begins: where it promises to draft, and every eighth row anyway,
        for else nobody would find out that it had become worth it."""
        row = self._rows[state.row]
        queued = row.queued.get(drafter.name, 0)
        if queued > 1 and (
            state.row % _PRIMED_ANYWAY == 0 or self.control.promises(row.control, drafter.name)
        ):
            row.queued[drafter.name] = 1
            return True
        return False

    def plain_seconds(self, row: int) -> float | None:
        """What a token of a row would have taken in plain rounds, its fellow rows beside it; None before the first round."""
        tokens, seconds = self._rows[row].plain if row in self._rows else (0, 0.0)
        return seconds / tokens if tokens else None

    def keeps(self, state: ChainRow, drafter: Drafter) -> bool:
        """Whether a drafter runs what it has queued so that its state can be kept: where that is little, or it promises to draft."""
        row = self._rows[state.row]
        queued = row.queued.get(drafter.name, 0)
        if queued > _LITTLE and not self.control.promises(row.control, drafter.name):
            return False
        if queued:
            row.queued[drafter.name] = 0
        return True

    def resumes(self, state: ChainRow, drafter: Drafter, num_tokens: int) -> bool:
        """Whether a drafter goes on behind a beginning that the prefix store had: not where it would first have to run many tokens
        of it and does not promise to draft, for the answer is to begin at once. It is done with this row then."""
        row = self._rows[state.row]
        if drafter.name not in row.queued:
            return True
        if num_tokens <= _CATCH_UP:
            row.queued[drafter.name] = num_tokens
            return True
        row.queued[drafter.name] = 1  # it runs them at once
        if state.row % _PRIMED_ANYWAY == 0 or self.control.promises(row.control, drafter.name):
            return True
        state.ended.add(drafter.name)
        drafter.close(state.row)
        return False

    def close(self, row: int) -> None:
        found = self._rows.pop(row, None)
        if found is not None:
            self.control.close(found.control)

    def truncate(self, row: int) -> None:
        """The text was cut: drafts waiting for it have lost their place."""
        self._rows[row].said.clear()

    def observe(self, row: int, tokens: Sequence[int]) -> None:
        """The text goes on: drafts that waited for it are judged."""
        found = self._rows[row]
        found.emitted = len(tokens)
        for name in found.queued:
            waiting = found.queued[name] + len(tokens)
            found.queued[name] = waiting if waiting <= _CATCH_UP else 1
        for said in found.said:
            said.heard += tokens[: len(said.tokens) - len(said.heard)]
        staying = []
        for said in found.said:
            same = _same(said.tokens, said.heard)
            if said.lasts and same == len(said.heard) < len(said.tokens):
                staying.append(said)
            else:
                # the draft may be shorter than the text: all of it is known then
                self.control.learn(found.control, said.offer, same, len(said.heard))
        found.said = staying

    def propose(
        self,
        states: Sequence[ChainRow],
        rooms: Mapping[int, int],
        histories: Mapping[int, Sequence[int]],
        vocab_size: int,
    ) -> dict[int, tuple[str, Draft, Submission]]:
        """What each row submits to the round. Rows that submit nothing are absent. rooms: how many tokens each may."""
        started = time.perf_counter()
        rows = [self._rows[s.row] for s in states]
        picked = self._pick(states, rows, rooms, histories, vocab_size)
        self._ask_models(states, rows, picked, histories, vocab_size)
        offers = [None if p.choice.probe else p.offer for p in picked]
        lookahead = [not s.rejects or p.choice.model is None for s, p in zip(states, picked, strict=True)]
        widths = self.control.trim([r.control for r in rows], offers, lookahead=lookahead)
        out = {}
        for state, row, pick, width in zip(states, rows, picked, widths, strict=True):
            row.calm = 0 if width or pick.choice.model is not None else row.calm + 1
            row.looked_up = pick.choice.offer is not None
            if state.rejects and pick.draft is not None and pick.choice.model is not None:
                self._forget_behind(row, pick, width)
            if width and pick.draft is not None and pick.offer is not None:
                out[state.row] = (
                    pick.offer.drafter,
                    pick.draft.cut(width),
                    _submission(state, pick.offer, width),
                )
            if self.log is not None:
                self.log(_line(state.row, len(histories[state.row]), pick, width))
        self._drafting = time.perf_counter() - started
        return out

    def rests(
        self,
        states: Sequence[ChainRow],
        rooms: Mapping[int, int],
        histories: Mapping[int, Sequence[int]],
        vocab_size: int,
    ) -> bool:
        """Whether the next round may be launched as a plain one before this one is read."""
        rows = [self._rows[s.row] for s in states]
        if any(r.calm < CALM for r in rows):
            return False
        for row in rows:  # what they were asked for this round is asked anew, of the same text
            row.said = [s for s in row.said if s.lasts]
        picked = self._pick(states, rows, rooms, histories, vocab_size)
        if all(p.choice is PLAIN for p in picked):
            return True
        for row in rows:
            row.calm = 0
            row.said = [s for s in row.said if s.lasts]  # they are asked again when the round is launched
        return False

    def took(
        self, states: Sequence[ChainRow], num_rows: int, num_tokens: int, seconds: float, *, ahead: bool
    ) -> None:
        """A round was read: `num_tokens` verified for `num_rows` rows, in `seconds` with drafting and everything.

        Rows count that do not follow the controller, and those that had ended when it was launched ahead. ahead: it was launched
        before its turn, as plain rounds are when nothing else pays: what a plain round costs is what it costs then. The plain round
        behind drafts cannot run ahead and has to undo what did not stand: what it takes longer is a cost of those drafts.
        """
        drafting, self._drafting = self._drafting, 0.0
        rows = [self._rows[s.row] for s in states if s.row in self._rows]
        rows = [r for r in rows if r.emitted]
        if not rows:
            return
        curve = self.control.costs.curve(max(r.control.bucket for r in rows), num_rows)
        plain = num_tokens == num_rows
        spent, usual = seconds - drafting, curve.seconds(num_rows)
        if self._after is not None:
            earlier, width, took, width_rows = self._after
            longer = spent - usual if plain and not ahead and width_rows == num_rows else 0.0
            earlier.refine(width, took + max(0.0, min(longer, usual)))
            self._after = None
        elif plain and not ahead:
            held_up = max(0.0, min(spent - usual, usual))
            self.control.pause += _PAUSE_FOLLOW * (held_up - self.control.pause)
        is_new = self._is_new("verify", num_tokens, num_rows, ahead)
        if not plain and not is_new:
            self._after = curve, num_tokens, spent, num_rows
        elif not is_new and (ahead or min(r.calm for r in rows) > CALM):
            curve.refine(num_tokens, spent)
        for row in rows:
            self.control.spent(row.control, row.emitted, seconds / num_rows, looked_up=row.looked_up)
            tokens, expected = row.plain
            row.plain = tokens + row.emitted, expected + row.emitted * curve.seconds(num_rows)
            row.emitted = 0

    # --- a round's parts

    def _pick(
        self,
        states: Sequence[ChainRow],
        rows: Sequence[_AutoRow],
        rooms: Mapping[int, int],
        histories: Mapping[int, Sequence[int]],
        vocab_size: int,
    ) -> list[_Picked]:
        """Ask lookups and choose."""
        offered: list[list[tuple[Offer, Draft]]] = [[] for _ in states]
        models: list[dict[str, tuple[int, int]]] = [{} for _ in states]
        asks: dict[str, tuple[Drafter, list[tuple[int, Ask]]]] = {}
        for i, state in enumerate(states):
            self.control.move(rows[i].control, bucket(len(histories[state.row])))
            for drafter in self._chain.drafters_of(state):
                limit = min(rooms[state.row], self._chain.limit(drafter, state))
                if limit < 1:
                    continue
                if isinstance(drafter, ModelDrafter):
                    queued = rows[i].queued[drafter.name]
                    if not self._sleeps(state, drafter, queued, [r.control for r in rows]):
                        models[i][drafter.name] = (limit, queued)
                else:
                    ask = Ask(state.row, histories[state.row], limit, state.sampler)
                    asks.setdefault(drafter.name, (drafter, []))[1].append((i, ask))
        for name, (drafter, wanted) in asks.items():
            drafts = self._chain.ask_all(drafter, [a for _, a in wanted], vocab_size)
            for (i, _), draft in zip(wanted, drafts, strict=True):
                if draft.length:
                    offer = _offer(name, draft)
                    offered[i].append((offer, draft))
                    rows[i].said.append(_Said(offer=offer, tokens=_tokens(draft)))
        choices = self.control.choose(
            [r.control for r in rows], [[o for o, _ in row] for row in offered], models
        )
        return [
            _Picked(choice=c)
            if c.offer is None
            else _Picked(choice=c, offer=given[c.offer][0], draft=given[c.offer][1])
            for c, given in zip(choices, offered, strict=True)
        ]

    def _ask_models(
        self,
        states: Sequence[ChainRow],
        rows: Sequence[_AutoRow],
        picked: Sequence[_Picked],
        histories: Mapping[int, Sequence[int]],
        vocab_size: int,
    ) -> None:
        """Drafts of the models that were chosen, into `picked`."""
        for name in dict.fromkeys(p.choice.model for p in picked if p.choice.model is not None):
            places = [i for i, p in enumerate(picked) if p.choice.model == name]
            asks = [
                Ask(states[i].row, histories[states[i].row], picked[i].choice.depth, states[i].sampler)
                for i in places
            ]
            depth, queued = max(a.limit for a in asks), sum(rows[i].queued[name] for i in places)
            started = time.perf_counter()
            drafts = self._chain.ask_all(self._chain.drafters[name], asks, vocab_size)
            seconds = time.perf_counter() - started
            if not self._is_new(name, depth > 1, len(asks)):
                self.control.costs.refine_draft(name, depth, queued, len(asks), seconds)
            for i, draft in zip(places, drafts, strict=True):
                row, pick = rows[i], picked[i]
                row.queued[name] = 0
                offer = _offer(name, draft)
                probing = seconds / len(places) if pick.choice.probe else 0.0
                self.control.drafted(row.control, offer, len(rows), probe_seconds=probing)
                if draft.length:
                    pick.draft, pick.offer = draft, offer
                    row.said.append(_Said(offer=offer, tokens=_tokens(draft), lasts=pick.choice.probe))

    def _sleeps(
        self, state: ChainRow, drafter: ModelDrafter, queued: int, rows: Sequence[RowControl]
    ) -> bool:
        """A drafter that has not paid for so long that catching up costs more than a look is worth ends for the row: so far behind it
        would have to run what it missed by itself, and a plain row must not pay that."""
        if queued < ASLEEP:
            return False
        if self.control.can_afford(rows, self.control.costs.draft(drafter.name).seconds(1, queued)):
            return False
        state.end(drafter.name)
        drafter.close(state.row)
        return True

    def _forget_behind(self, row: _AutoRow, pick: _Picked, width: int) -> None:
        """By rejection more stands than equals the text: only what is verified tells how much."""
        last = row.said[-1] if row.said else None
        if last is not None and last.offer is pick.offer:
            row.said.pop()
            if width:
                sure = last.offer.confidences
                offer = Offer(last.offer.drafter, width, None if sure is None else sure[:width])
                row.said.append(_Said(offer=offer, tokens=last.tokens[:width]))

    def _is_new(self, *shape: object) -> bool:
        if shape in self._seen:
            return False
        self._seen.add(shape)
        return True


def _offer(name: str, draft: Draft) -> Offer:
    sure = draft.confidences
    return Offer(name, draft.length, sure if isinstance(sure, list) else None)


def _tokens(draft: Draft) -> list[int]:
    if not isinstance(draft.tokens, list):
        raise TypeError("these drafts are on the host")
    return draft.tokens


def _same(draft: Sequence[int], text: Sequence[int]) -> int:
    for i, (drafted, came) in enumerate(zip(draft, text, strict=False)):
        if drafted != came:
            return i
    return min(len(draft), len(text))


def _submission(state: ChainRow, offer: Offer, width: int) -> Submission:
    """`width` was found without looking at what is behind it where the row demands that."""
    if not state.rejects:
        return ForMatch(width)
    tops = None if offer.confidences is None else tuple(offer.confidences[:width])
    return submit_for_rejection(DraftOutline(length=width, tops=tops), Limits())


def _line(row: int, place: int, pick: _Picked, width: int) -> str:
    """`row 0 at 153: mtp drafts 3, verifies 2 (worth 0.41 tokens)`"""
    choice, offer = pick.choice, pick.offer
    if offer is None:
        return f"row {row} at {place}: plain"
    if choice.probe:
        return f"row {row} at {place}: plain, {offer.drafter} shows {offer.length}"
    return f"row {row} at {place}: {offer.drafter} drafts {offer.length}, verifies {width} (worth {choice.value:.2f} tokens)"
