"""Chooses each round who drafts and how much of it is verified, so that expected tokens a second are most; plain decoding always
competes.

A round asks three questions. `choose`: given what lookup offers (it costs next to nothing) and what model drafters promise, who drafts
for each row? `trim`: now that drafts and their confidences are there, how many tokens of each are worth verifying together? `learn`:
the text has come, what of it had been drafted? Drafts that lost, were trimmed, or were only made to look (probes) teach like verified
ones; a verify is never paid to learn.

All values are in tokens. A row's share of a plain round costs `share` seconds and gives one token; a round of value v gives v tokens
more than the same time spent at the row's going rate. Knows costs and estimates as numbers; knows no tokens, no arrays, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mlxspec.policy.cost import MAX_TOKENS, CostModel, Curve
from mlxspec.policy.estimate import Calibration, RowEstimate
from mlxspec.policy.row import FIRST_GAP, Bursts, Promise, RowControl
from mlxspec.policy.widths import (
    DEPTHS,
    PRUDENCE,
    SHARED_DEPTHS,
    best_at,
    best_ratio,
    best_steps,
    pays_in_turn,
    steps_of,
    within_stake,
)

MARGIN = 0.02  # tokens a round must promise to gain before plain decoding is left
CURIOSITY = 0.8  # tokens that a drafter nobody has asked yet may promise below 0 and still be tried
PROBE_DEPTH = 3  # where drafting is cheap; else what this part of a plain step pays for, at least one token
PROBE_SHARE = 0.6
CREDIT, ALLOWANCE = 1.5, 0.005  # looks may cost so many plain steps, and this part of a row's time besides
LOOK_TOKENS = 4  # or what so many drafted tokens cost, where drafting is dear
# plain steps that a model's drafts may have lost a row lately before they rest; of several rows, a row's share of a step
MODEL_STAKE, SHARED_MODEL_STAKE = 3.0, 4.5
_OLD = 2.0  # drafts that what is known of a drafter counts for once it has rested
_FIRST_GUESS = 0.75  # chance of a drafted token before a drafter was ever seen


class Offer(NamedTuple):
    """A draft somebody made: how many tokens, and how sure of each, if known. backing: how many tokens before it the same place would have
    said right, if known."""

    drafter: str
    length: int
    confidences: Sequence[float] | None = None
    backing: int | None = None


class Choice(NamedTuple):
    """Who drafts for a row. offer: index of the lookup offer taken; model: the model drafter asked for `depth` tokens; a `probe`
    is asked to look at it, not because it promises anything. value: tokens it promises beyond plain decoding, below 0 where it is
    tried."""

    offer: int | None = None
    model: str | None = None
    depth: int = 0
    probe: bool = False
    value: float = 0.0


PLAIN = Choice()


class Controller:
    """One for an engine; what it learns survives its rows. max_depth: longest draft ever asked of a model."""

    def __init__(self, costs: CostModel, *, max_depth: int = 8) -> None:
        self.costs, self.max_depth = costs, max_depth
        self.pause = 0.0  # seconds a plain round takes longer where it could not run ahead, as behind a look
        self._calibrations: dict[tuple[str, str, int], Calibration] = {}
        self._promises: dict[tuple[str, str, int], Promise] = {}
        self._rates: dict[tuple[str, int], float] = {}
        self._bursts: dict[tuple[str, int], Bursts] = {}

    def open(self, kind: str, context_bucket: int) -> RowControl:
        """A new row. kind: rows whose drafts fare alike, such as greedy ones; knowledge is shared within a kind and context bucket."""
        key = kind, context_bucket
        lookups = self._bursts[key].copy() if key in self._bursts else Bursts()
        return RowControl(kind, context_bucket, self._rates.get(key, 0.0), lookups)

    def close(self, row: RowControl) -> None:
        """The row has ended: what its drafters promised it is where the next row of its kind begins."""
        for name, promise in row.promises.items():
            promise.end(is_promising=row.best(name, self.max_depth, row.rate)[0] > MARGIN)
            self._promises[row.kind, name, row.bucket] = promise.copy()
        self._rates[row.kind, row.bucket] = row.rate
        self._bursts[row.kind, row.bucket] = row.lookups

    def move(self, row: RowControl, context_bucket: int) -> None:
        """The row has grown into another bucket: what is known there counts from now on."""
        if context_bucket != row.bucket:
            self.close(row)
            row.bucket = context_bucket
            row.estimates.clear()
            row.promises.clear()

    def promises(self, row: RowControl, name: str) -> bool:
        """Whether a model drafter is expected to draft for a row that decodes alone."""
        curve = self.costs.curve(row.bucket)
        rate = max(row.rate, 1.0 / curve.seconds(1))
        self._promise(row, name, curve, 1)
        return row.best(name, self.max_depth, rate)[0] > MARGIN

    # --- before drafting

    def choose(
        self,
        rows: Sequence[RowControl],
        offers: Sequence[Sequence[Offer]],
        models: Sequence[Mapping[str, tuple[int, int]]],
    ) -> list[Choice]:
        """One choice a row. models: by drafter, how many tokens it may draft and how many known ones it has to catch up on."""
        curve, num_rows = self.curve(rows), len(rows)
        choices: list[Choice] = []
        looking = False  # one row's look holds up all others, so they take turns
        for row, given, asked in zip(rows, offers, models, strict=True):
            choice = self._choose(row, given, asked, curve, num_rows)
            if choice.offer is None and not looking:
                look = self._look(row, asked, curve, rows, choice.model)
                choice, looking = look or choice, look is not None
            choices.append(choice)
        return choices

    def curve(self, rows: Sequence[RowControl]) -> Curve:
        """The curve of so many rows, the longest of which decides what attention costs."""
        return self.costs.curve(max(r.bucket for r in rows), len(rows))

    def _choose(
        self,
        row: RowControl,
        offers: Sequence[Offer],
        models: Mapping[str, tuple[int, int]],
        curve: Curve,
        num_rows: int,
    ) -> Choice:
        rate = max(row.rate, num_rows / curve.seconds(num_rows))
        best = PLAIN
        for i, offer in enumerate(offers):
            gained = self._gained(row, offer, curve, num_rows)
            if gained > max(best.value, MARGIN):
                best = Choice(offer=i, value=gained)
        for name, (limit, queued) in models.items():
            self._promise(row, name, curve, num_rows)
            value, depth = row.best(name, min(limit, self.max_depth, self._deepest(num_rows)), rate)
            value -= rate * self.costs.draft(name).queued * max(0, queued - 2) / row.lookups.horizon()
            stake = MODEL_STAKE if num_rows == 1 else SHARED_MODEL_STAKE
            may_lose = row.promises[name].won >= -stake * curve.seconds(num_rows) / num_rows
            # several rows do not bring back what promises too little: one row's try holds up all
            row.promises[name].let(draft=may_lose and (value > MARGIN or num_rows > 1))
            if not depth or not may_lose:
                continue
            if value > max(best.value, MARGIN) or (
                best is PLAIN and num_rows == 1 and self._may_try(row, name, value, rate)
            ):
                best = Choice(model=name, depth=depth, value=value)
        return best

    def _may_try(self, row: RowControl, name: str, value: float, rate: float) -> bool:
        """Whether a drafter that promises less than nothing drafts all the same: what it is worth is the less known the fewer drafts it
        rests on, and once it stops, catching up makes each further look dearer. Paid from the credit of a row."""
        if value < -CURIOSITY / math.sqrt(1.0 + row.promises[name].count):
            return False
        spent = sum(p.spent for p in row.promises.values())
        hope = max(p.hope for p in row.promises.values())
        return spent + (MARGIN - value) / rate <= hope * CREDIT * self.costs.curve(row.bucket).seconds(1)

    def takes_any(self, rows: Sequence[RowControl], offers: Sequence[Sequence[Offer]]) -> bool:
        """Whether a lookup's offer pays for one of rows that decode together, whatever models promise."""
        curve, num_rows = self.curve(rows), len(rows)
        return any(
            self._gained(row, offer, curve, num_rows) > MARGIN
            for row, given in zip(rows, offers, strict=True)
            for offer in given
        )

    def _gained(self, row: RowControl, offer: Offer, curve: Curve, num_rows: int) -> float:
        """Tokens that a lookup's offer is worth where it is cut best, 0 where it does not pay."""
        rate = max(row.rate, num_rows / curve.seconds(num_rows))
        reaches = self.estimate(row, offer.drafter).reaches(offer.length, offer.confidences, offer.backing)
        reaches = within_stake(row, reaches, curve, num_rows)
        if num_rows > 1:
            return best_steps(steps_of(reaches), curve, num_rows, rate)[1]
        depth = best_ratio(reaches, curve)
        stake = curve.seconds(1 + depth) - curve.seconds(1)
        return sum(reaches[:depth]) - PRUDENCE * rate * stake if depth else 0.0

    @staticmethod
    def _deepest(num_rows: int) -> int:
        """The longest draft asked of a model."""
        return MAX_TOKENS if num_rows == 1 else SHARED_DEPTHS[0]

    def _look(
        self,
        row: RowControl,
        models: Mapping[str, tuple[int, int]],
        curve: Curve,
        rows: Sequence[RowControl],
        winner: str | None,
    ) -> Choice | None:
        """Now and then a drafter that does not draft shows what it would have said: in a plain round just so, else in place of the
        winner."""
        due = [
            n
            for n, (limit, _) in models.items()
            if limit
            and n != winner
            and row.promises[n].rest >= row.promises[n].gap * (1 if winner is None else 4)
        ]
        for name in sorted(due, key=lambda n: -row.promises[n].rest):
            limit, queued = models[name]
            depth = min(self._probe_depth(name, curve.seconds(len(rows)) / len(rows)), limit)
            price = self.costs.draft(name).seconds(depth, queued)
            price += self.pause * (len(rows) - 1) / len(rows)  # what it holds up the others
            if self.can_afford(rows, price):
                return Choice(model=name, depth=depth, probe=winner is None)
        return None

    def _probe_depth(self, name: str, share: float) -> int:
        step = self.costs.draft(name).step
        return PROBE_DEPTH if step * 2 * PROBE_DEPTH <= share else max(1, int(PROBE_SHARE * share / step))

    def can_afford(self, rows: Sequence[RowControl], price: float) -> bool:
        """Whether rows that decode together may pay so many seconds for a look at a drafter. Only a row alone has credit: what one looks
        holds up all, and short answers of several rows would never earn it back."""
        allowed = sum(ALLOWANCE * r.seconds - sum(p.spent for p in r.promises.values()) for r in rows)
        if len(rows) == 1:
            share = self.curve(rows).seconds(1)
            credits = (
                p.hope * max(CREDIT * share, LOOK_TOKENS * self.costs.draft(n).step)
                for n, p in rows[0].promises.items()
            )
            allowed += max(credits, default=CREDIT * share)  # nobody has been weighed yet
        return price <= allowed

    # --- with drafts at hand

    def trim(
        self,
        rows: Sequence[RowControl],
        drafts: Sequence[Offer | None],
        *,
        lookahead: Sequence[bool] | None = None,
    ) -> list[int]:
        """How many tokens of each row's draft to verify, so that the round as a whole pays most.

        lookahead False: the decision on a token must not depend on those behind it, as acceptance by rejection demands; that row's
        draft ends where a single token does not pay.
        """
        curve, num_rows = self.curve(rows), len(rows)
        reaches = [
            [] if d is None else self.estimate(r, d.drafter).reaches(d.length, d.confidences, d.backing)
            for r, d in zip(rows, drafts, strict=True)
        ]
        rate = max(num_rows / curve.seconds(num_rows), *(r.rate for r in rows))
        looked = [d is not None and d.drafter not in r.promises for r, d in zip(rows, drafts, strict=True)]
        reaches = [
            within_stake(row, reach, curve, num_rows) if by_lookup else reach
            for row, reach, by_lookup in zip(rows, reaches, looked, strict=True)
        ]
        widths = [0] * num_rows
        for i, (may, draft) in enumerate(zip(lookahead or (), drafts, strict=False)):
            if not may and draft is not None:
                widths[i] = pays_in_turn(reaches[i], draft.length, curve, num_rows, rate)
                reaches[i] = []
        if num_rows == 1:
            if not widths[0]:
                widths[0] = best_ratio(reaches[0], curve) if looked[0] else best_at(reaches[0], curve, rate)
            rows[0].risked += curve.seconds(1 + widths[0]) - curve.seconds(1)
            return widths
        steps = sorted(
            ((gain, tokens, i) for i, row in enumerate(reaches) for gain, tokens in steps_of(row)),
            key=lambda step: -step[0] / step[1],
        )
        parts = [(gain, tokens) for gain, tokens, _ in steps]
        for _, tokens, i in steps[: best_steps(parts, curve, num_rows, None if any(looked) else rate)[0]]:
            widths[i] += tokens
        longer = curve.seconds(num_rows + sum(widths)) - curve.seconds(num_rows)
        for row, width in zip(rows, widths, strict=True):
            row.risked += longer * width / max(1, sum(widths))
        return widths

    def drafted(self, row: RowControl, draft: Offer, num_rows: int, *, probe_seconds: float = 0.0) -> None:
        """A model drafter has drafted for a row: what that draft is worth, cut at its best place, at every depth limit.

        probe_seconds: what it took, if it was asked to look at it.
        """
        curve, name = self.costs.curve(row.bucket, num_rows), draft.drafter
        plain = curve.seconds(num_rows)
        rate = max(row.rate, num_rows / plain)
        promise = self._promise(row, name, curve, num_rows)
        reaches = self.estimate(row, name).reaches(draft.length, draft.confidences, draft.backing)
        price = self.costs.draft(name).seconds(draft.length, 2 * num_rows, num_rows) / num_rows
        if probe_seconds:  # what was known is old
            promise.count = min(promise.count, _OLD)
            promise.spent += probe_seconds + self.pause * (num_rows - 1) / num_rows
        else:
            promise.spent += max(0.0, MARGIN - row.best(name, self.max_depth, rate)[0]) / rate
        if num_rows == 1 or not probe_seconds:
            row.drafting, row.is_look, row.share = name, probe_seconds > 0.0, plain / num_rows
            row.risked = 0.0 if row.is_look else price
        promise.follow(*self._values(row, name, reaches, curve, num_rows))
        others = (row.best(n, self.max_depth, rate)[0] for n in row.promises if n != name)
        if row.best(name, self.max_depth, rate)[0] > max(MARGIN, *others, MARGIN):
            promise.gap = max(FIRST_GAP, promise.gap // 2)
        else:
            depth = self._probe_depth(name, plain / num_rows)
            look = self.costs.draft(name).seconds(depth, num_rows, num_rows)
            promise.gap = max(FIRST_GAP, min(promise.gap * 2, int(look / (ALLOWANCE * plain))))
        promise.rest = 0

    # --- when the text has come

    def learn(self, row: RowControl, offer: Offer, matched: int, known: int) -> None:
        """Of a draft the first `matched` tokens are what came; `known` tokens came. Verified or not makes no difference."""
        self.estimate(row, offer.drafter).learn(
            offer.length, offer.confidences, matched, known, offer.backing
        )

    def spent(
        self, row: RowControl, num_tokens: int, seconds: float, *, looked_up: bool, num_rounds: int = 1
    ) -> None:
        """A row's share of so many rounds took `seconds` and gave `num_tokens`. looked_up: through lookup, which comes in bursts and is
        left out of the going rate."""
        saved = (num_tokens - 1) * row.share - row.risked
        for name, promise in row.promises.items():
            is_its = name == row.drafting
            if is_its and row.is_look:  # what was verified of it pays a part back
                promise.spent -= saved
            promise.went_on(num_tokens, saved if is_its and not row.is_look else None)
        row.drafting, row.risked = None, 0.0
        row.lookups.follow(num_tokens, seconds, looked_up=looked_up, num_rounds=num_rounds)
        if not looked_up and seconds > 0:
            row.follow(num_tokens, seconds, num_rounds)
        row.seconds += seconds

    def estimate(self, row: RowControl, name: str) -> RowEstimate:
        found = row.estimates.get(name)
        if found is None:
            key = (row.kind, name, row.bucket)
            shared = self._calibrations.get(key)
            if shared is None:
                shared = self._calibrations[key] = Calibration()
            found = row.estimates[name] = RowEstimate(shared)
        return found

    def _promise(self, row: RowControl, name: str, curve: Curve, num_rows: int) -> Promise:
        found = row.promises.get(name)
        if found is None:
            kept = self._promises.get((row.kind, name, row.bucket))
            if kept is None:
                guess = [_FIRST_GUESS ** (i + 1) for i in range(self.max_depth)]
                kept = Promise(*self._values(row, name, guess, curve, num_rows))
            found = row.promises[name] = kept.copy()
        return found

    def _values(
        self, row: RowControl, name: str, reaches: Sequence[float], curve: Curve, num_rows: int
    ) -> tuple[list[float], list[float]]:
        """Tokens a draft gains and seconds it takes, by depth limit, cut where it is worth most. Depths the draft did not reach
        inherit the chance of its last token."""
        shape, plain = curve.shape, curve.seconds(num_rows)
        rate = max(row.rate, num_rows / plain)
        cost = self.costs.draft(name)
        wider = PRUDENCE * curve.scale
        step = (cost.seconds(1, 0, num_rows) - cost.seconds(0, 0, num_rows)) / num_rows
        drafting = cost.seconds(0, 2 * num_rows, num_rows) / num_rows
        sum_reaches, best, reached, chance = 0.0, 0.0, 1.0, 0.0
        gain, verify = 0.0, 0.0
        gained, taken = [], []
        for i in range(self.max_depth):
            if i < len(reaches):
                chance = reaches[i] / reached if reached > 0 else 0.0
                reached = reaches[i]
            else:
                reached *= chance
            sum_reaches += reached
            extra = wider * (shape[num_rows + i + 1] - shape[num_rows])
            if i + 1 in DEPTHS and sum_reaches - rate * extra > best:
                best, gain, verify = sum_reaches - rate * extra, sum_reaches, extra
            drafting += step
            gained.append(gain)
            taken.append(verify + drafting)
        return gained, taken
