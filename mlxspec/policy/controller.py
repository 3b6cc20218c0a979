"""Chooses for each round who drafts, how long, and how much of each draft is verified: of all choices the one with the most expected tokens
a second in this round.

    (rows + expected accepted tokens) / seconds of the round, its drafts included

Plain decoding is one of the choices. A round whose worst case the rows' accounts cannot pay is not run (account.py). A drafter that is not
expected to gain is asked now and then all the same, ever more rarely: a probe. Until a plain round has been timed all rounds are plain:
what drafts cost is guessed in plain rounds, and nothing could be weighed against the seconds that they take.

The calls of a round are `choose`, `asked` for each draft that a model makes, `trim`, and when the round has been read `learn` for each
draft and `spent`, which also teaches the costs. Rounds may be decided before those in front of them are read, because the accounts reserve
their worst cases; such rounds are told to `spent` in their order, each with its own decision.

Knows costs and chances as numbers; knows no tokens, no arrays and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil
from operator import mul
from typing import NamedTuple

from mlxspec.kernels.flat import LADDER
from mlxspec.policy.acceptance import MODEL_DEPTH, PROBED, TRUST, Offer
from mlxspec.policy.account import Account, Bank
from mlxspec.policy.costs import DEARER, FADE, MAX_TOKENS, CostModel, Curve, DraftCall

MARGIN = 1.02  # times the tokens a second of plain decoding that a draft must give, so that rounding alone never drafts
PRUDENCE = 1.06  # how many times a wider round counts: curves are never quite right, and too wide costs more than too narrow
PROBE_DEPTH = 3  # tokens of a probe
PROBE_COST = 2.5  # plain rounds: most that a probe may cost, catch-up included
PROBE_SHARE = (
    0.5  # of what the account can pay: a probe that predicts nothing right leaves enough for a draft
)
PROBE_GAP = 512.0  # tokens between two probes at most
LENGTH = 128.0  # tokens of an answer, until some have ended
_SHARED = 8.0  # drafts that share the price of catching up
_KEPT = 0.97  # of a row's own rate of acceptance, that each further token leaves


class Choice(NamedTuple):
    """A choice for one row: its drafter and the length of its draft. offer: index of the chosen n-gram draft; model: name of the chosen
    model drafter. depth: number of tokens to verify, or to draft. probe: the draft is made to measure the drafter, not because it is
    expected to pay. gain: expected tokens beyond plain decoding, in the time of a plain round. price: the most seconds that drafting
    takes."""

    offer: int | None = None
    model: str | None = None
    depth: int = 0
    probe: bool = False
    gain: float = 0.0
    price: float = 0.0


PLAIN = Choice()


class Decision(NamedTuple):
    """The decision on a round. widths: by row, the number of drafted tokens that are verified. worst: the plain rounds by which the
    round may at worst be late, None if it is plain. calls: of the models that drafted for it."""

    widths: Sequence[int] = ()
    worst: float | None = None
    calls: tuple[DraftCall, ...] = ()


PLAIN_ROUND = Decision()


class PolicyRow:
    """The controller's state of one row. kind: name of a group of rows whose drafts have one acceptance rate, such as greedy rows.
    bucket: context bucket. room: the most tokens that its answer may still have. streak: by n-gram drafter, the number of last tokens
    that it predicted right. own: by drafter, how many of its tokens were accepted and how many were compared with the text, both
    decaying. is_drafting: the last round decided for the row has drafts; is_behind_drafts: the last round read had."""

    __slots__ = ("account", "bucket", "is_behind_drafts", "is_drafting", "kind", "own", "room", "streak")

    def __init__(self, kind: str, bucket: int, start: float) -> None:
        self.kind, self.bucket, self.account = kind, bucket, Account(start)
        self.room = MAX_TOKENS
        self.streak: dict[str, int] = {}
        self.own: dict[str, tuple[float, float]] = {}
        self.is_drafting = self.is_behind_drafts = False


class Controller:
    """The rule that decides who drafts and how much is verified, for one engine. What it learns is in `costs` and outlives rows."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.bank = Bank() if costs.bank is None else Bank(costs.bank)
        self._num_tokens: dict[str, int] = {}  # by kind, that have come

    def row(self, kind: str) -> PolicyRow:
        """Return the state of a row whose answer begins."""
        return PolicyRow(kind, 0, self.bank.start)

    def curve(self, rows: Sequence[PolicyRow], num_rows: int | None = None) -> Curve:
        """Return the cost curve of rounds of `num_rows` rows, by default of these rows alone. The longest context among them decides the
        cost of attention."""
        return self.costs.curve(max(r.bucket for r in rows), num_rows or len(rows), dearest(rows))

    def is_sure(self, curve: Curve) -> bool:
        """Return whether the costs are known well enough to weigh drafts. If not, the next round is plain and timed."""
        return curve.is_timed and not curve.is_stale and not self.costs.is_in_doubt

    # --- chances

    def reaches(self, row: PolicyRow, offer: Offer) -> list[float]:
        """Return, for each token of a draft, the probability that it and all before it are accepted."""
        table = self.costs.accepted(row.kind, offer.drafter)
        cells, places = table.cells(offer, row.streak.get(offer.drafter, 0), MAX_TOKENS)
        return list(accumulate((cells.rates[place] for place in places), mul))

    def _usual(self, row: PolicyRow, name: str, limit: int) -> list[float]:
        """Return, for each token of a model's draft that does not exist yet, the probability that it and all before it are accepted:
        from the rates by depth of all rows of the kind, and this row's own rate."""
        right, num = row.own.get(name, (0.0, 0.0))
        usual = self.costs.accepted(row.kind, name).depths.rates[:limit]
        return list(accumulate(((TRUST * rate + right) / (TRUST + num) for rate in usual), mul))

    def learn(self, row: PolicyRow, offer: Offer, matched: int, known: int) -> None:
        """Learn how a draft compares with the text, verified or not: `known` tokens of the text exist, and the draft's first `matched`
        tokens equal them. The tokens after its first wrong one teach nothing."""
        name, known = offer.drafter, min(offer.length, known)
        table, streak = self.costs.accepted(row.kind, name), row.streak.get(name, 0)
        num = min(known, matched + 1)
        table.count(*table.cells(offer, streak, num), matched)
        table.count(table.depths, range(min(num, MODEL_DEPTH)), matched)
        right, met = row.own.get(name, (0.0, 0.0))
        row.own[name] = _KEPT**num * right + min(matched, num), _KEPT**num * met + num
        row.streak[name] = streak + matched if offer.length and matched >= known else 0

    # --- choosing who drafts

    def choose(
        self,
        rows: Sequence[PolicyRow],
        offers: Sequence[Sequence[Offer]],
        models: Sequence[Mapping[str, tuple[int, int]]],
    ) -> list[Choice]:
        """Return one choice for each row. offers: by row, the n-gram drafts, which cost next to nothing. models: by row and model
        drafter, the most tokens that it may draft and the number of known tokens that it has to run first."""
        curve, num_rows = self.curve(rows), len(rows)
        if not self.is_sure(curve):
            return [PLAIN] * num_rows
        left = self._available(rows, curve)
        choices, reaches, is_probing = list[Choice](), list[list[float]](), False
        for row, given, asked in zip(rows, offers, models, strict=True):
            choice, reach = PLAIN, list[float]()
            for i, offer in enumerate(given):
                chances = self.reaches(row, offer)
                gain, depth = self._best(row, chances, curve, num_rows, left, each=num_rows, is_lookup=True)
                if gain > choice.gain:
                    choice, reach = Choice(offer=i, depth=depth, gain=gain), chances
            for name, (limit, queued) in asked.items():
                chances = self._usual(row, name, limit)
                found = self._model(row, name, chances, queued, curve, num_rows, left)
                if found.gain > choice.gain:
                    choice, reach = found, chances
            if choice is PLAIN and asked and not is_probing:  # one row's probe holds up all: they take turns
                choice = self._probe(row, asked, curve, left)
                is_probing = choice.probe
            choices.append(choice)
            reaches.append([] if choice.probe else reach[: choice.depth])
        return choices if num_rows == 1 else self._together(rows, choices, reaches, models, curve, left)

    def _best(
        self,
        row: PolicyRow,
        reach: Sequence[float],
        curve: Curve,
        num_rows: int,
        left: float,
        *,
        each: int = 1,
        call: float = 0.0,
        step: float = 0.0,
        risk: float = 0.0,
        is_lookup: bool = False,
    ) -> tuple[float, int]:
        """Return the expected gain (`Choice.gain`) of the best length of a draft, and that length; (0.0, 0) where plain decoding is better.
        The best length gives the most expected tokens a second. Only lengths in LADDER are considered.

        reach: for each token, the probability that it and all before it are accepted. each: the number of rows that draft this many tokens.
        left: the most seconds that the worst case may cost, which is the extra time of the verify plus `risk` for each drafted token. call,
        step: expected seconds of drafting, for each call and for each token. is_lookup: keep enough of `left` for another draft if this one
        fails. The extra time of the verify must then be at most `left` times the probability that enough tokens are accepted to pay for it.
        """
        plain, best, length, total = curve.plain, MARGIN * num_rows / curve.plain, 0, 0.0
        for i, chance in enumerate(reach, 1):
            total += each * chance
            width = num_rows + each * i
            if (1 + i if num_rows == each else i) not in LADDER:
                continue
            longer = PRUDENCE * (curve.seconds(width) - plain)
            if longer + risk * i > left:
                break
            if is_lookup and longer > left * reach[_pays_back(longer * num_rows / plain / each, i) - 1]:
                continue
            seconds = plain + longer + call + step * i
            pace = (num_rows + total) / (seconds + self._compiling(row, num_rows, width, total / num_rows))
            if pace > best:
                best, length = pace, i
        return (best * plain - num_rows, length) if length else (0.0, 0)

    def _model(
        self,
        row: PolicyRow,
        name: str,
        reach: Sequence[float],
        queued: int,
        curve: Curve,
        num_rows: int,
        left: float,
    ) -> Choice:
        """Return the choice of the model drafter's best draft that the accounts can pay for, if all rows draft alike; PLAIN if there is
        none."""
        cost = self.costs.draft(name, row.kind, curve.plain)
        missed = num_rows * cost.queued * max(0, queued - 2) / _SHARED
        call = cost.seconds(0, min(queued, 2) * num_rows, num_rows) + missed
        step = cost.step * (1.0 + cost.row * (num_rows - 1))
        at_least = cost.seconds(0, queued)
        gain, depth = self._best(
            row,
            reach,
            curve,
            num_rows,
            left - at_least,
            each=num_rows,
            call=call,
            step=step,
            risk=cost.step,
        )
        if not depth:
            return PLAIN
        return Choice(model=name, depth=depth, gain=gain, price=at_least + cost.step * depth)

    def _probe(
        self, row: PolicyRow, models: Mapping[str, tuple[int, int]], curve: Curve, left: float
    ) -> Choice:
        """Return the choice of a probe of the drafter that was asked longest ago, if a probe of it is due and can be paid for; otherwise
        PLAIN."""
        most = min(PROBE_COST * curve.plain, PROBE_SHARE * left)
        for name in sorted(models, key=lambda n: self.costs.accepted(row.kind, n).asked_at):
            limit, queued = models[name]
            cost, depth = self.costs.draft(name, row.kind, curve.plain), min(PROBE_DEPTH, limit)
            price = cost.seconds(depth, queued)
            if depth > 0 and price <= most and self._is_due(row, name):
                return Choice(model=name, depth=depth, probe=True, price=price)
        return PLAIN

    def _is_due(self, row: PolicyRow, name: str) -> bool:
        """Return whether a drafter was last asked so many tokens ago that a probe of it is due."""
        table = self.costs.accepted(row.kind, name)
        return self._num_tokens.get(row.kind, 0) - table.asked_at >= table.gap

    def _compiling(self, row: PolicyRow, num_rows: int, width: int, gained: float) -> float:
        """Return the extra seconds of a round whose width has never run, divided by the number of rounds expected to have that width if
        each gives `gained` tokens more than a plain one."""
        if not self.costs.cold or (num_rows, width) in self.costs.ran:
            return 0.0
        return self.costs.cold / max(1.0, min(row.room, self._length(row)) / (1.0 + gained))

    def _length(self, row: PolicyRow) -> float:
        """Return the usual number of tokens of an answer of the row's kind."""
        return self.costs.lengths.get(row.kind, LENGTH)

    def _together(
        self,
        rows: Sequence[PolicyRow],
        choices: Sequence[Choice],
        reaches: Sequence[Sequence[float]],
        models: Sequence[Mapping[str, tuple[int, int]]],
        curve: Curve,
        left: float,
    ) -> list[Choice]:
        """Return the choices of several rows, cut from what each would choose if all drafted alike to its share of a round that pays as
        a whole."""
        priced = self._priced(rows, choices, models, curve)
        drafting = sum(c.price for c in priced)
        shares = self._share(rows, reaches, curve, left - drafting, drafting)
        cut = [
            c if c.probe else c._replace(depth=num) if num else PLAIN
            for c, num in zip(priced, shares, strict=True)
        ]
        return self._priced(rows, cut, models, curve)  # fewer rows may share a call now

    def _priced(
        self,
        rows: Sequence[PolicyRow],
        choices: Sequence[Choice],
        models: Sequence[Mapping[str, tuple[int, int]]],
        curve: Curve,
    ) -> list[Choice]:
        """Return the choices with their prices: rows that choose one model share the price of its call."""
        prices: dict[str | None, float] = {None: 0.0}
        for name in {c.model for c in choices if c.model is not None}:
            places = [i for i, c in enumerate(choices) if c.model == name]
            cost = self.costs.draft(name, dearest([rows[i] for i in places]), curve.plain)
            depth, queued = max(choices[i].depth for i in places), sum(models[i][name][1] for i in places)
            prices[name] = cost.seconds(depth, queued, len(places)) / len(places)
        return [c if c is PLAIN else c._replace(price=prices[c.model]) for c in choices]

    def _share(
        self,
        rows: Sequence[PolicyRow],
        reaches: Sequence[Sequence[float]],
        curve: Curve,
        left: float,
        drafting: float = 0.0,
    ) -> list[int]:
        """Return how many tokens of each row's draft a round verifies: the likeliest tokens of all rows, because all rows wait for the
        round. The first tokens of a wide round can be costly and the next ones nearly free, so no row pays for a step of the curve by
        itself. left: seconds by which verifying may take longer than a plain round."""
        order = sorted((-chance, row) for row, reach in enumerate(reaches) for chance in reach)
        chances = [-chance for chance, _ in order]
        num = self._best(rows[0], chances, curve, len(rows), left, call=drafting)[1]
        shares = [0] * len(rows)
        for _, row in order[:num]:
            shares[row] += 1
        return shares

    def stops(self, row: PolicyRow, name: str, confidences: Sequence[float]) -> bool:
        """Return whether a model's draft with tokens of these confidences should end here: the next token, assumed as likely as the mean
        of those before it, would lower the round's tokens a second."""
        num, curve = len(confidences), self.curve([row])
        reach, cost = (
            self.reaches(row, Offer(name, num, confidences)),
            self.costs.draft(name, row.kind, curve.plain),
        )
        seconds = cost.seconds(num, 1) + curve.seconds(1 + num)
        pace = max((1.0 + sum(reach)) / seconds, 1.0 / curve.plain)
        wider = curve.seconds(2 + num) - curve.seconds(1 + num)
        chance: float = reach[-1] ** (1.0 + 1.0 / num)
        return chance < pace * (cost.step + reach[-1] * wider)

    def _available(self, rows: Sequence[PolicyRow], curve: Curve) -> float:
        """Return the seconds by which a round of these rows may at worst be later than a plain round. The row with the least in its account
        decides. If these rows leave plain decoding now, the next plain round cannot run ahead of the host; the seconds that this costs are
        subtracted."""
        least = min(r.account.available(is_alone=len(rows) == 1) for r in rows)
        return least * curve.plain - self._pause(rows, curve)

    @staticmethod
    def _pause(rows: Sequence[PolicyRow], curve: Curve) -> float:
        """Return the seconds by which the next plain round takes longer if these rows leave plain decoding now; 0 if they have left it
        already."""
        return 0.0 if rows[0].is_drafting else curve.pause

    # --- with drafts at hand

    def asked(self, row: PolicyRow, choice: Choice) -> None:
        """Note that the chosen model is asked for a draft of this row."""
        table = self.costs.accepted(row.kind, choice.model or "")
        table.asked_at = self._num_tokens.get(row.kind, 0)
        table.gap = min(2.0 * table.gap, PROBE_GAP) if choice.probe else PROBED

    def trim(
        self, rows: Sequence[PolicyRow], drafts: Sequence[Offer | None], choices: Sequence[Choice]
    ) -> Decision:
        """Decide how many tokens of each row's draft are verified, reserve the round's worst case in the accounts, and return the
        decision. A model's draft without confidences has not been read: all of it is verified, and nothing of a probe."""
        if all(c is PLAIN for c in choices):
            for row in rows:
                row.is_drafting = False
            return Decision([0] * len(rows))
        curve, num_rows, drafting = self.curve(rows), len(rows), sum(c.price for c in choices)
        reaches, unread = list[list[float]](), [0] * num_rows
        for i, (row, draft, choice) in enumerate(zip(rows, drafts, choices, strict=True)):
            is_read = draft is not None and (choice.model is None or draft.confidences is not None)
            reaches.append(self.reaches(row, draft) if draft is not None and is_read else [])
            if choice.offer is not None:
                reaches[i] = reaches[i][: choice.depth]
            elif draft is not None and not is_read and not choice.probe:
                unread[i] = draft.length
        if num_rows == 1 and choices[0].offer is not None:
            shares = [choices[0].depth]
        else:
            left = self._available(rows, curve) - drafting
            shares = self._share(
                rows, reaches, curve, left - PRUDENCE * (curve.seconds(num_rows + sum(unread)) - curve.plain)
            )
        widths = [a + b for a, b in zip(shares, unread, strict=True)]
        width, worst = num_rows + sum(widths), None
        if drafting or width > num_rows:
            longer = PRUDENCE * max(0.0, curve.seconds(width) - curve.plain)
            worst = (drafting + longer + self._pause(rows, curve)) / curve.plain
        for row in rows:
            row.is_drafting = worst is not None
            row.account.reserve(worst or 0.0)
        return Decision(widths, worst)

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
        """Learn from a round of `num_rows` rows and `width` tokens, and charge it to the accounts. parts: the rows of this controller,
        each with the number of tokens it got. The other parameters are those of `CostModel.learn`."""
        rows = [row for row, _ in parts]
        curve, worst, gained = self.curve(rows, num_rows), decision.worst, 0.0
        is_behind = worst is None and rows[0].is_behind_drafts and not is_ahead and is_warm
        seconds = self.costs.learn(
            curve,
            width,
            decision.calls,
            seconds,
            is_plain=worst is None,
            follows_drafts=rows[0].is_behind_drafts,
            is_ahead=is_ahead,
            is_warm=is_warm,
            num_rounds=num_rounds,
        )
        rounds = seconds / curve.plain
        if worst is not None:
            gained = sum(num for _, num in parts) / len(parts) - rounds
        elif is_behind and width == num_rows:
            gained = 1.0 - rounds
        self.bank.settle(rounds, gained)
        self.costs.bank = self.bank.balance
        for row, num_tokens in parts:
            row.is_behind_drafts = worst is not None
            row.account.settle(rounds, gained, worst or 0.0)
            self._num_tokens[row.kind] = self._num_tokens.get(row.kind, 0) + num_tokens

    def ended(self, row: PolicyRow, num_tokens: int) -> None:
        """Learn the length of an answer that has ended."""
        usual = self._length(row)
        self.costs.lengths[row.kind] = usual + FADE * (num_tokens - usual)


def dearest(rows: Sequence[PolicyRow]) -> str:
    """Return the kind of sampling among these rows that makes a round slowest."""
    return max((r.kind for r in rows), key=lambda kind: 1 + DEARER.index(kind) if kind in DEARER else 0)


def _pays_back(tokens: float, length: int) -> int:
    """Return how many tokens of a draft of this length must be accepted to pay for `tokens` tokens: at least 1, at most the whole draft."""
    return max(1, min(ceil(tokens), length))
