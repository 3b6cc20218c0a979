"""Chooses for each round who drafts, how long, and how much of each draft is verified: the choice with the largest expected gain.

    gain = expected accepted tokens - rate x (seconds of the round - seconds of a plain round)

rate: the row's tokens a second. Plain decoding gains 0. A round whose worst case the rows' accounts cannot pay is not run (account.py). A
drafter that is not expected to gain is asked now and then all the same, ever more rarely: a probe.

The calls of a round are `choose`, `asked` for each draft that a model makes and `read` once that draft is known (`drafted` is both),
`trim`, and when the round has been read `learn` for each draft and `spent`. Rounds may be decided late: `choose` and `trim` need no outcome
of rounds that have not been read, however many there are, because the accounts reserve their worst cases. Such rounds are told to `spent`
in their order, each with its own decision.

A model's draft may be verified without having been read: then the round need not wait for it, and nothing of it is cut (`looks`). What a
drafter's drafts gain when they are cut is known of its last drafts (`Gains`), and of a drafter that has not drafted lately by those of the
one that has.

Knows costs and chances as numbers; knows no tokens, no arrays and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple

from mlxspec.policy.acceptance import FIRST_CHANCE, PROBED, Gains, Offer
from mlxspec.policy.account import CAP, EARN, Account
from mlxspec.policy.costs import DEARER, FADE, MAX_TOKENS, CostModel, Curve

MODEL_DEPTH = 8  # tokens of the longest draft that a model is asked for
MARGIN = 0.02  # tokens that a draft must gain beyond plain decoding, so that rounding alone never drafts
PRUDENCE = 1.06  # how many times a wider forward counts: curves are never quite right, and too wide costs more than too narrow
PROBE_DEPTH = 3  # tokens of a probe
PROBE_SHARE = 0.3  # of what the account can pay: a probe that shows nothing leaves enough for a draft
STARVED = 100  # times the time between two probes
PROBE_COST = 1.5  # plain rounds: most that a probe may cost, catch-up included
SHARED_DEPTHS = (3, 16, 32, 63)  # lengths that drafts of several rows are cut to: few shapes of rounds
WAIT = 0.1  # plain rounds that waiting for a draft is taken to cost, until it has been measured
SHARED_CATCH_UP = 8.0  # drafts that share the price of catching up


class Choice(NamedTuple):
    """Who drafts for a row. offer: index of the lookup's offer taken; model: the model drafter asked. depth: tokens of it that are verified
    or asked for. probe: to see whether it would pay, not because it is expected to. reads: the model's draft is read and cut before it is
    verified. gain: tokens expected beyond plain decoding. price: seconds of drafting at most."""

    offer: int | None = None
    model: str | None = None
    depth: int = 0
    probe: bool = False
    reads: bool = False
    gain: float = 0.0
    price: float = 0.0


PLAIN = Choice()


class Decision(NamedTuple):
    """A decided round. widths: by row, how many drafted tokens are verified. worst: plain rounds by which it may be late, None if it is
    plain."""

    widths: list[int]
    worst: float | None = None


class PolicyRow:
    """What the controller remembers of one row. kind: rows whose drafts fare alike, such as greedy ones. bucket: of its context. streak: by
    lookup, tokens said right up to the end of the text. is_drafting: its last decided round was not plain."""

    __slots__ = ("account", "bucket", "is_drafting", "kind", "seconds", "streak", "tokens")

    def __init__(self, kind: str, bucket: int) -> None:
        self.kind, self.bucket, self.account = kind, bucket, Account()
        self.tokens = self.seconds = 0.0  # both fade
        self.streak: dict[str, int] = {}
        self.is_drafting = False


class Controller:
    """One for an engine. What it learns is in `costs` and outlives rows."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self._num_tokens: dict[str, int] = {}  # by kind, that have come
        self._wait = WAIT
        self._gains: dict[tuple[str, int], dict[str, Gains]] = {}  # by kind and number of rows, by drafter
        self._last: dict[tuple[str, int], str] = {}  # likewise, who drafted last

    def curve(self, rows: Sequence[PolicyRow], num_rows: int | None = None) -> Curve:
        """Of rounds of so many rows, these alone if not said otherwise. The longest of these decides what attention costs."""
        bucket = rows[0].bucket if len(rows) == 1 else max(r.bucket for r in rows)
        return self.costs.curve(bucket, num_rows or len(rows), dearest(rows))

    # --- chances

    def reaches(self, row: PolicyRow, offer: Offer) -> list[float]:
        """For each token of a draft the probability that it and all before it are accepted; shorter where hardly any is."""
        table, out, reach = self.costs.accepted(row.kind, offer.drafter), [], 1.0
        which, cells = table.cells(offer, row.streak.get(offer.drafter, 0), MAX_TOKENS)
        rates = table.rates[which]
        for cell in cells:
            reach *= rates[cell]
            out.append(reach)
            if reach < MARGIN:
                break
        return out

    def learn(self, row: PolicyRow, offer: Offer, matched: int, known: int) -> None:
        """Of a draft the first `matched` tokens are what came; `known` tokens came. Verified or not makes no difference. What lies behind
        the first wrong token was never in question."""
        name, known = offer.drafter, min(offer.length, known)
        table, streak = self.costs.accepted(row.kind, name), row.streak.get(name, 0)
        which, cells = table.cells(offer, streak, min(known, matched + 1))
        table.count(which, cells, matched)
        row.streak[name] = streak + matched if offer.length and matched >= known else 0

    # --- choosing who drafts

    def choose(
        self,
        rows: Sequence[PolicyRow],
        offers: Sequence[Sequence[Offer]],
        models: Sequence[Mapping[str, tuple[int, int]]],
        *,
        is_ahead: bool = False,
    ) -> list[Choice]:
        """One choice a row. offers: what lookups offer; they cost next to nothing. models: by drafter, how many tokens it may draft and
        how many known ones it has to catch up on, at most. is_ahead: rounds run ahead of the host unless a draft is read."""
        curve, num_rows = self.curve(rows), len(rows)
        plain = curve.seconds(num_rows)
        left, width = self._available(rows, curve, plain), num_rows
        choices, is_probing = [], False  # one row's probe holds up all others, so they take turns
        for row, given, asked in zip(rows, offers, models, strict=True):
            choice = PLAIN
            for i, offer in enumerate(given):
                gain, depth = _lookup(self.reaches(row, offer), curve, num_rows, width, left)
                if gain > max(choice.gain, MARGIN):
                    choice = Choice(offer=i, depth=depth, gain=gain)
            for name, (limit, queued) in asked.items():
                found = self._ask(row, name, limit, queued, curve, num_rows, left, is_ahead=is_ahead)
                if found.gain > max(choice.gain, MARGIN):
                    choice = found
            if choice is PLAIN and asked and not is_probing:
                choice = self._probe(row, asked, curve, num_rows, left)
                is_probing = choice.probe
            if choice is not PLAIN:
                wider = width if choice.probe else width + choice.depth
                left -= choice.price + curve.seconds(wider) - curve.seconds(width)
                width = wider
            choices.append(choice)
        return choices

    def looks(self, choices: Sequence[Choice]) -> bool:
        """Whether models' drafts are read before they are verified: to cut them, where that gains more than waiting costs, or because
        nobody knows yet what they take."""
        return any(c.reads or (c.model is not None and self.costs.is_guess(c.model)) for c in choices)

    def waiting(self, rows: Sequence[PolicyRow]) -> float:
        """Tokens that these rows do without where a round waits for the one before it."""
        plain = self.curve(rows).seconds(len(rows))
        return sum(self._rate(row, plain, len(rows)) for row in rows) * self._wait * plain

    def affords(self, rows: Sequence[PolicyRow], choices: Sequence[Choice]) -> bool:
        """Whether the accounts can pay for the worst case of these choices, beside what is reserved."""
        curve, num_rows = self.curve(rows), len(rows)
        plain, width = curve.seconds(num_rows), num_rows + sum(c.depth for c in choices if not c.probe)
        worst = curve.seconds(width) - plain + sum(c.price for c in choices)
        return worst <= self._available(rows, curve, plain)

    def would_draft(self, row: PolicyRow, name: str) -> bool:
        """Whether a model drafter is expected to gain for a row that decodes alone and has time to lose."""
        curve = self.costs.curve(row.bucket, 1, row.kind)
        return self._ask(row, name, MODEL_DEPTH, 1, curve, 1, CAP * curve.seconds(1)).gain > MARGIN

    def can_catch_up(self, rows: Sequence[PolicyRow], name: str, queued: int) -> bool:
        """Whether rows that decode together could ever pay for a drafter's catching up on so many tokens."""
        price = self.costs.draft(name, rows[0].kind).seconds(1, queued)
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
        curve: Curve,
        num_rows: int,
        left: float,
        *,
        is_ahead: bool = False,
    ) -> Choice:
        """The best draft of a model drafter, as far as the accounts can pay; PLAIN if there is none."""
        cost = self.costs.draft(name, row.kind)
        plain, seconds, limit = curve.seconds(num_rows), curve.seconds, min(limit, MODEL_DEPTH)
        rate = self._rate(row, plain, num_rows)
        missed = cost.queued * max(0, queued - 2) / SHARED_CATCH_UP
        call = cost.seconds(0, min(queued, 2) * num_rows, num_rows) / num_rows + missed
        step = cost.step * (1.0 + cost.row * (num_rows - 1)) / num_rows
        at_least = cost.seconds(0, queued)
        gains, waits = self._gains_of(row, name, curve, num_rows, rate), is_ahead * rate * self._wait * plain
        best, best_depth, reads = 0.0, 0, False
        for depth in _depths(curve, num_rows):
            if depth > limit or seconds(num_rows + depth) - plain + at_least + cost.step * depth > left:
                break
            cut, whole = gains[depth] - waits, gains[MODEL_DEPTH + 1 + depth] if is_ahead else 0.0
            gain = max(cut, whole) - rate * (call + step * depth)
            if gain > 0.0 and gain >= best:
                best, best_depth, reads = gain, depth, cut > whole
        if not best_depth:
            return PLAIN
        price = at_least + cost.step * best_depth
        return Choice(model=name, depth=best_depth, reads=reads, gain=best, price=price)

    def _gains_of(
        self, row: PolicyRow, name: str, curve: Curve, num_rows: int, rate: float
    ) -> Sequence[float]:
        """What `_by_depth` says of a drafter's drafts, as far as that is known."""
        known = self._gains.get((row.kind, num_rows), {})
        found, last = known.get(name), known.get(self._last.get((row.kind, num_rows), ""))
        mean = self.costs.accepted(row.kind, name).mean
        if found is not None:
            return found.now if last is found or last is None else found.beside(last)
        if last is not None and mean == FIRST_CHANCE:  # nobody has seen a draft of it
            return last.now
        return _by_depth([mean ** (i + 1) for i in range(MODEL_DEPTH)], curve, num_rows, rate)

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
        tables = {n: self.costs.accepted(row.kind, n) for n in models}
        waited = {n: come - t.asked_at - t.gap for n, t in tables.items()}
        for name in sorted((n for n, w in waited.items() if w >= 0), key=lambda n: -waited[n]):
            limit, queued = models[name]
            cost, depth = self.costs.draft(name, row.kind), min(PROBE_DEPTH, limit)
            # who has waited several times as long may take all of it where there is nothing to catch up on, as when an answer begins
            has_starved = queued <= 1 and waited[name] >= STARVED * tables[name].gap
            most = min(dearest, left if has_starved else PROBE_SHARE * left)
            while depth > 0 and cost.seconds(depth, queued) > most:
                depth -= 1
            if depth > 0:
                return Choice(model=name, depth=depth, probe=True, price=cost.seconds(depth, queued))
        return PLAIN

    # --- with drafts at hand

    def drafted(self, row: PolicyRow, draft: Offer, num_rows: int, choice: Choice) -> None:
        """A model drafter has drafted for a row, as was chosen, and the draft has been read."""
        self.asked(row, draft.drafter, num_rows, choice)
        self.read(row, draft, num_rows, choice)

    def asked(self, row: PolicyRow, name: str, num_rows: int, choice: Choice) -> None:
        """A model drafter drafts for a row, as was chosen."""
        table = self.costs.accepted(row.kind, name)
        table.asked_at = self._num_tokens.get(row.kind, 0)
        if choice.probe:  # ever more rarely, until time earns each probe
            plain = self.costs.curve(row.bucket, num_rows, row.kind).seconds(num_rows)
            earned = num_rows * self.costs.draft(name, row.kind).seconds(PROBE_DEPTH, 1) / (plain * EARN)
            table.gap = max(PROBED, min(2.0 * table.gap, earned))
        else:
            table.gap = PROBED

    def read(self, row: PolicyRow, draft: Offer, num_rows: int, choice: Choice) -> None:
        """What a model has drafted is known, at once or with the round that verified it."""
        name, table = draft.drafter, self.costs.accepted(row.kind, draft.drafter)
        which, cells = table.cells(draft, 0, draft.length)
        rates = [table.rates[which][cell] for cell in cells]
        if not rates:
            return
        key, curve = (row.kind, num_rows), self.costs.curve(row.bucket, num_rows, row.kind)
        rate = self._rate(row, curve.seconds(num_rows), num_rows)
        now, is_other = self._gains_of(row, name, curve, num_rows, rate), self._last.get(key, name) != name
        share = table.drafted(sum(rates) / len(rates), is_first=choice.probe or is_other)
        reach = [1.0, *self.reaches(row, draft)]
        more = 0.0 if len(reach) <= draft.length else table.mean
        while len(reach) <= MODEL_DEPTH:
            reach.append(reach[-1] * more)
        gains = self._gains.setdefault(key, {}).setdefault(name, Gains(now))
        gains.now, self._last[key] = list(now), name
        gains.count(_by_depth(reach[1 : MODEL_DEPTH + 1], curve, num_rows, rate), share)

    def trim(
        self, rows: Sequence[PolicyRow], drafts: Sequence[Offer | None], choices: Sequence[Choice]
    ) -> Decision:
        """How many tokens of each row's draft to verify; reserves the round's worst case. A model's draft without confidences has not been
        read: all of it is verified, and nothing of a probe."""
        if all(c is PLAIN for c in choices):
            for row in rows:
                row.is_drafting = False
            return Decision([0] * len(rows))
        curve, num_rows, drafting = self.curve(rows), len(rows), sum(c.price for c in choices)
        plain = curve.seconds(num_rows)
        left = self._available(rows, curve, plain) - drafting
        widths, width = [], num_rows
        for row, draft, choice in zip(rows, drafts, choices, strict=True):
            num = choice.depth if choice.offer is not None else 0
            if draft is not None and choice.model is not None and draft.confidences is None:
                num = 0 if choice.probe else draft.length
            elif draft is not None and choice.model is not None:
                rate = PRUDENCE * self._rate(row, plain, num_rows)
                num = _in_turn(self.reaches(row, draft), draft.length, curve, num_rows, width, rate, left)
            left -= curve.seconds(width + num) - curve.seconds(width)
            widths.append(num)
            width += num
        worst = None
        if drafting or width > num_rows:
            longer = max(0.0, curve.seconds(width) - plain)
            worst = (drafting + longer + self._pause(rows, curve)) / plain
        for row in rows:
            row.is_drafting = worst is not None
            row.account.reserve(worst or 0.0)
        return Decision(widths, worst)

    # --- when rounds have been read

    def spent(
        self,
        parts: Sequence[tuple[PolicyRow, int]],
        num_rows: int,
        seconds: float,
        decision: Decision | None = None,
    ) -> None:
        """A round of `num_rows` rows took `seconds`. parts: rows of this controller, and how many tokens each got. decision: None for a
        plain round."""
        plain = self.curve([row for row, _ in parts], num_rows).seconds(num_rows)
        rounds, share = seconds / plain, seconds / num_rows
        worst = None if decision is None else decision.worst
        gained = 0.0 if worst is None else sum(num for _, num in parts) / len(parts) - rounds
        for row, num_tokens in parts:
            row.account.settle(rounds, gained, worst or 0.0)
            self._num_tokens[row.kind] = self._num_tokens.get(row.kind, 0) + num_tokens
            row.tokens += num_tokens - FADE * row.tokens
            row.seconds += share - FADE * row.seconds

    def paused(self, rows: Sequence[PolicyRow], num_rows: int, seconds: float) -> None:
        """The plain round behind drafts took so much longer than one that runs ahead."""
        curve = self.curve(rows, num_rows)
        curve.pause += 2.0 * FADE * (seconds - curve.pause)
        share = seconds / curve.seconds(num_rows)
        self._wait += 2.0 * FADE * (share - self._wait)
        for row in rows:
            row.account.settle(0.0, -share)


