"""Chooses for each round who drafts, how long, and how much of each draft is verified: the choice with the largest expected gain.

    gain = expected accepted tokens - rate x (seconds of the round - seconds of a plain round)

rate: the row's tokens a second. Plain decoding gains 0. A round whose worst case the rows' accounts cannot pay is not run (account.py). A
drafter that is not expected to gain is asked now and then all the same, ever more rarely: a probe. Until a plain round has been timed all
rounds are plain: what drafts cost is guessed in plain rounds, and nothing could be weighed against the seconds that they take.

The calls of a round are `choose`, `asked` for each draft that a model makes and `read` once that draft is known, `trim`, and when the round
has been read `learn` for each draft and `spent`, which also teaches the costs. Rounds may be decided before those in front of them are
read, because the accounts reserve their worst cases; such rounds are told to `spent` in their order, each with its own decision.

Knows costs and chances as numbers; knows no tokens, no arrays and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, inf
from typing import NamedTuple

from mlxspec.kernels.flat import LADDER
from mlxspec.policy.acceptance import MODEL_DEPTH, PROBED, Offer
from mlxspec.policy.account import CAP, Account, Bank
from mlxspec.policy.costs import DEARER, FADE, MAX_TOKENS, CostModel, Curve, DraftCall
from mlxspec.policy.shares import share_out

MARGIN = 0.02  # tokens that a draft must gain beyond plain decoding, so that rounding alone never drafts
PRUDENCE = 1.06  # how many times a wider round counts: curves are never quite right, and too wide costs more than too narrow
PROBE_DEPTH = 3  # tokens of a probe
PROBE_COST = 2.5  # plain rounds: most that a probe may cost, catch-up included
PROBE_SHARE = (
    0.5  # of what the account can pay: a probe that predicts nothing right leaves enough for a draft
)
PROBE_GAP = 512.0  # tokens between two probes at most
SMALL_SHARE = 0.1  # of the time of reading a prompt: a drafter that adds no more reads it in any case, so that it can be judged
READ = 0.1  # plain rounds that reading a token of a prompt is taken to take
LENGTH = 128.0  # tokens of an answer, until some have ended
_SHARED = 8.0  # drafts that share the price of catching up
_OWN = 4.0  # drafts of the kind that count beside a row's own
_OWN_DRAFTS = 16.0  # of a row's drafts that its mean is of, at most
_ROUNDS = 8.0  # plain rounds at the usual pace that a row's own pace is weighed against
_PACE = 0.01  # share of the usual pace that a plain round's time replaces


class Choice(NamedTuple):
    """Who drafts for a row. offer: index of the lookup's offer taken; model: the model drafter asked. depth: tokens of it that are verified
    or asked for. probe: to see whether it would pay, not because it is expected to. gain: tokens expected beyond plain decoding. price:
    seconds of drafting at most."""

    offer: int | None = None
    model: str | None = None
    depth: int = 0
    probe: bool = False
    gain: float = 0.0
    price: float = 0.0


PLAIN = Choice()


class Decision(NamedTuple):
    """A decided round. widths: by row, how many drafted tokens are verified. worst: plain rounds by which it may be late, None if it is
    plain. by_lookup: rows whose drafts are lookups'. calls: of models that drafted for it."""

    widths: Sequence[int] = ()
    worst: float | None = None
    by_lookup: frozenset[PolicyRow] = frozenset()
    calls: tuple[DraftCall, ...] = ()


PLAIN_ROUND = Decision()


