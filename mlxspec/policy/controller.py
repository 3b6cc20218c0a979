"""Chooses for each round who drafts, how long, and how much of each draft is verified: the choice with the largest expected gain.

    gain = expected accepted tokens - rate x (seconds of the round - seconds of a plain round)

rate: the row's tokens a second. Plain decoding gains 0. A round whose worst case the rows' accounts cannot pay is not run (account.py). A
drafter that is not expected to gain is asked now and then all the same, ever more rarely: a probe.

The calls of a round are `choose`, `drafted` for each draft that a model made, `trim`, and when the round has been read `learn` for each
draft and `spent`. Rounds may be decided late: `choose` and `trim` need no outcome of rounds that have not been read, however many there
are, because the accounts reserve their worst cases. Such rounds are told to `spent` in their order, each with its own decision.

Knows costs and chances as numbers; knows no tokens, no arrays and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple

from mlxspec.policy.acceptance import MODEL_DEPTH, SPELL, TRUST, Acceptance, Offer
from mlxspec.policy.account import CAP, EARN, Account
from mlxspec.policy.costs import FADE, MAX_TOKENS, CostModel, Curve

MARGIN = 0.02  # tokens that a draft must gain beyond plain decoding, so that rounding alone never drafts
PRUDENCE = 1.06  # how many times a wider forward counts: curves are never quite right, and too wide costs more than too narrow
PROBE_DEPTH = 3  # tokens of a probe
PROBE_SHARE = 0.3  # of what the account can pay: a probe that shows nothing leaves enough for a draft
STARVED = 100  # times the time between two probes
PROBE_COST = 1.5  # plain rounds: most that a probe may cost, catch-up included
SHARED_DEPTHS = (3, 16, 32, 63)  # lengths that drafts of several rows are cut to: few shapes of rounds
_QUICK = 0.25  # share of its distance from certainty by which one token moves a row's own odds
_STAY = 0.98  # how much of the way the odds stay where an outcome moved them
_FAR = 8.0  # most that a row's odds are from those of other rows


class Choice(NamedTuple):
    """Who drafts for a row. offer: index of the lookup's offer taken; model: the model drafter asked for `depth` tokens. probe: to see
    whether it would pay, not because it is expected to. gain: tokens expected beyond plain decoding. price: seconds of drafting at most."""

    offer: int | None = None
    model: str | None = None
    depth: int = 0
    probe: bool = False
    gain: float = 0.0
    price: float = 0.0


PLAIN = Choice()


class Decision(NamedTuple):
    """A decided round. widths: by row, how many drafted tokens are verified. worst: plain rounds by which it may be late, None if it is
    plain."""

    widths: list[int]
    worst: float | None = None


class PolicyRow:
    """What the controller remembers of one row; made by `Controller.open`.

    odds: by drafter, the row's own factor on the odds of acceptance. streak: by lookup, tokens said right up to the end of the text. reach:
    by model drafter, the mean reach of its drafts in this row, and their number. spell: rounds between drafts of lookups, which a model
    drafter shares a catch-up among. is_drafting: its last decided round was not plain.
    """

    __slots__ = (
        *("account", "bucket", "is_drafting", "kind", "odds", "reach", "seconds", "since"),
        *("spell", "streak", "tokens"),
    )

    def __init__(self, kind: str, bucket: int, rate: float, plain: float) -> None:
        self.kind, self.bucket, self.account = kind, bucket, Account()
        self.tokens, self.seconds = SPELL * rate, SPELL * plain if rate else 0.0  # both fade
        self.odds: dict[str, float] = {}
        self.streak: dict[str, int] = {}
        self.reach: dict[str, tuple[list[float], float]] = {}
        self.spell, self.since = SPELL, 0
        self.is_drafting = False


class Controller:
    """One for an engine. What it learns is in `costs` and outlives rows."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self._num_tokens: dict[str, int] = {}  # by kind, that have come

    def open(self, kind: str, context_bucket: int) -> PolicyRow:
        """A new row. kind: rows whose drafts fare alike, such as greedy ones."""
        plain = self.costs.curve(context_bucket).seconds(1)
        return PolicyRow(kind, context_bucket, self.costs.learned.rates.get(kind, 0.0), plain)

    def close(self, row: PolicyRow) -> None:
        """The row has ended: what was learned in it is where the next row of its kind begins."""
        for name, (reach, num_drafts) in row.reach.items():
            self._acceptance(row, name).add(reach, num_drafts)
        if row.seconds:
            plain = self.costs.curve(row.bucket).seconds(1)
            self.costs.learned.rates[row.kind] = row.tokens * plain / row.seconds

    def curve(self, rows: Sequence[PolicyRow], num_rows: int | None = None) -> Curve:
        """Of rounds of so many rows, these alone if not said otherwise. The longest of these decides what attention costs."""
        return self.costs.curve(max(r.bucket for r in rows), num_rows or len(rows))

    def _acceptance(self, row: PolicyRow, name: str) -> Acceptance:
        return self.costs.learned.of(row.kind, name)

    # --- chances

    def reaches(self, row: PolicyRow, offer: Offer, most: int = MAX_TOKENS) -> list[float]:
        """For each token of a draft the probability that it and all before it are accepted; shorter where hardly any is."""
        table = self._acceptance(row, offer.drafter)
        odds, out, reach = row.odds.get(offer.drafter, 1.0), [], 1.0
        which, cells = table.cells(offer, row.streak.get(offer.drafter, 0), most)
        chances = table.chances[which]
        for cell in cells:
            chance = chances[cell]
            reach *= chance * odds / (1.0 - chance + chance * odds)
            out.append(reach)
            if reach < MARGIN:
                break
        return out

    def learn(self, row: PolicyRow, offer: Offer, matched: int, known: int) -> None:
        """Of a draft the first `matched` tokens are what came; `known` tokens came. Verified or not makes no difference. What lies behind
        the first wrong token was never in question."""
        name, table = offer.drafter, self._acceptance(row, offer.drafter)
        streak, odds = row.streak.get(name, 0), row.odds.get(name, 1.0)
        which, cells = table.cells(offer, streak, min(offer.length, known, matched + 1))
        for i, cell in enumerate(cells):
            chance, accepted = table.chances[which][cell], i < matched
            table.count(which, cell, accepted)
            expected = chance * odds / (1.0 - chance + chance * odds)
            odds = (odds * (1.0 + _QUICK * (accepted - expected))) ** _STAY
        row.odds[name] = min(_FAR, max(1.0 / _FAR, odds))
        failed = matched < min(offer.length, known)
        row.streak[name] = 0 if failed or not offer.length else streak + matched

    def _mean_reach(self, row: PolicyRow, name: str) -> list[float]:
        """Of a model drafter's drafts in this row, and of a few drafts more that are as those of earlier rows."""
        table = self._acceptance(row, name)
        own = row.reach.get(name)
        if own is None:
            return table.reach
        reach, num = own
        weight = min(table.weight, SPELL)
        return [(weight * a + num * b) / (weight + num) for a, b in zip(table.reach, reach, strict=True)]

    # --- choosing who drafts

    def choose(
        self,
        rows: Sequence[PolicyRow],
        offers: Sequence[Sequence[Offer]],
        models: Sequence[Mapping[str, tuple[int, int]]],
    ) -> list[Choice]:
        """One choice a row. offers: what lookups offer; they cost next to nothing. models: by drafter, how many tokens it may draft and
        how many known ones it has to catch up on, at most."""
        curve, num_rows = self.curve(rows), len(rows)
        plain = curve.seconds(num_rows)
        left = self._available(rows, curve, plain)
        choices, is_probing = [], False  # one row's probe holds up all others, so they take turns
        for row, given, asked in zip(rows, offers, models, strict=True):
            choice, rate = PLAIN, self._rate(row, plain, num_rows)
            for i, offer in enumerate(given):
                reach = _backed(self.reaches(row, offer), curve, num_rows, left)
                gain, _ = _best(reach, rate, curve, num_rows, left)
                if gain > max(choice.gain, MARGIN):
                    choice = Choice(offer=i, gain=gain)
            for name, (limit, queued) in asked.items():
                found = self._ask(row, name, limit, queued, rate, curve, num_rows, left)
                if found.gain > max(choice.gain, MARGIN):
                    choice = found
            if choice is PLAIN and asked and not is_probing:
                choice = self._probe(row, asked, curve, num_rows, left)
                is_probing = choice.probe
            if choice.model is not None:
                wider = 0.0 if choice.probe else curve.seconds(num_rows + choice.depth) - plain
                left -= choice.price + wider
            choices.append(choice)
        return choices

    def takes_any(self, rows: Sequence[PolicyRow], offers: Sequence[Sequence[Offer]]) -> bool:
        """Whether a lookup's offer is taken, whatever models are expected to gain."""
        return any(c.offer is not None for c in self.choose(rows, offers, [{}] * len(rows)))

    def would_draft(self, row: PolicyRow, name: str) -> bool:
        """Whether a model drafter is expected to gain for a row that decodes alone and has time to lose."""
        curve = self.costs.curve(row.bucket)
        plain = curve.seconds(1)
        rate = self._rate(row, plain, 1)
        return self._ask(row, name, MODEL_DEPTH, 1, rate, curve, 1, CAP * plain).gain > MARGIN

    def can_catch_up(self, rows: Sequence[PolicyRow], name: str, queued: int) -> bool:
        """Whether rows that decode together could ever pay for a drafter's catching up on so many tokens."""
        price = self.costs.draft(name).seconds(1, queued)
        return price <= CAP * self.curve(rows).seconds(len(rows))

    def _available(self, rows: Sequence[PolicyRow], curve: Curve, plain: float) -> float:
        """Seconds that a round of these rows may take at worst beyond a plain one and beyond what it keeps from running ahead."""
        return min(r.account.available for r in rows) * plain - self._pause(rows, curve)

    @staticmethod
    def _pause(rows: Sequence[PolicyRow], curve: Curve) -> float:
        """Seconds by which the plain round behind is longer if these rows leave plain decoding now; nothing if they have left it."""
        return 0.0 if rows[0].is_drafting else curve.pause

    @staticmethod
    def _rate(row: PolicyRow, plain: float, num_rows: int) -> float:
        """Tokens a second that the row gets without the draft in question: at least those of plain decoding."""
        return max(row.tokens / row.seconds if row.seconds else 0.0, num_rows / plain)

    def _ask(
        self,
        row: PolicyRow,
        name: str,
        limit: int,
        queued: int,
        rate: float,
        curve: Curve,
        num_rows: int,
        left: float,
    ) -> Choice:
        """The best draft of a model drafter, as far as the accounts can pay; PLAIN if there is none."""
        cost = self.costs.draft(name)
        late = cost.queued * max(
            0, queued - 2
        )  # what it has missed is shared by the drafts until it misses more
        reach = self._mean_reach(row, name)[: limit if num_rows == 1 else min(limit, SHARED_DEPTHS[0])]
        call = cost.seconds(0, min(queued, 2) * num_rows, num_rows) / num_rows
        step = cost.step * (1.0 + cost.row * (num_rows - 1)) / num_rows
        worst = cost.seconds(0, queued), cost.step
        gain, depth = _best(reach, rate, curve, num_rows, left, (call, step), worst)
        gain -= rate * late / min(SPELL, max(1.0, row.spell))
        if gain <= 0.0:
            return PLAIN
        return Choice(model=name, depth=depth, gain=gain, price=cost.seconds(depth, queued))

    def _probe(
        self,
        row: PolicyRow,
        models: Mapping[str, tuple[int, int]],
        curve: Curve,
        num_rows: int,
        left: float,
    ) -> Choice:
        """The drafter that has waited longest for a probe, if one is due and can be paid for; else PLAIN."""
        come, dearest = self._num_tokens.get(row.kind, 0), PROBE_COST * curve.seconds(num_rows)
        waited = {n: come - (t := self._acceptance(row, n)).asked_at - t.gap for n in models}
        for name in sorted((n for n, w in waited.items() if w >= 0), key=lambda n: -waited[n]):
            limit, queued = models[name]
            cost, depth = self.costs.draft(name), min(PROBE_DEPTH, limit)
            # who has waited several times as long may take all of it where there is nothing to catch up on, as when an answer begins
            has_starved = queued <= 1 and waited[name] >= STARVED * self._acceptance(row, name).gap
            most = min(dearest, left if has_starved else PROBE_SHARE * left)
            while depth > 0 and cost.seconds(depth, queued) > most:
                depth -= 1
            if depth > 0:
                return Choice(model=name, depth=depth, probe=True, price=cost.seconds(depth, queued))
        return PLAIN

    # --- with drafts at hand

    def drafted(self, row: PolicyRow, draft: Offer, num_rows: int, choice: Choice) -> None:
        """A model drafter has drafted for a row, as was chosen. Depths that the draft did not reach go on as its tokens did on average."""
        name, table = draft.drafter, self._acceptance(row, draft.drafter)
        got = self.reaches(row, draft, MODEL_DEPTH)
        mean = got[-1] ** (1.0 / len(got)) if got and len(got) == draft.length else 0.0
        while len(got) < MODEL_DEPTH:
            got.append(got[-1] * mean if got else 0.0)
        reach, num = row.reach.get(name, ([0.0] * MODEL_DEPTH, 0.0))
        num = (
            min(num, TRUST if choice.probe else 1.0 / FADE - 1.0) + 1.0
        )  # behind a pause what is known is old
        row.reach[name] = [a + (b - a) / num for a, b in zip(reach, got, strict=True)], num
        table.asked_at = self._num_tokens.get(row.kind, 0)
        if choice.probe:  # ever more rarely, until time earns each probe
            plain = self.costs.curve(row.bucket, num_rows).seconds(num_rows)
            earned = num_rows * self.costs.draft(name).seconds(PROBE_DEPTH, 1) / (plain * EARN)
            table.gap = max(SPELL, min(2.0 * table.gap, earned))
        else:
            table.gap = SPELL

    def trim(
        self,
        rows: Sequence[PolicyRow],
        drafts: Sequence[Offer | None],
        choices: Sequence[Choice],
        *,
        lookahead: Sequence[bool] | None = None,
    ) -> Decision:
        """How many tokens of each row's draft to verify, so that the round as a whole gains most; reserves its worst case.

        lookahead False: whether a token is verified must not depend on those behind it, as acceptance by rejection demands.
        """
        drafting = sum(c.price for c in choices)
        if not drafting and all(d is None for d in drafts):
            for row in rows:
                row.is_drafting = False
            return Decision([0] * len(rows))
        curve, num_rows = self.curve(rows), len(rows)
        plain = curve.seconds(num_rows)
        left = self._available(rows, curve, plain) - drafting
        rate = max(self._rate(row, plain, num_rows) for row in rows)
        widths, width = [0] * num_rows, num_rows
        parts: list[tuple[float, int, int]] = []  # of drafts: expected tokens, tokens, row
        has_lookup = False
        for i, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            if draft is None:
                continue
            reach, is_lookup = self.reaches(row, draft), choices[i].model is None
            if is_lookup:
                reach = _backed(reach, curve, num_rows, left)
            if lookahead is not None and not lookahead[i]:
                widths[i] = _pays_in_turn(reach, draft.length, curve, width, PRUDENCE * rate, left)
                left -= curve.seconds(width + widths[i]) - curve.seconds(width)
                width += widths[i]
                continue
            has_lookup |= is_lookup
            depths = curve.depths if num_rows == 1 else SHARED_DEPTHS
            cuts = [0, *(d for d in depths if d <= len(reach))]
            if num_rows > 1 and 0 < len(reach) < depths[0]:
                cuts.append(len(reach))
            parts += [(sum(reach[a:b]), b - a, i) for a, b in zip(cuts, cuts[1:], strict=False)]
        if num_rows > 1:
            parts.sort(key=lambda part: -part[0] / part[1])
        before, best, gained, taken = curve.seconds(width), 0.0, 0.0, 0
        for count, (gain, num, _) in enumerate(parts, 1):
            gained, width = gained + gain, width + num
            longer = curve.seconds(width) - before
            if longer > left or width > MAX_TOKENS:
                break
            # a burst of lookups sets its own pace
            pace = (num_rows + gained) / (before + PRUDENCE * longer) - num_rows / before
            value = pace if has_lookup else gained - rate * PRUDENCE * longer
            if value > best:
                best, taken = value, count
        for _, num, i in parts[:taken]:
            widths[i] += num
        return self._decide(rows, widths, drafting, curve, plain)

    def _decide(
        self, rows: Sequence[PolicyRow], widths: list[int], drafting: float, curve: Curve, plain: float
    ) -> Decision:
        """The round with these widths, whose worst case every account reserves."""
        total, worst = sum(widths), None
        if drafting or total:
            longer = max(0.0, curve.seconds(len(rows) + total) - plain)
            worst = (drafting + longer + self._pause(rows, curve)) / plain
        for row in rows:
            row.is_drafting = worst is not None
            row.account.reserve(worst or 0.0)
        return Decision(widths, worst)

    # --- when rounds have been read

    def spent(
        self,
        parts: Sequence[tuple[PolicyRow, int, bool]],
        num_rows: int,
        seconds: float,
        num_rounds: int = 1,
        decision: Decision | None = None,
    ) -> None:
        """Rounds of `num_rows` rows took `seconds` in all. parts: rows of this controller, how many tokens each got, and whether through a
        lookup, which comes in bursts and is left out of the going rate. decision: of the one round, None for plain ones."""
        plain = self.curve([row for row, _, _ in parts], num_rows).seconds(num_rows)
        rounds, share, stays = seconds / plain, seconds / num_rows, (1.0 - FADE) ** num_rounds
        worst = None if decision is None else decision.worst
        gained = sum(num for _, num, _ in parts) / len(parts) - rounds if worst is not None else 0.0
        for row, num_tokens, is_lookup in parts:
            row.account.settle(rounds, gained, worst or 0.0)
            self._num_tokens[row.kind] = self._num_tokens.get(row.kind, 0) + num_tokens
            row.since += num_rounds
            if is_lookup:
                row.spell, row.since = row.spell + 4.0 * FADE * (row.since - row.spell), 0
            else:
                row.tokens = stays * row.tokens + num_tokens
                row.seconds = stays * row.seconds + share

    def paused(self, rows: Sequence[PolicyRow], num_rows: int, seconds: float) -> None:
        """The plain round behind drafts took so much longer than one that runs ahead."""
        curve = self.curve(rows, num_rows)
        curve.pause += 2.0 * FADE * (seconds - curve.pause)
        for row in rows:
            row.account.settle(0.0, -seconds / curve.seconds(num_rows))