def dearest(rows: Sequence[PolicyRow]) -> str:
    """The kind whose sampling costs a round of these rows most."""
    return max((r.kind for r in rows), key=lambda kind: 1 + DEARER.index(kind) if kind in DEARER else 0)


def _depths(curve: Curve, num_rows: int) -> Sequence[int]:
    """Lengths that drafts are cut to."""
    return curve.depths if num_rows == 1 else SHARED_DEPTHS


def _lookup(
    reach: Sequence[float], curve: Curve, num_rows: int, width: int, left: float
) -> tuple[float, int]:
    """Expected gain of a lookup's draft beside `width` other tokens, and the length that it is cut to; (0, 0) if it does not gain.
    reach[i]: the chance that its first i + 1 tokens are accepted. Lookups come in bursts, which set a pace of their own:
    what counts is the gain over plain decoding for each second of the round.

    What verifying takes longer must be within that share of what is left which is the chance that as many tokens are accepted as pay for
    it. A draft that fails leaves enough for the next one."""
    narrow, rate = curve.seconds(width), num_rows / curve.seconds(num_rows)
    cuts = [d for d in _depths(curve, num_rows) if d <= len(reach)]
    while cuts:
        longer = curve.seconds(width + cuts[-1]) - narrow
        back = ceil(longer * rate)
        if back <= cuts[-1] and longer <= (reach[back - 1] if back > 0 else 1.0) * left:
            break
        cuts.pop()
    best, depth, total, done = 0.0, 0, 0.0, 0
    for length in cuts:
        total += sum(reach[done:length])
        done, longer = length, PRUDENCE * (curve.seconds(width + length) - narrow)
        gain = (total - rate * longer) * narrow / (narrow + longer)
        if gain > best:
            best, depth = gain, length
    return best, depth