class PolicyRow:
    """What the controller remembers of one row. kind: rows whose drafts fare alike, such as greedy ones. bucket: of its context. room:
    tokens that its answer may still have. streak: by lookup, tokens predicted right up to the end of the text. reach: by model, the mean
    reach of its drafts and how many there were. is_drafting: its last decided round was not plain;
    is_behind_drafts: the last one that was read was not."""

    __slots__ = (
        "account",
        "bucket",
        "is_behind_drafts",
        "is_drafting",
        "kind",
        "reach",
        "room",
        "seconds",
        "streak",
        "tokens",
    )

    def __init__(self, kind: str, bucket: int, start: float) -> None:
        self.kind, self.bucket, self.account = kind, bucket, Account(start)
        self.tokens = self.seconds = 0.0  # both fade
        self.room = MAX_TOKENS
        self.streak: dict[str, int] = {}
        self.reach: dict[str, tuple[list[float], float]] = {}
        self.is_drafting = self.is_behind_drafts = False


class Controller:
    """One for an engine. What it learns is in `costs` and outlives rows."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.bank = Bank() if costs.bank is None else Bank(costs.bank)
        self._num_tokens: dict[str, int] = {}  # by kind, that have come

    def row(self, kind: str) -> PolicyRow:
        """A row whose answer begins."""
        return PolicyRow(kind, 0, self.bank.start)

    def curve(self, rows: Sequence[PolicyRow], num_rows: int | None = None) -> Curve:
        """The curve of rounds of so many rows, these alone if not said otherwise. The longest of these decides what attention costs."""
        return self.costs.curve(max(r.bucket for r in rows), num_rows or len(rows), dearest(rows))

    def is_sure(self, curve: Curve) -> bool:
        """Whether costs are known so well that drafts can be weighed; else the next round is plain, and timed."""
        return curve.is_timed and not self.costs.is_in_doubt

    # --- chances

    def reaches(self, row: PolicyRow, offer: Offer) -> list[float]:
        """For each token of a draft the probability that it and all before it are accepted; shorter where hardly any is."""
        table, out, reach = self.costs.accepted(row.kind, offer.drafter), [], 1.0
        cells, places = table.cells(offer, row.streak.get(offer.drafter, 0), MAX_TOKENS)
        for place in places:
            reach *= cells.rates[place]
            out.append(reach)
            if reach < MARGIN:
                break
        return out

    def learn(self, row: PolicyRow, offer: Offer, matched: int, known: int) -> None:
        """Learn how a draft fared, verified or not: `known` tokens have come, and its first `matched` tokens are among them. The tokens
        after its first wrong one teach nothing."""
        name, known = offer.drafter, min(offer.length, known)
        table, streak = self.costs.accepted(row.kind, name), row.streak.get(name, 0)
        cells, places = table.cells(offer, streak, min(known, matched + 1))
        table.count(cells, places, matched)
        row.streak[name] = streak + matched if offer.length and matched >= known else 0

    def _reach(self, row: PolicyRow, name: str) -> list[float]:
        """The chances of a model's next draft by depth: of its drafts for this row, beside those for all rows of the kind."""
        usual = self.costs.accepted(row.kind, name).reach
        own, num = row.reach.get(name, (usual, 0.0))
        return [(_OWN * u + num * o) / (_OWN + num) for u, o in zip(usual, own, strict=True)]

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
        if not self.is_sure(curve):
            return [PLAIN] * num_rows
        left = self._available(rows, curve)
        choices, reaches, is_probing = list[Choice](), list[Sequence[float]](), False
        for row, given, asked in zip(rows, offers, models, strict=True):
            choice, reach = PLAIN, list[float]()
            for i, offer in enumerate(given):
                expected = self.reaches(row, offer)
                gain, depth = self._longest(row, expected, num_rows, left, curve=curve)
                if gain > max(choice.gain, MARGIN):
                    choice, reach = Choice(offer=i, depth=depth, gain=gain), expected
            for name, (limit, queued) in asked.items():
                found = self._model(row, name, limit, queued, curve, num_rows, left)
                if found.gain > max(choice.gain, MARGIN):
                    choice, reach = found, self._reach(row, name)
            if choice is PLAIN and asked and not is_probing:  # one row's probe holds up all: they take turns
                choice = self._probe(row, asked, curve, num_rows, left)
                is_probing = choice.probe
            choices.append(choice)
            reaches.append([] if choice.probe else reach[: choice.depth])
        return choices if num_rows == 1 else self._together(rows, choices, reaches, models, curve, left)

    def _together(
        self,
        rows: Sequence[PolicyRow],
        choices: Sequence[Choice],
        reaches: Sequence[Sequence[float]],
        models: Sequence[Mapping[str, tuple[int, int]]],
        curve: Curve,
        left: float,
    ) -> list[Choice]:
        """What each of several rows chose if all drafted alike, cut to its share of a round that pays as a whole."""
        prices: dict[str | None, float] = {None: 0.0}
        for name in {c.model for c in choices if c.model is not None}:
            places = [i for i, c in enumerate(choices) if c.model == name]
            cost = self.costs.draft(name, dearest([rows[i] for i in places]), curve.plain)
            depth, queued = max(choices[i].depth for i in places), sum(models[i][name][1] for i in places)
            prices[name] = cost.seconds(depth, queued, len(places)) / len(places)
        priced = [c._replace(price=prices[c.model]) for c in choices]
        shares = self._shares(rows, priced, reaches, curve, left - sum(c.price for c in priced))
        return [
            c if c.probe else c._replace(depth=num) if num else PLAIN
            for c, num in zip(priced, shares, strict=True)
        ]

    def _shares(
        self,
        rows: Sequence[PolicyRow],
        choices: Sequence[Choice],
        reaches: Sequence[Sequence[float]],
        curve: Curve,
        left: float,
    ) -> list[int]:
        """How many tokens of each row's draft several rows verify together. left: seconds that verifying may take longer."""
        num_rows, plain = len(rows), curve.plain

        def longer(num: int, accepted: float) -> float:
            seconds = curve.seconds(num_rows + num) - plain
            if seconds > left:
                return inf
            return seconds + self._compiling(rows[0], num_rows, num_rows + num, accepted / num_rows)

        rates = [
            num_rows / plain if c.model is None else self._rate(row, plain, num_rows)
            for row, c in zip(rows, choices, strict=True)
        ]
        return share_out(reaches, rates, longer)

    def _longest(
        self,
        row: PolicyRow,
        reach: Sequence[float],
        num_rows: int,
        left: float,
        *,
        curve: Curve,
        rate: float | None = None,
        call: float = 0.0,
        step: float = 0.0,
        worst: float = 0.0,
    ) -> tuple[float, int]:
        """Expected gain of a draft if all rows draft as much, and the length that it is cut to; (0, 0) if it does not gain.

        reach[i]: the chance that its first i + 1 tokens are accepted. left: seconds that verifying may take longer, and drafting. call,
        step: seconds of drafting however long, and for each token; worst: for each token if no other row shares the call. rate: tokens a
        second without the draft; None for a lookup's: lookups come in bursts, which set a pace of their own, so what counts is the gain
        over plain decoding for each second of the round. A lookup's draft that fails leaves enough for the next one: what verifying takes
        longer must be within that share of what is left which is the chance that as many tokens are accepted as pay for it."""
        narrow, price = curve.plain, num_rows / curve.plain if rate is None else rate
        best, depth, total, done = 0.0, 0, 0.0, 0
        for length in _lengths(len(reach)):
            longer = (curve.seconds(num_rows + num_rows * length) - narrow) / num_rows
            if longer + worst * length > left:
                break
            total += sum(reach[done:length])
            done = length
            back = min(length, ceil(longer * price)) if rate is None else 0
            if back and longer > reach[back - 1] * left:
                continue
            longer = (
                PRUDENCE * longer
                + call
                + step * length
                + self._compiling(row, num_rows, num_rows * (1 + length), total)
            )
            gain = total - price * longer
            if rate is None:
                gain *= narrow / (narrow + longer)
            if gain > best:
                best, depth = gain, length
        return best, depth

    def _model(
        self, row: PolicyRow, name: str, limit: int, queued: int, curve: Curve, num_rows: int, left: float
    ) -> Choice:
        """The best draft of a model drafter, as far as the accounts can pay; PLAIN if there is none."""
        cost, rate = self.costs.draft(name, row.kind, curve.plain), self._rate(row, curve.plain, num_rows)
        missed = cost.queued * max(0, queued - 2) / _SHARED
        call = cost.seconds(0, min(queued, 2) * num_rows, num_rows) / num_rows + missed
        step = cost.step * (1.0 + cost.row * (num_rows - 1)) / num_rows
        at_least, reach = cost.seconds(0, queued), self._reach(row, name)[:limit]
        gain, depth = self._longest(
            row,
            reach,
            num_rows,
            left - at_least,
            curve=curve,
            rate=rate,
            call=call,
            step=step,
            worst=cost.step,
        )
        if not depth:
            return PLAIN
        return Choice(model=name, depth=depth, gain=gain, price=at_least + cost.step * depth)

    def _probe(
        self,
        row: PolicyRow,
        models: Mapping[str, tuple[int, int]],
        curve: Curve,
        num_rows: int,
        left: float,
    ) -> Choice:
        """The drafter that was asked least lately, if a probe of it is due and can be paid for; else PLAIN."""
        most = min(PROBE_COST * curve.plain, PROBE_SHARE * left)
        for name in sorted(models, key=lambda n: self.costs.accepted(row.kind, n).asked_at):
            limit, queued = models[name]
            cost, depth = self.costs.draft(name, row.kind, curve.plain), min(PROBE_DEPTH, limit)
            price = cost.seconds(depth, queued)
            if depth > 0 and price <= most and self._is_due(row, name):
                return Choice(model=name, depth=depth, probe=True, price=price)
        return PLAIN

    def _is_due(self, row: PolicyRow, name: str) -> bool:
        """Whether a drafter has not been asked for so long that a probe is due."""
        table = self.costs.accepted(row.kind, name)
        return self._num_tokens.get(row.kind, 0) - table.asked_at >= table.gap

    def _compiling(self, row: PolicyRow, num_rows: int, width: int, gained: float) -> float:
        """Seconds that a round of a width which has never run takes longer, shared by the rounds that will have that width if each gives
        `gained` tokens more than a plain one."""
        if not self.costs.cold or (num_rows, width) in self.costs.ran:
            return 0.0
        left = min(row.room, self.costs.lengths.get(row.kind, LENGTH))
        return self.costs.cold / max(1.0, left / (1.0 + gained))

    def stops(self, row: PolicyRow, name: str, confidences: Sequence[float]) -> bool:
        """Whether a model's draft, of which these tokens have been made, is better verified as it is than continued: the next token, taken
        to be as likely as those on average, does not pay for its own step and place."""
        offer, num = Offer(name, len(confidences), confidences), len(confidences)
        reach = self.reaches(row, offer)
        if len(reach) < num:
            return True
        curve = self.curve([row])
        wider = curve.seconds(2 + num) - curve.seconds(1 + num)
        more = self.costs.draft(name, row.kind, curve.plain).step + PRUDENCE * reach[-1] * wider
        chance: float = reach[-1] ** (1.0 + 1.0 / num)
        return chance < self._rate(row, curve.plain, 1) * more

    # --- what else has to be weighed

    def should_read(self, row: PolicyRow, name: str, queued: int, *, is_beside: bool = True) -> bool:
        """Whether a drafter reads so many tokens of a prompt. is_beside: the target reads them too; a drafter that adds little to that
        reads them in any case, so that it can be judged. Otherwise it reads what costs a plain round at most, or a probe where one
        is due, and what its drafts are expected to gain in an answer of the usual length."""
        curve = self.costs.curve(row.bucket, 1, row.kind)
        cost = self.costs.draft(name, row.kind, curve.plain)
        if is_beside and cost.share < SMALL_SHARE:
            return True
        price = cost.share * READ * queued  # plain rounds
        if price <= (PROBE_COST if self._is_due(row, name) else 1.0):
            return True
        gain = self._model(row, name, MODEL_DEPTH, 1, curve, 1, CAP * curve.plain).gain
        rounds = self.costs.lengths.get(row.kind, LENGTH) / (1.0 + sum(self._reach(row, name)[:PROBE_DEPTH]))
        return gain * rounds > self._rate(row, curve.plain, 1) * price * curve.plain

    def can_catch_up(self, rows: Sequence[PolicyRow], name: str, queued: int) -> bool:
        """Whether rows that decode together could ever pay for a drafter's catching up on so many tokens."""
        plain = self.curve(rows).plain
        return self.costs.draft(name, rows[0].kind, plain).seconds(1, queued) <= CAP * plain

    def _available(self, rows: Sequence[PolicyRow], curve: Curve) -> float:
        """Seconds that a round of these rows may take at worst beyond a plain one and beyond what it keeps from running ahead."""
        least = min(r.account.available(is_alone=len(rows) == 1) for r in rows)
        return least * curve.plain - self._pause(rows, curve)

    @staticmethod
    def _pause(rows: Sequence[PolicyRow], curve: Curve) -> float:
        """Seconds by which the plain round behind is longer if these rows leave plain decoding now; nothing if they have left it."""
        return 0.0 if rows[0].is_drafting else curve.pause

    def _rate(self, row: PolicyRow, plain: float, num_rows: int) -> float:
        """Tokens a second that the row gets without the draft in question, as though some time at the usual pace of such rows had gone
        before; at least those of plain decoding."""
        usual = self.costs.pace.get((row.kind, num_rows), 1.0)
        own = (row.tokens + _ROUNDS * usual) / (row.seconds + _ROUNDS * plain / num_rows)
        return max(own, num_rows / plain)

    # --- with drafts at hand

    def asked(self, row: PolicyRow, choice: Choice) -> None:
        """The chosen model drafts for a row."""
        table = self.costs.accepted(row.kind, choice.model or "")
        table.asked_at = self._num_tokens.get(row.kind, 0)
        table.gap = min(2.0 * table.gap, PROBE_GAP) if choice.probe else PROBED

    def read(self, row: PolicyRow, draft: Offer) -> None:
        """What a model has drafted is known, at once or with the round that verified it."""
        table, reach = self.costs.accepted(row.kind, draft.drafter), self.reaches(row, draft)
        if not reach:
            return
        more = reach[-1] ** (1.0 / len(reach)) if len(reach) >= draft.length else 0.0
        while len(reach) < MODEL_DEPTH:
            reach.append(reach[-1] * more)
        own, num = row.reach.get(draft.drafter, (reach, 0.0))
        num = min(num + 1.0, _OWN_DRAFTS)
        row.reach[draft.drafter] = [a + (b - a) / num for a, b in zip(own, reach, strict=False)], num
        table.drafted(reach[:MODEL_DEPTH])

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
        left = self._available(rows, curve) - drafting
        reaches, unread = list[list[float]](), [0] * num_rows
        for i, (row, draft, choice) in enumerate(zip(rows, drafts, choices, strict=True)):
            is_read = draft is not None and (choice.model is None or draft.confidences is not None)
            reaches.append(self.reaches(row, draft) if draft is not None and is_read else [])
            if choice.offer is not None:
                reaches[i] = reaches[i][: choice.depth]
            elif draft is not None and not is_read and not choice.probe:
                unread[i] = draft.length
        if num_rows > 1:
            left -= curve.seconds(num_rows + sum(unread)) - curve.plain
            shares = self._shares(rows, choices, reaches, curve, left)
        elif choices[0].offer is not None:
            shares = [choices[0].depth]
        else:
            rate = self._rate(rows[0], curve.plain, 1)
            shares = [self._longest(rows[0], reaches[0], 1, left, curve=curve, rate=rate)[1]]
        widths = [a + b for a, b in zip(shares, unread, strict=True)]
        width = num_rows + sum(widths)
        worst = None
        if drafting or width > num_rows:
            longer = max(0.0, curve.seconds(width) - curve.plain)
            worst = (drafting + longer + self._pause(rows, curve)) / curve.plain
        for row in rows:
            row.is_drafting = worst is not None
            row.account.reserve(worst or 0.0)
        looked_up = (row for row, choice in zip(rows, choices, strict=True) if choice.offer is not None)
        return Decision(widths, worst, frozenset(looked_up))

    # --- when rounds have been read

    def spent(
        self,
        parts: Sequence[tuple[PolicyRow, int]],
        num_rows: int,
        width: int,
        seconds: float,
        decision: Decision = PLAIN_ROUND,
        *,
        is_ahead: bool = False,
        is_warm: bool = True,
        num_rounds: int = 1,
    ) -> None:
        """A round of `num_rows` rows and `width` tokens took `seconds`, from drafting to reading it. parts: rows of this controller, and
        how many tokens each got. is_ahead: it was launched before the one in front was read; is_warm: nothing was compiled in it.
        num_rounds: so many plain ones together.

        A plain round behind drafts cannot run ahead: what it takes longer is a cost of those drafts. A round that something else held up
        counts as expected (`CostModel.took`)."""
        rows = [row for row, _ in parts]
        curve, worst, gained = self.curve(rows, num_rows), decision.worst, 0.0
        usual = 0.0 if is_warm else self.costs.seconds(curve, width, decision.calls)
        self.costs.compiled(num_rows, width, None if is_warm else seconds - usual)
        if not is_warm:
            seconds = min(seconds, usual)
        elif worst is None and width == num_rows and rows[0].is_behind_drafts and not is_ahead:
            longer = max(0.0, min(seconds - curve.plain, curve.plain))
            curve.pause += 2.0 * FADE * (longer - curve.pause)
            gained, seconds = -curve.pause / curve.plain, curve.plain + curve.pause
        elif decision.calls or width > num_rows or worst is None:
            seconds = num_rounds * self.costs.took(curve, width, decision.calls, seconds / num_rounds)
        rounds, share = seconds / curve.plain, seconds / num_rows
        if worst is not None:
            gained = max(-worst, sum(num for _, num in parts) / len(parts) - rounds)
        self.bank.settle(rounds, gained)
        self.costs.bank = self.bank.balance
        fade = FADE if num_rounds == 1 else 1.0 - (1.0 - FADE) ** num_rounds
        for row, num_tokens in parts:
            row.is_behind_drafts = worst is not None
            row.account.settle(rounds, gained, worst or 0.0)
            self._num_tokens[row.kind] = self._num_tokens.get(row.kind, 0) + num_tokens
            if row in decision.by_lookup:
                continue  # the pace between lookups is the one at which a model's draft saves time
            key = row.kind, num_rows
            pace = self.costs.pace.get(key, 1.0)
            self.costs.pace[key] = pace + _PACE * min(rounds, _ROUNDS) * (num_tokens / rounds - pace)
            row.tokens += num_tokens - fade * row.tokens
            row.seconds += share - fade * row.seconds

    def ended(self, row: PolicyRow, num_tokens: int) -> None:
        """An answer of so many tokens has ended."""
        usual = self.costs.lengths.get(row.kind, LENGTH)
        self.costs.lengths[row.kind] = usual + FADE * (num_tokens - usual)


def dearest(rows: Sequence[PolicyRow]) -> str:
    """The kind whose sampling costs a round of these rows most."""
    return max((r.kind for r in rows), key=lambda kind: 1 + DEARER.index(kind) if kind in DEARER else 0)


def _lengths(most: int) -> list[int]:
    """Lengths that a draft of so many tokens at most is cut to: a round of one row has a width of the ladder."""
    return [w - 1 for w in LADDER if 0 < w - 1 <= most]