def _best(
    reach: Sequence[float],
    rate: float,
    curve: Curve,
    num_rows: int,
    left: float,
    price: tuple[float, float] = (0.0, 0.0),
    worst: tuple[float, float] = (0.0, 0.0),
) -> tuple[float, int]:
    """Largest gain of a draft whose first i + 1 tokens are accepted with chance reach[i], and the length that it is cut to; (0, 0) if
    none gains. price, worst: seconds of the draft and of each of its tokens, on average and at most."""
    best, depth, total, plain = 0.0, 0, 0.0, curve.seconds(num_rows)
    depths = curve.depths
    for length, chance in enumerate(reach, 1):
        total += chance
        if length not in depths:
            continue
        longer = curve.seconds(num_rows + length) - plain
        if longer + worst[0] + worst[1] * length > left:
            break
        gain = total - rate * (PRUDENCE * longer + price[0] + price[1] * length)
        if gain > best:
            best, depth = gain, length
    return best, depth


def _backed(reach: list[float], curve: Curve, num_rows: int, left: float) -> list[float]:
    """A lookup's draft without the end that may cost too much: what verifying it takes longer must be within that share of what is left
    which is the chance that as many tokens are accepted as pay for it. A draft that fails leaves enough for the next one."""
    plain = curve.seconds(num_rows)
    for length in reversed([d for d in curve.depths if d <= len(reach)]):
        longer = curve.seconds(num_rows + length) - plain
        back = ceil(longer * num_rows / plain)
        if back <= length and longer <= (reach[back - 1] if back > 0 else 1.0) * left:
            return reach[:length]
    return []


def _pays_in_turn(
    reach: Sequence[float], num_drafted: int, curve: Curve, width: int, rate: float, left: float
) -> int:
    """The longest of the curve's depths to which a draft of so many tokens pays part by part, by what is known before a part's first token.
    A part ends at the first depth to which it pays, so it may cross a step of the curve where the plateau behind is long enough."""
    length, begins = 0, curve.seconds(width)
    while length < len(reach):
        before = reach[length - 1] if length else 1.0
        chance = reach[length] / before if before > 0.0 else 0.0
        taken = curve.seconds(width + length)
        for end in curve.depths:
            longer = curve.seconds(width + end)
            if not length < end <= num_drafted or longer - begins > left:
                continue
            if sum(reach[length] * chance**i for i in range(end - length)) >= rate * (longer - taken):
                length = end
                break
        else:
            break
    return length