def _by_depth(reach: Sequence[float], curve: Curve, num_rows: int, rate: float) -> list[float]:
    """Expected gains of drafts of 0 to MODEL_DEPTH tokens that are cut where that pays, and behind them of those that are verified whole,
    without the price of drafting. reach: as in `_lookup`, for so many tokens."""
    plain, cuts, cut, whole, total = curve.seconds(num_rows), _depths(curve, num_rows), [0.0], [0.0], 0.0
    for length, chance in enumerate(reach, 1):
        total += chance
        whole.append(total - rate * PRUDENCE * (curve.seconds(num_rows + length) - plain))
        cut.append(max(cut[-1], whole[-1]) if length in cuts else cut[-1])
    return cut + whole


def _in_turn(
    reach: Sequence[float],
    num_drafted: int,
    curve: Curve,
    num_rows: int,
    width: int,
    rate: float,
    left: float,
) -> int:
    """How much of a model's draft of so many tokens pays part by part, by the chance of a part's first token. Later tokens have no say in
    whether one is verified. A part ends at the first length to which it pays, so it may cross a step of
    the curve where the plateau behind is long enough."""
    cuts = [d for d in _depths(curve, num_rows) if d <= num_drafted] or [num_drafted]
    length, taken, most = 0, curve.seconds(width), curve.seconds(width) + left
    for end in cuts:
        if length >= len(reach):
            break
        gain, seconds = reach[length], curve.seconds(width + end)
        if end > length + 1:
            chance = gain / (reach[length - 1] if length else 1.0)
            gain *= sum(chance**i for i in range(end - length))
        if seconds <= most and gain >= rate * (seconds - taken):
            length, taken = end, seconds
    return length
