"""Chooses for each round the drafter and the length of draft with the most expected tokens a second. Plain decoding is always a choice.

A round asks three questions. `choose`: given what lookup offers (it costs next to nothing) and what model drafters are expected to
gain, who drafts for each row? `trim`: now that drafts and their confidences are there, how many tokens of each are verified? `learn`:
the text has come, which of its tokens had been drafted?

Drafts that lost, were trimmed, or were only made to probe a drafter teach like verified
ones; a verify is never paid to learn.

Nothing is chosen that the rows' account (account.py) cannot pay at worst. Within that values are in tokens: a row's share of a plain round
costs `share` seconds and gives one token; a round of value v gives v tokens more than the same time spent at the row's going rate. Knows
costs and estimates as numbers; knows no tokens, no arrays, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mlxspec.policy.account import Account, balance
from mlxspec.policy.constants import Constants
from mlxspec.policy.cost import MAX_TOKENS, MODEL_DEPTH, CostModel, Curve, DraftCost
from mlxspec.policy.estimate import Calibration, RowEstimate
from mlxspec.policy.row import Bursts, Mood, Promise, RowControl
from mlxspec.policy.widths import (
    SHARED_DEPTHS,
    best_at,
    best_ratio,
    best_steps,
    careful,
    payable,
    pays_in_turn,
    steps_of,
)


class Offer(NamedTuple):
    """A draft somebody made: how many tokens, and how sure of each, if known. backing: how many tokens before it the same place would have
    said right, if known."""

    drafter: str
    length: int
    confidences: Sequence[float] | None = None
    backing: int | None = None


class Choice(NamedTuple):
    """Who drafts for a row. offer: index of the lookup offer taken; model: the model drafter asked for `depth` tokens; a `probe`
    is asked to look at it, not because it is expected to gain. value: tokens it is expected to gain beyond plain decoding. extra: seconds
    that a probe takes, or a drafter that is asked in place of a better one beyond what that one takes."""

    offer: int | None = None
    model: str | None = None
    depth: int = 0
    probe: bool = False
    value: float = 0.0
    extra: float = 0.0


PLAIN = Choice()


class _Call(NamedTuple):
    """One call of a model drafter for several rows: its longest draft, tokens to catch up on, rows."""

    depth: int = 0
    queued: int = 0
    num_rows: int = 0

    def with_row(self, depth: int, queued: int) -> _Call:
        return _Call(max(self.depth, depth), self.queued + queued, self.num_rows + 1)

    def seconds(self, cost: DraftCost) -> float:
        return cost.seconds(self.depth, self.queued, self.num_rows)


class Controller:
    """One for an engine; what it learns survives its rows. max_depth: longest draft ever asked of a model."""

    def __init__(
        self, costs: CostModel, *, max_depth: int = MODEL_DEPTH, constants: Constants | None = None
    ) -> None:
        self.costs, self.max_depth = costs, max_depth
        self.constants = constants or Constants()
        self.pause = 0.0  # seconds a plain round takes longer where it could not run ahead, as behind a probe
        self._drafting = 0.0  # seconds that the drafts chosen for this round take
        self._calibrations: dict[tuple[str, str, int], Calibration] = {}
        self._promises: dict[tuple[str, str, int], Promise] = {}
        self._rates: dict[tuple[str, int], float] = {}
        self._bursts: dict[tuple[str, int], Bursts] = {}
        self._hopes: dict[str, float] = {}  # by kind, the share of what is for probes that new rows may spend
        self._moods: dict[tuple[str, int], Mood] = {}

    def open(self, kind: str, context_bucket: int) -> RowControl:
        """A new row. kind: rows whose drafts fare alike, such as greedy ones; knowledge is shared within a kind and context bucket."""
        key = kind, context_bucket
        lookups = self._bursts[key].for_next_row() if key in self._bursts else Bursts(self.constants)
        account, hope = Account(self.constants), self._hopes.get(kind, 1.0)
        rate = self._rates.get(key, 0.0)
        return RowControl(kind, context_bucket, rate, lookups, account, hope, self._mood(*key))

    def close(self, row: RowControl) -> None:
        """The row has ended: what was learned in it is where the next row of its kind begins."""
        if any(self._leads(row, name, row.rate, 1) for name in row.promises):
            self._hopes[row.kind] = 1.0
        elif row.probed > 0.0:
            self._hopes[row.kind] = max(self.constants.hope, 0.5 * row.hope)
        self._keep(row)

    def move(self, row: RowControl, context_bucket: int) -> None:
        """The row has grown into another bucket: what is known there counts from now on."""
        if context_bucket != row.bucket:
            self._keep(row)
            row.bucket = context_bucket
            row.estimates.clear()
            row.promises.clear()
            row.mood = self._mood(row.kind, context_bucket)

    def _keep(self, row: RowControl) -> None:
        slowly = 1.0 - self.constants.fade / (2.0 * self.constants.spell)
        for name, promise in row.promises.items():
            key = row.kind, name, row.bucket
            self._promises[key] = promise.add_to(self._promises.get(key, promise), row.mood, slowly)
        self._moods[row.kind, row.bucket] = row.mood
        self._rates[row.kind, row.bucket] = row.rate
        self._bursts[row.kind, row.bucket] = row.lookups

    def _mood(self, kind: str, context_bucket: int) -> Mood:
        as_others = [1.0] * self.max_depth
        known = self._moods.get((kind, context_bucket))
        return Mood((as_others, as_others) if known is None else known.factors)

    def promises(self, row: RowControl, name: str) -> bool:
        """Whether a model drafter is expected to draft for a row that decodes alone."""
        curve = self.costs.curve(row.bucket)
        self._promise(row, name, curve, 1)
        rate = self._rate(row, curve, 1)
        return self._best(row, name, self.max_depth, rate, 1)[0] > self.constants.margin

    # --- before drafting

    def choose(
        self,
        rows: Sequence[RowControl],
        offers: Sequence[Sequence[Offer]],
        models: Sequence[Mapping[str, tuple[int, int]]],
    ) -> list[Choice]:
        """One choice a row. models: by drafter, how many tokens it may draft and how many known ones it has to catch up on."""
        curve, num_rows = self.curve(rows), len(rows)
        left = self._affords(rows, curve)
        self._drafting = 0.0
        choices: list[Choice] = []
        calls: dict[str, _Call] = {}
        probing = False  # one row's probe holds up all others, so they take turns
        for row, given, asked in zip(rows, offers, models, strict=True):
            choice = self._choose(row, given, asked, curve, num_rows, left, calls)
            if choice.offer is None and not probing:
                probe = self._probe(row, asked, curve, rows, left, choice)
                choice, probing = probe or choice, probe is not None
            if choice.model is not None:
                queued = asked[choice.model][1]
                price = self._price(choice.model, choice.depth, queued, calls)
                self._drafting += price
                left -= price if choice.probe else price + self._wider(curve, num_rows, choice.depth)
                calls[choice.model] = calls.get(choice.model, _Call()).with_row(choice.depth, queued)
            choices.append(choice)
        return choices

    def curve(self, rows: Sequence[RowControl], num_rows: int | None = None) -> Curve:
        """The curve of rounds of so many rows, these alone if not said otherwise. The longest of these decides what attention costs."""
        return self.costs.curve(max(r.bucket for r in rows), num_rows or len(rows))

    @staticmethod
    def _rate(row: RowControl, curve: Curve, num_rows: int) -> float:
        """Tokens a second that the row gets without the draft in question: at least those of plain decoding."""
        return max(row.rate, num_rows / curve.seconds(num_rows))

    def _best(self, row: RowControl, name: str, limit: int, rate: float, num_rows: int) -> tuple[float, int]:
        """Tokens that a draft of up to `limit` tokens by a model drafter is expected to gain, and its length."""
        cost = self.costs.draft(name)
        call = cost.seconds(0, 2 * num_rows, num_rows) / num_rows
        step = (cost.seconds(1, 0, num_rows) - cost.seconds(0, 0, num_rows)) / num_rows
        return row.promises[name].best(limit, rate, row.lookups.worth(limit, rate), row.mood, (call, step))

    def _leads(self, row: RowControl, name: str, rate: float, num_rows: int) -> bool:
        """Whether a model drafter is expected to gain more for a row than plain decoding and than others that run a model."""
        best = {n: self._best(row, n, self.max_depth, rate, num_rows)[0] for n in row.promises}
        return best[name] > self.constants.margin and best[name] >= max(best.values())

    def _affords(self, rows: Sequence[RowControl], curve: Curve) -> float:
        """Seconds that a round of these rows may take at worst beyond a plain one."""
        return balance([r.account for r in rows]) * curve.seconds(len(rows))

    def _price(self, name: str, depth: int, queued: int, calls: Mapping[str, _Call]) -> float:
        """Seconds that a draft for one more row takes, beside those that are chosen."""
        cost, call = self.costs.draft(name), calls.get(name)
        if call is None:
            return cost.seconds(depth, queued)
        return call.with_row(depth, queued).seconds(cost) - call.seconds(cost)

    @staticmethod
    def _wider(curve: Curve, num_rows: int, num_tokens: int) -> float:
        """Seconds that a round takes longer by so many drafted tokens."""
        return curve.seconds(num_rows + num_tokens) - curve.seconds(num_rows)

    def _choose(
        self,
        row: RowControl,
        offers: Sequence[Offer],
        models: Mapping[str, tuple[int, int]],
        curve: Curve,
        num_rows: int,
        left: float,
        calls: Mapping[str, _Call],
    ) -> Choice:
        constants, rate = self.constants, self._rate(row, curve, num_rows)
        best, margin = PLAIN, constants.margin
        for i, offer in enumerate(offers):
            gained = self._gained(row, offer, curve, num_rows, left)
            if gained > max(best.value, margin):
                best = Choice(offer=i, value=gained)
        for name, (limit, queued) in models.items():
            self._promise(row, name, curve, num_rows)
            limit = min(limit, self.max_depth, MAX_TOKENS if num_rows == 1 else SHARED_DEPTHS[0])
            late = rate * self.costs.draft(name).queued * max(0, queued - 2) / row.lookups.horizon()
            most = self._payable_depth(name, limit, queued, curve, num_rows, left, calls)
            found = self._best(row, name, most, rate, num_rows)
            if found[1] and found[0] - late > max(best.value, margin):
                best = Choice(model=name, depth=found[1], value=found[0] - late)
        return best

    def _payable_depth(
        self,
        name: str,
        limit: int,
        queued: int,
        curve: Curve,
        num_rows: int,
        left: float,
        calls: Mapping[str, _Call],
    ) -> int:
        """The longest draft whose worst case, nothing of it accepted, takes at most `left` seconds beyond a plain round."""
        while limit and self._price(name, limit, queued, calls) + self._wider(curve, num_rows, limit) > left:
            limit -= 1
        return limit

    def takes_any(self, rows: Sequence[RowControl], offers: Sequence[Sequence[Offer]]) -> bool:
        """Whether a lookup's offer is taken for one of rows that decode together, whatever models are expected to gain."""
        curve, num_rows = self.curve(rows), len(rows)
        left = self._affords(rows, curve)
        return any(
            self._gained(row, offer, curve, num_rows, left) > self.constants.margin
            for row, given in zip(rows, offers, strict=True)
            for offer in given
        )

    def _gained(self, row: RowControl, offer: Offer, curve: Curve, num_rows: int, left: float) -> float:
        """Tokens that a lookup's offer is worth where it is cut best, 0 where it does not pay."""
        rate = self._rate(row, curve, num_rows)
        reaches = self.estimate(row, offer.drafter).reaches(offer.length, offer.confidences, offer.backing)
        prudence = self.constants.prudence
        reaches = careful(reaches, curve, num_rows, left, self._may_risk(row, curve, num_rows))
        if num_rows > 1:
            return best_steps(steps_of(reaches), curve, num_rows, rate, prudence)[1]
        depth = best_ratio(reaches, curve, prudence)
        return sum(reaches[:depth]) - prudence * rate * self._wider(curve, 1, depth) if depth else 0.0

    def _may_risk(self, row: RowControl, curve: Curve, num_rows: int) -> float:
        """Seconds that a lookup's draft may be expected to lose: little until lookups have gained, more when they have lately."""
        share = curve.seconds(num_rows) / num_rows
        first = self.constants.caution * share
        return max(0.5 * first, first + row.lookups.won(share))

    def _for_probes(self, rows: Sequence[RowControl], curve: Curve, most: float = 1.0) -> float:
        """Seconds that probes may take: what time earns and, of a row alone, a part of its credit, but not what was gained. It is
        less where earlier rows gained nothing by them, and at most a share of `most`. A probe for one of several rows holds up all of
        them."""
        first = self.constants.probe * curve.seconds(1) if len(rows) == 1 else 0.0
        return sum(min(r.hope, most) * (first + self.constants.earn * r.seconds) - r.probed for r in rows)

    def _probe(
        self,
        row: RowControl,
        models: Mapping[str, tuple[int, int]],
        curve: Curve,
        rows: Sequence[RowControl],
        left: float,
        winner: Choice,
    ) -> Choice | None:
        """Now and then a drafter that does not draft shows what it would have said: a few tokens in a plain round, or its best draft in
        place of the winner's. The latter costs what it takes longer than the winner, with catch-up, and the least share of what is for
        probes: the winner gains as it is."""
        num_rows, held_up = len(rows), self._held_up(len(rows))
        share, spared, depth = 1.0, 0.0, int(self.constants.probe_depth)
        if winner.model is not None:
            share = self.constants.hope
            spared = self.costs.draft(winner.model).seconds(winner.depth, models[winner.model][1])
        most = min(left, self._for_probes(rows, curve, share) + spared)
        due = [n for n in models if n != winner.model and row.promises[n].rest >= row.promises[n].gap]
        for name in sorted(due, key=lambda n: -row.promises[n].rest):
            limit, queued = models[name]
            deepest = depth
            if winner.model is not None:
                rate = self._rate(row, curve, num_rows)
                deepest = max(depth, self._best(row, name, self.max_depth, rate, num_rows)[1])
            deepest = min(deepest, limit)
            cost = self.costs.draft(name)
            while deepest > 0 and cost.seconds(deepest, queued) + held_up > most:
                deepest -= 1
            if deepest > 0:
                extra = max(0.0, cost.seconds(deepest, queued) + held_up - spared)
                return Choice(model=name, depth=deepest, probe=winner.model is None, extra=extra)
        return None

    def _held_up(self, num_rows: int) -> float:
        """Seconds that one row's probe holds up the others."""
        return self.pause * (num_rows - 1) / num_rows

    def can_catch_up(self, rows: Sequence[RowControl], name: str, queued: int) -> bool:
        """Whether rows that decode together could ever pay for a drafter's catching up on so many tokens."""
        price = self.costs.draft(name).seconds(1, queued)
        return price <= self.constants.cap * self.curve(rows).seconds(len(rows))

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
        curve, num_rows, prudence = self.curve(rows), len(rows), self.constants.prudence
        left = self._affords(rows, curve) - self._drafting
        reaches = [
            [] if d is None else self.estimate(r, d.drafter).reaches(d.length, d.confidences, d.backing)
            for r, d in zip(rows, drafts, strict=True)
        ]
        rate = max(self._rate(row, curve, num_rows) for row in rows)
        looked = [d is not None and d.drafter not in r.promises for r, d in zip(rows, drafts, strict=True)]
        reaches = [
            careful(reach, curve, num_rows, left, self._may_risk(row, curve, num_rows))
            if by_lookup
            else reach
            for row, reach, by_lookup in zip(rows, reaches, looked, strict=True)
        ]
        widths = [0] * num_rows
        for i, (may, draft) in enumerate(zip(lookahead or (), drafts, strict=False)):
            if not may and draft is not None:
                most = payable(draft.length, curve, num_rows, left)
                widths[i] = pays_in_turn(reaches[i], most, curve, num_rows, prudence * rate)
                left -= self._wider(curve, num_rows, widths[i])
                reaches[i] = []
        if num_rows == 1:
            if not widths[0]:
                some = reaches[0][: payable(len(reaches[0]), curve, 1, left)]
                widths[0] = (
                    best_ratio(some, curve, prudence) if looked[0] else best_at(some, curve, prudence * rate)
                )
        else:
            steps = sorted(
                ((gain, tokens, i) for i, row in enumerate(reaches) for gain, tokens in steps_of(row)),
                key=lambda step: -step[0] / step[1],
            )
            parts = [(gain, tokens) for gain, tokens, _ in steps]
            most = payable(sum(len(r) for r in reaches), curve, num_rows, left)
            pace = None if any(looked) else rate
            for _, tokens, i in steps[: best_steps(parts, curve, num_rows, pace, prudence, most)[0]]:
                widths[i] += tokens
        for row in rows:
            row.left_plain = self._drafting > 0.0 or any(widths)
        return widths

    def drafted(self, row: RowControl, draft: Offer, num_rows: int, choice: Choice = PLAIN) -> None:
        """A model drafter has drafted for a row, as was chosen: what that draft is worth, cut at its best place, at every depth limit."""
        curve, name, constants = self.costs.curve(row.bucket, num_rows), draft.drafter, self.constants
        rate = self._rate(row, curve, num_rows)
        promise = self._promise(row, name, curve, num_rows)
        reaches = self.estimate(row, name).reaches(draft.length, draft.confidences, draft.backing)
        if choice.extra:
            row.probed += choice.extra
        if choice.probe:  # what was known is old
            promise.count = min(promise.count, constants.trust)
            row.mood.age(promise.known, constants.trust)
        worth = self._values(row, reaches, curve, num_rows)
        row.mood.follow(promise.known, worth, constants.trust, constants.follow)
        promise.follow(worth, constants.follow)
        if self._leads(row, name, rate, num_rows):
            promise.gap = max(constants.spell, promise.gap / 2.0)
        else:  # ever more rarely, until time earns each probe
            price = self.costs.draft(name).seconds(int(constants.probe_depth), 1)
            earned = num_rows * price / curve.seconds(num_rows) / constants.earn
            promise.gap = max(constants.spell, min(2.0 * promise.gap, earned))
        promise.rest = 0.0

    # --- when the text has come

    def learn(self, row: RowControl, offer: Offer, matched: int, known: int) -> None:
        """Of a draft the first `matched` tokens are what came; `known` tokens came. Verified or not makes no difference."""
        self.estimate(row, offer.drafter).learn(
            offer.length, offer.confidences, matched, known, offer.backing
        )

    def spent(
        self,
        parts: Sequence[tuple[RowControl, int, bool]],
        num_rows: int,
        seconds: float,
        num_rounds: int = 1,
    ) -> None:
        """So many rounds of `num_rows` rows took `seconds` in all. parts: rows of this controller, how many tokens each got, and whether
        through lookup, which comes in bursts and is left out of the going rate."""
        plain = self.curve([row for row, _, _ in parts], num_rows).seconds(num_rows)
        rounds, mean = seconds / plain, sum(num for _, num, _ in parts) / len(parts)
        share = seconds / num_rows
        for row, num_tokens, looked_up in parts:
            row.account.add(rounds, mean - rounds if row.left_plain else 0.0)
            row.left_plain = False
            for promise in row.promises.values():
                promise.rest += num_tokens
            row.lookups.follow(num_tokens, share, looked_up=looked_up, num_rounds=num_rounds)
            if not looked_up and seconds > 0:
                row.follow(num_tokens, share, self.constants.fade, num_rounds)
            row.seconds += share

    def held_up(self, rows: Sequence[RowControl], num_rows: int, seconds: float) -> None:
        """The plain round behind drafts took so much longer than other plain rounds."""
        late = seconds / self.curve(rows, num_rows).seconds(num_rows)
        for row in rows:
            row.account.add(0.0, -late)

    def estimate(self, row: RowControl, name: str) -> RowEstimate:
        found = row.estimates.get(name)
        if found is None:
            key = (row.kind, name, row.bucket)
            shared = self._calibrations.get(key)
            if shared is None:
                shared = self._calibrations[key] = Calibration(self.constants)
            found = row.estimates[name] = RowEstimate(shared)
        return found

    def _promise(self, row: RowControl, name: str, curve: Curve, num_rows: int) -> Promise:
        found = row.promises.get(name)
        if found is None:
            kept = self._promises.get((row.kind, name, row.bucket))
            if kept is None:
                guess = [self.constants.first_chance ** (i + 1) for i in range(self.max_depth)]
                spell = self.constants.spell  # so the first probe is due: there is least to catch up on now
                known = self._values(row, guess, curve, num_rows)
                kept = Promise(known, self.constants.trust, self.constants.spell, gap=spell, rest=spell)
            found = row.promises[name] = kept.for_row()
        return found

    def _values(
        self, row: RowControl, reaches: Sequence[float], curve: Curve, num_rows: int
    ) -> tuple[list[float], list[float]]:
        """Tokens that a draft gains and seconds by which it makes a round longer, by depth limit, cut where it is worth most. Depths the
        draft did not reach inherit the chance of its last token."""
        shape, rate, scale = (
            curve.shape,
            self._rate(row, curve, num_rows),
            self.constants.prudence * curve.scale,
        )
        sum_reaches, best, reached, chance = 0.0, 0.0, 1.0, 0.0
        gain, longer = 0.0, 0.0
        gained, wider = [], []
        for i in range(self.max_depth):
            if i < len(reaches):
                chance = reaches[i] / reached if reached > 0 else 0.0
                reached = reaches[i]
            else:
                reached *= chance
            sum_reaches += reached
            extra = scale * (shape[num_rows + i + 1] - shape[num_rows])
            if i + 1 in curve.depths and sum_reaches - rate * extra > best:
                best, gain, longer = sum_reaches - rate * extra, sum_reaches, extra
            gained.append(gain)
            wider.append(longer)
        return gained, wider
