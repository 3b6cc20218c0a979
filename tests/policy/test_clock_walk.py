"""A walk over policy auto in a simulated clock: random machines, drafters whose luck turns, drift, theft, rows that join and leave,
restarts. The drafters' texts are invented and nothing is computed; `Drafts`, `Auto` and all that it knows are the real ones.

After every step the promises are checked in the clock's own time: no row is later than its account granted, but for what the policy itself
leaves out; a round's worst case is paid by every account in it; shares of a round are the best; each draft is judged once, by the text;
each second and each token reaches the controller once; and the next process reads what this one wrote.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from planting import catches

from mlxspec.config import SpecConfig
from mlxspec.drafters import drafts as drafts_module
from mlxspec.drafters.base import Ask, Draft, Drafter
from mlxspec.drafters.drafts import Drafts
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.drafters.policy import RoundPlan
from mlxspec.kernels.flat import LADDER
from mlxspec.policy.acceptance import PROBED, TRUST, Acceptance, Offer
from mlxspec.policy.account import GROWTH, LEAST, MOST
from mlxspec.policy.auto import REST, Auto
from mlxspec.policy.controller import (
    LENGTH,
    MARGIN,
    PLAIN,
    PROBE_COST,
    PROBE_DEPTH,
    PROBE_GAP,
    PRUDENCE,
    Controller,
    PolicyRow,
)
from mlxspec.policy.costs import FORGET, SOON, STALE, CostModel, Curve, DraftCost, bucket
from mlxspec.policy.doubt import CLIP

VOCAB, WIDEST, STEPS = 64, 64, 500
SEEDS = (*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 60)))
KINDS = ("greedy", "sampled", "constrained")  # in the order of what they cost
LOOKUP, MODELS = "ngram-simple", ("mtp", "draft-model")
ROUNDING = 1e-6  # plain rounds


@dataclass
class Machine:
    """A machine. plain: seconds of one greedy row's plain round. rise: by drafted tokens of a round, plain rounds that they add. drafts:
    plain rounds. pause: plain rounds that a plain round takes longer behind drafts. compiling: seconds of a shape's first round, or 0."""

    plain: float
    rise: np.ndarray
    drafts: dict[str, DraftCost]
    pause: float = 0.0
    compiling: float = 0.0
    noise: float = 0.0
    speed: float = 1.0
    wide: float = 1.0  # times what drafted tokens add
    a_row: float = 0.1
    by_kind: float = 0.0
    ran: set[tuple[int, int]] = field(default_factory=set)

    def plain_seconds(self, num_rows: int, kind: str = "greedy", bucket: int = 0) -> float:
        dearer = 1.0 + self.by_kind * KINDS.index(kind) + 0.5 * self.by_kind * bucket
        return self.speed * self.plain * dearer * (1.0 + self.a_row * (num_rows - 1))

    def seconds(self, num_rows: int, width: int, kind: str = "greedy", bucket: int = 0) -> float:
        plain = self.plain_seconds(num_rows, kind, bucket)
        return plain + self.speed * self.plain * self.wide * float(self.rise[width - num_rows])

    def drafting(self, name: str, depth: int, queued: int, num_rows: int) -> float:
        return self.speed * self.plain * self.drafts[name].seconds(depth, queued, num_rows)


@dataclass(eq=False, repr=False)
class Row:
    """A row that decodes. history: what its drafters and policy know; text: what the rounds on their way have decided as well. planned: by
    place, what comes if nobody prevents it. luck: by drafter, how likely a drafted token is right, how sure its drafter is, and until which
    place that holds. own: what the controller knows of it; late, elapsed: plain rounds by the clock; left_out: of them, what the policy's
    theorem leaves out."""

    number: int
    kind: str
    history: list[int]
    text: list[int]
    end: int
    planned: dict[int, int] = field(default_factory=dict)
    luck: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    own: PolicyRow = field(init=False)
    start: float = 0.0
    late: float = 0.0
    elapsed: float = 0.0
    left_out: float = 0.0

    def plan(self, place: int, rng: np.random.Generator) -> int:
        if place not in self.planned:
            self.planned[place] = int(rng.integers(VOCAB))
        return self.planned[place]


# of a row's balance, a round's worst case, both in plain rounds, and its right tokens: how many of those are right all the same
Judge = Callable[[float, float, int], int]


class Invented:
    """What both kinds of drafters here say: the text that is planned, as often as their luck has it."""

    walk: Walk

    def said(self, row: Row, place: int, limit: int) -> tuple[list[int], list[float]]:
        rng, tokens, sure = self.walk.rng, list[int](), list[float]()
        right, claim = self.walk.luck(row, self.name, place)  # type: ignore[attr-defined]
        is_on, doubted = True, int(rng.integers(3 * limit)) if limit else 0
        for i in range(limit):
            doubtful = i == doubted and not self.walk.is_flat
            is_on = is_on and rng.random() < (0.03 if doubtful else right)
            known = row.text[place + i] if place + i < len(row.text) else row.plan(place + i, rng)
            tokens.append((known + (0 if is_on else 1)) % VOCAB)
            sure.append(0.03 if doubtful else float(np.clip(claim + 0.02 * rng.normal(), 0.01, 0.99)))
        return tokens, sure


class Looker(Invented, Drafter):
    name = LOOKUP

    def __init__(self) -> None:
        self.heard = dict[int, list[int]]()

    def begin(self, row: int) -> None:
        self.heard[row] = []

    def hear(self, row: int, tokens: Sequence[int], hidden: Any) -> None:
        self.heard[row] += tokens

    def draft(self, asks: Sequence[Ask], sampler: Any) -> list[Draft]:
        found = []
        for ask in asks:
            row = self.walk.rows[ask.row]
            assert self.heard[ask.row] == list(ask.history), "it has not heard all of its text"
            limit = min(ask.limit, 16) if self.walk.rng.random() < self.walk.finds else 0
            tokens, _ = self.said(row, len(ask.history), limit)
            self.walk.looked[ask.row] = len(ask.history), tokens
            backing = None if self.walk.rng.random() < 0.3 else int(self.walk.rng.integers(30))
            found.append(Draft.of(tokens)._replace(backing=backing))
        return found


class Head(Invented, ModelDrafter):
    """A drafter that runs a model, token by token."""

    def __init__(self, name: str) -> None:
        self.name, self.heard, self.is_warm = name, dict[int, int](), True
        self.queued = 0  # tokens that the last call ran first

    _forward = None  # type: ignore[assignment]

    def begin(self, row: int) -> None:
        self.heard[row] = 0

    def hear(self, row: int, tokens: Sequence[int], hidden: Any) -> None:
        self.heard[row] += len(tokens)

    def prime(self, row: int) -> None:
        self.heard[row] = min(self.heard[row], 1)

    def num_queued(self, row: int) -> int:
        return self.heard[row]

    def forget(self, row: int) -> None:
        self.heard.pop(row, None)

    def draft(self, asks: Sequence[Ask], sampler: Any) -> list[Draft]:
        found, self.queued = [], 0
        for ask in asks:
            row, place = self.walk.rows[ask.row], len(ask.history)
            assert ask.history[-4:] == row.text[-4:], "it has not heard all of its text"
            tokens, sure = self.said(row, place, ask.limit)
            if ask.stops is not None:
                num = next((n for n in range(1, ask.limit) if ask.stops(sure[:n])), ask.limit)
                self.walk.check_length(row, self.name, sure[:num])
                tokens, sure = tokens[:num], sure[:num]
            self.queued += self.heard[ask.row]
            self.heard[ask.row] = 0
            found.append(Draft(len(tokens), mx.array(tokens), mx.array(sure)))
        return found

    def draft_behind(self, asks: Sequence[Ask], sampler: Any, unread: Any) -> list[Draft]:
        found, self.queued = [], 0
        for ask in asks:
            self.queued += self.heard[ask.row] + 1  # of the unread round a token at least
            row = self.walk.rows[ask.row]
            tokens, sure = self.said(row, len(row.text), ask.limit)
            found.append(Draft(len(tokens), mx.array(tokens), mx.array(sure)))
        return found


@dataclass(kw_only=True, repr=False)
class Last:
    """The last round that was read. plain, own, held_up: seconds of a plain round, of this one, and what it took longer by accident; late:
    plain rounds by which its rows fell behind plain decoding."""

    kind: str
    bucket: int
    width: int
    plain: float
    own: float
    held_up: float
    late: float
    is_plain: bool
    is_warm: bool
    curve: Curve
    rows: list[Row]


@dataclass(kw_only=True, repr=False)
class Way:
    """A round on its way. outcome: by row, the tokens that it gives; worst: what was reserved for it."""

    rows: list[Row]
    plan: RoundPlan
    widths: list[int]
    outcome: list[list[int]]
    worst: float | None
    ahead: bool

    @property
    def is_open(self) -> bool:
        return any(self.widths)


class Unseen(SimpleNamespace):
    """In place of the arrays of an unread round, of which no drafter here needs any."""

    hidden = None

    def select(self, places: Sequence[int]) -> Unseen:
        return self

    def _replace(self, **more: Any) -> Unseen:
        return self


class Walk:
    """A machine, its rows and the real policy. known: whether costs are known exactly and nothing disturbs rounds, so that the theorem
    holds to the last bit."""

    def __init__(self, seed: int, *, known: bool, patch: pytest.MonkeyPatch) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.is_flat = (
            not known and seed % 4 == 0
        )  # wide rounds cost next to nothing, and all drafts are right
        self.known, self.rows, self.live = known, dict[int, Row](), list[Row]()
        patch.setattr(drafts_module, "BatchSampler", lambda *_: None)
        steps = rng.uniform(0.0, 0.6, WIDEST + 1) * (rng.random(WIDEST + 1) < rng.uniform(0.1, 1.0))
        steps[0] = 0.0
        steps *= 0.02 if self.is_flat else 1.0
        drafts = {
            name: DraftCost(
                call=rng.uniform(0, 0.1), step=rng.uniform(0.02, 0.25), queued=rng.uniform(0, 0.02)
            )
            for name in MODELS
        }
        self.machine = Machine(plain=10 ** rng.uniform(-3, -1), rise=steps.cumsum(), drafts=drafts)
        if not known:
            self.machine.pause = rng.choice([0.0, 0.3])
            self.machine.noise, self.machine.by_kind = 0.02, rng.choice([0.0, 0.2])
            self.machine.compiling = rng.choice([0.0, 5.0, 80.0]) * self.machine.plain
        self.finds = 0.9 if self.is_flat else rng.uniform(0.1, 0.9)
        self.judge: Judge = (as_it_is, never, always, full, dear)[seed % 5] if known else as_it_is
        self.runs_ahead = seed % 2 == 1
        self.most, self.restarts = 1 if seed % 3 == 0 else 4, 0.0 if known or seed % 3 == 0 else 0.008
        if self.is_flat:
            self.most, self.restarts, self.machine.compiling = 1, 0.0, 0.0
        self.next: Way | None = None
        self.looked = dict[
            int, tuple[int, list[int]]
        ]()  # by row, the last lookup: at which place, and what it gave
        self.did = Counter[str]()
        self.number = 0
        self.stolen, self.thieves = (
            0.0,
            0,
        )  # shares of the next round; rounds of which others take more than half
        self.begin_process(self.first_costs())

    def first_costs(self) -> CostModel:
        if not self.known:
            return CostModel(
                guesses={n: DraftCost(call=0.05, step=0.3) for n in MODELS}, pause=self.machine.pause
            )
        costs, machine = CostModel(), self.machine
        for rows in range(4, 0, -1):
            every = {w: machine.seconds(rows, w) for w in range(rows, WIDEST + 1)}
            drafts = {n: d.times(machine.plain) for n, d in machine.drafts.items()}
            costs.know(every, drafts, num_rows=rows)
        return costs

    def begin_process(self, costs: CostModel) -> None:
        self.costs, self.control = costs, Controller(costs)
        self.policy = Auto(self.control)
        self.policy.runs_ahead = self.runs_ahead
        self.drafts = Drafts([Looker(), *(Head(n) for n in MODELS)], VOCAB)
        for drafter in self.drafts.drafters.values():
            drafter.walk = self  # type: ignore[attr-defined]
        self.came = Counter[str]()  # by kind, tokens that the controller has been told of
        self.asked = {key: [0.0, table.gap] for key, table in costs.acceptance.items()}
        self.is_timed = bool(costs.as_data()["curves"])
        self.kept_curves = set[Curve]() if self.known and not self.did else set(costs._curves.values())
        self.tries = dict[
            Curve, dict[int, int]
        ]()  # by curve and width, its last round of these; 0: how many there were
        self.since = Counter[Curve]()  # rounds with verified drafts since a plain one was timed
        self.usual = Counter[
            tuple[Any, ...]
        ]()  # by kind of round, those in which nothing was stolen, since something was
        self.unspent = deque[
            tuple[float, int]
        ]()  # seconds and tokens of rounds of which the controller has not been told
        self.pending = defaultdict[tuple[int, str], list[tuple[int, list[int], bool]]](list)
        self.machine.ran = set()
        self.taught = Counter[
            tuple[str, int, int]
        ]()  # by kind, rows and bucket, rounds that have taught a curve
        self.scaled = (
            False  # whether the last round that was learned showed that the machine has another speed
        )
        self.late = deque[tuple[Any, ...]](maxlen=3)  # kinds of the last rounds, where they were late
        self.off = 0.0  # of the last round, the logarithm of what it took over what was expected
        self.reading: Way | None = None
        for owner, names in (
            (self.control, ("choose", "spent", "trim", "asked", "_share")),
            (self.policy, ("judge",)),
            (costs, ("learn",)),
        ):
            for name in names:
                seen = partial(getattr(self, f"seen_{name.strip('_')}"), getattr(owner, name))
                setattr(owner, name, seen)

    # --- the world

    def luck(self, row: Row, name: str, place: int) -> tuple[float, float]:
        right, sure, until = row.luck.get(name, (0.0, 0.0, 0))
        if self.is_flat:
            return 1.0, 1.0
        if place >= until:
            right = float(self.rng.choice([0.0, 0.4, 0.8, 0.97, 1.0]))
            sure = right if self.rng.random() < 0.7 else 0.97
            row.luck[name] = right, sure, place + int(self.rng.integers(5, 120))
        return right, sure

    def join(self) -> None:
        self.drop()
        self.number += 1
        kind = "greedy" if self.known else KINDS[int(self.rng.integers(3))]
        length = 10 if self.known else int(self.rng.choice([10, 1010, 1010, 5000]))
        history = [int(t) for t in self.rng.integers(VOCAB, size=length)]
        row = Row(self.number, kind, history, list(history), length + int(self.rng.integers(2, 160)))
        sampler = SimpleNamespace(
            is_greedy=kind == "greedy", is_bound=False, constraints=None, needs_tokens=lambda _: False
        )
        if kind == "constrained":
            sampler.is_bound, sampler.constraints = True, SimpleNamespace(validate=len, forced=list)
        self.rows[row.number] = row
        self.live.append(row)
        spec = SpecConfig(drafters=(LOOKUP, *MODELS), policy="auto")
        self.drafts.begin(row.number, row.history, spec, sampler, self.policy)  # type: ignore[arg-type]
        self.drafts.hear(row.number, history, None)
        self.drafts.prime(row.number)
        row.own = self.policy._rows[row.number]
        assert not self.policy.is_resting, "rows rest although one has begun"
        row.start = row.own.account.balance
        assert row.start == pytest.approx(min(MOST, max(LEAST, self.control.bank.balance)))
        assert row.own.kind == kind

    def leave(self, row: Row) -> None:
        self.drop()
        self.live.remove(row)
        self.drafts.close(row.number)

    def drop(self) -> None:
        if self.next is not None and self.next.is_open:
            for row, came in zip(self.next.rows, self.next.outcome, strict=True):
                del row.text[len(row.text) - len(came) :]
            self.next = None

    # --- rounds

    def launch(self, current: Way | None) -> Way | None:
        """None: the round in front has to be read first."""
        rows = list(self.live)
        rooms = {r.number: r.end - len(r.history) - 1 for r in rows}
        plan: RoundPlan | None = RoundPlan()
        if current is None:
            if any(rooms.values()):
                plan = self.drafts.propose(
                    {n: min(room, WIDEST // len(rows) - 1) for n, room in rooms.items()}
                )
        else:
            if current.rows != rows or not any(rooms.values()):
                return None
            if current.is_open or not self.drafts.rests(rooms):
                width = 1 + max(current.widths)
                rooms = {n: min(room - width, WIDEST // len(rows) - 1) for n, room in rooms.items()}
                if (
                    not self.runs_ahead
                    or min(rooms.values()) < 1
                    or any(r.kind == "constrained" for r in rows)
                ):
                    return None
                plan = self.drafts.propose(rooms, Unseen())  # type: ignore[arg-type]
                if plan is None or not any(d.width for d in plan.drafts.values()):
                    return None
        assert plan is not None
        for row in rows:
            draft = plan.draft(row.number)
            if draft.drafter == LOOKUP:
                assert self.looked[row.number] == (len(row.history), draft.tokens), (
                    "a lookup of another place"
                )
        for call in plan.calls:
            assert call.queued == self.drafts.drafters[call.name].queued, "catching up is not counted"  # type: ignore[attr-defined]
        widths = [plan.draft(r.number).width for r in rows]
        worst = next((c.decision.worst for c in plan.choices.values() if hasattr(c, "decision")), None)
        outcome = [self.decide(row, plan.draft(row.number), worst) for row in rows]
        return Way(
            rows=rows, plan=plan, widths=widths, outcome=outcome, worst=worst, ahead=current is not None
        )

    def decide(self, row: Row, draft: Draft, worst: float | None) -> list[int]:
        """What this round gives the row, which is added to its text."""
        place, given = len(row.text), draft.read().tokens[: draft.width] if draft.width else []
        num = next((i for i, t in enumerate(given) if t != row.plan(place + i, self.rng)), len(given))
        wanted = self.judge(row.own.account.balance, worst or 0.0, num) if given else 0
        came = [*given[: min(num, wanted)], row.plan(place + num, self.rng)]
        if wanted < num:
            came[-1] = (given[wanted] + 2) % VOCAB
            row.planned = {}
        came = came[: row.end - place]
        row.text += came
        return came

    def step(self) -> None:
        current = self.next or self.launch(None)
        self.next = None
        assert current is not None
        self.drafts.take_up(current.plan)
        for row in current.rows:
            draft = current.plan.draft(row.number)
            if draft.length and draft.drafter in MODELS and row in self.live:
                read, is_probe = draft.read(), current.plan.choices[row.number].is_probe
                self.pending[row.number, draft.drafter].append((len(row.history), read.tokens, is_probe))
        if self.runs_ahead or not current.is_open:
            self.reading = current
            self.next = self.launch(current)
            self.reading = None
        by_model = any(d.drafter in MODELS for d in current.plan.drafts.values() if d.width)
        self.did["drafted"] += by_model
        self.did["behind"] += by_model and current.ahead
        self.did["rounds"] += 1
        self.did["tokens"] += sum(map(len, current.outcome))
        self.did["widest"] = max(self.did["widest"], *current.widths)
        seconds, is_warm = self.take(current)
        for row, came in zip(current.rows, current.outcome, strict=True):
            if row in self.live:
                row.history += came
                self.drafts.hear(row.number, came, None)
        tokens = sum(
            len(came) for row, came in zip(current.rows, current.outcome, strict=True) if row in self.live
        )
        if tokens:
            self.unspent.append((seconds, tokens))
        before, is_told = self.believed(), len(self.unspent) == 1
        numbers = [r.number for r in current.rows]
        self.drafts.learn(
            current.plan, numbers, self.last.width, seconds, ahead=current.ahead, is_warm=is_warm
        )
        self.check(current, before, is_told=is_told)
        for row in [r for r in current.rows if r in self.live and len(r.history) >= r.end]:
            self.leave(row)

    def take(self, way: Way) -> tuple[float, bool]:
        """The seconds of a round, which rows' clocks go on by, and whether it compiled nothing."""
        num_rows, machine = len(way.rows), self.machine
        kind = max((r.kind for r in way.rows), key=KINDS.index)
        place = max(bucket(len(r.history)) for r in way.rows)
        width = num_rows + sum(way.widths)
        own = machine.seconds(num_rows, width, kind, place)
        own += sum(machine.drafting(c.name, c.depth, c.queued, len(c.rows)) for c in way.plan.calls)
        noisy = own * math.exp(machine.noise * self.rng.normal())
        own = min(own, noisy) if not self.known else own
        plain = machine.plain_seconds(num_rows, kind, place)
        is_plain = way.worst is None and not way.plan.calls
        more = 0.0
        if is_plain and not way.ahead and way.rows[0].own.is_behind_drafts:
            more += machine.pause * plain
        is_warm = (num_rows, width) in machine.ran or not machine.compiling
        machine.ran.add((num_rows, width))
        if self.thieves:
            self.thieves, self.stolen = self.thieves - 1, 1.5
        held_up = self.stolen * own + (0.0 if is_warm else machine.compiling)
        got = [len(came) for came in way.outcome if came]
        own = plain if is_plain else own
        self.last = Last(
            kind=kind,
            bucket=place,
            width=width,
            plain=plain,
            own=own,
            held_up=held_up,
            late=(own + more) / plain - sum(got) / len(got),
            is_plain=is_plain,
            is_warm=is_warm,
            curve=self.control.curve([r.own for r in way.rows]),
            rows=way.rows,
        )
        self.stolen = 0.0
        return noisy + more + held_up, is_warm

    # --- what is seen of the policy

    def seen_choose(self, right: Any, rows: Sequence[PolicyRow], offers: Any, models: Any) -> Any:
        found, curve = right(rows, offers, models), self.control.curve(rows)
        if any(c.depth for c in found):
            assert self.is_timed, "drafts are weighed in seconds that nobody has measured"
            assert not self.costs.is_in_doubt
            # costs that do not count teach no age
            assert self.since[curve] <= (SOON if curve in self.kept_curves else STALE) + 8, (
                "no plain round was timed"
            )
        least = min(r.account.available(is_alone=len(rows) == 1) for r in rows) * curve.plain
        assert sum(c.probe for c in found) <= 1
        for row, choice, given, asked in zip(rows, found, offers, models, strict=True):
            if choice.probe:
                assert choice.depth <= min(PROBE_DEPTH, asked[choice.model][0])
                assert choice.price <= min(PROBE_COST * curve.plain, 0.5 * least) + 1e-9 * curve.plain
                since, gap = self.asked.get((row.kind, choice.model), (-PROBED, PROBED))
                assert self.came[row.kind] - since >= gap, "a probe is not due"
            elif choice.model is not None:
                assert 0 < choice.depth <= asked[choice.model][0]
            elif choice.offer is not None:
                assert 0 < choice.depth <= given[choice.offer].length
            shape = len(rows), len(rows) + choice.depth
            if len(rows) == 1 and choice.depth and not choice.probe and shape not in self.costs.ran:
                left = min(row.room, self.costs.lengths.get(row.kind, LENGTH))
                assert self.costs.cold <= max(1.0, left) * curve.plain, "a shape was run that could never pay"
        return found

    def seen_trim(self, right: Any, rows: Sequence[PolicyRow], drafts: Any, choices: Any) -> Any:
        alone, front = 0.0 if len(rows) == 1 else MOST - LEAST, self.reading
        held = [front.worst or 0.0 if front and any(x.own is r for x in front.rows) else 0.0 for r in rows]
        least = min(r.account.balance - h - alone for r, h in zip(rows, held, strict=True))
        found, curve = right(rows, drafts, choices), self.control.curve(rows)
        assert all(0 <= w <= (d.length if d else 0) for w, d in zip(found.widths, drafts, strict=True))
        if found.worst is not None:
            assert not any(found.widths) or found.worst <= least + ROUNDING, "an account cannot pay"
            longer = curve.seconds(len(rows) + sum(found.widths)) - curve.plain
            assert found.worst * curve.plain >= longer + sum(c.price for c in choices) - 1e-9 * curve.plain
        return found

    def seen_judge(self, right: Any, row: Any, draft: Draft, matched: int, known: int) -> None:
        text, tokens = self.rows[row.number].text, draft.read().tokens
        if draft.drafter in MODELS:
            pending = self.pending[row.number, draft.drafter]
            right_ones = [
                (place, drafted, is_probe)
                for place, drafted, is_probe in pending
                if drafted == tokens and matched == agreed(text[place : place + known], tokens)
            ]
            assert right_ones, "a draft is judged by another text"
            assert not right_ones[0][2] or matched < known or known == len(tokens), (
                "a probe is judged too early"
            )
            pending.remove(right_ones[0])
        right(row, draft, matched, known)

    def seen_learn(self, right: Any, curve: Curve, width: int, *args: Any, **how: Any) -> float:
        last, was_timed, was_kept = self.last, self.is_timed, curve in self.kept_curves
        if not how["is_plain"]:
            place = max(r.own.bucket for r in self.last.rows)
            assert curve is self.costs.curve(place, len(last.rows), last.kind), (
                "the round is of another curve"
            )
        if how["is_warm"] and how["is_plain"]:
            self.is_timed = True
            if how["is_ahead"] or not how["follows_drafts"]:
                self.since[curve] = 0
                self.kept_curves.discard(curve)
        elif width > curve.num_rows and how["is_warm"]:
            self.since[curve] += 1
            tries = self.tries.setdefault(curve, {})
            tries[0] = tries.get(0, 0) + 1
            tries[width] = tries[0]
        calls, seconds = args
        self.off = math.log(seconds / how.get("num_rounds", 1) / self.costs.seconds(curve, width, calls))
        was_in_doubt, plain = self.costs.is_in_doubt, curve.plain
        found = right(curve, width, *args, **how)
        assert not (self.scaled and self.costs.is_in_doubt > was_in_doubt), "one late round is a doubt"
        self.scaled = (
            was_timed and not was_kept and how["is_plain"] and abs(math.log(curve.plain / plain)) > CLIP
        )
        self.stolen = 3.0 * (self.scaled and not self.known and self.rng.random() < 0.5)
        if width > curve.num_rows and how["is_warm"] and not self.last.held_up:
            self.taught[last.kind, len(last.rows), last.rows[0].own.bucket] += len(last.rows) == 1
        tries = self.tries.get(curve, {0: 0})
        old = [w for w in curve.known if w > curve.num_rows and tries[0] - tries.get(w, 0) > FORGET + 20]
        assert not old, "a width is remembered for ever"
        return found

    def seen_asked(self, right: Any, row: PolicyRow, choice: Any) -> None:
        right(row, choice)
        key = row.kind, choice.model
        gap = self.asked.get(key, (0.0, PROBED))[1]
        self.asked[key] = [self.came[row.kind], min(2 * gap, PROBE_GAP) if choice.probe else PROBED]
        table = self.costs.accepted(*key)
        assert (table.asked_at, table.gap) == tuple(self.asked[key])

    def seen_spent(
        self, right: Any, parts: Any, num_rows: int, width: int, seconds: float, *a: Any, **more: Any
    ) -> None:
        taken = [self.unspent.popleft() for _ in range(more.get("num_rounds", 1))]
        assert seconds == pytest.approx(sum(s for s, _ in taken)), "seconds were lost, or counted twice"
        assert sum(n for _, n in parts) == sum(n for _, n in taken), "tokens were lost, or counted twice"
        for row, n in parts:
            self.came[row.kind] += n
        right(parts, num_rows, width, seconds, *a, **more)

    def seen_share(
        self, right: Any, rows: Any, reaches: Any, curve: Curve, left: float, drafting: float = 0.0
    ) -> list[int]:
        found = right(rows, reaches, curve, left, drafting)
        num_rows = len(rows)
        if self.costs.cold or not sum(map(len, reaches)):
            return found

        def pace(taken: Sequence[int]) -> float:
            expected = sum(sum(reach[:n]) for reach, n in zip(reaches, taken, strict=True))
            longer = PRUDENCE * (curve.seconds(num_rows + sum(taken)) - curve.plain)
            if longer > left + 1e-12:
                return 0.0
            plain = 0.0 if sum(taken) else 1.0
            return (
                (MARGIN if plain else 1.0)
                * (num_rows + expected)
                / (curve.plain + longer + (0 if plain else drafting))
            )

        for _ in range(4):
            other = [int(self.rng.integers(len(reach) + 1)) for reach in reaches]
            if sum(other) == 0 or sum(other) + (num_rows == 1) in LADDER:
                assert pace(found) >= (1 - 1e-9) * pace(other), "other shares give more"
        assert all(n <= len(reach) for n, reach in zip(found, reaches, strict=True))
        return found

    def check_length(self, row: Row, name: str, sure: Sequence[float]) -> None:
        """A draft does not go on where the next token cannot pay for its own step."""
        curve = self.control.curve([row.own])
        cost = self.costs.draft(name, row.kind, curve.plain)
        reach = self.control.reaches(row.own, Offer(name, len(sure), list(sure)))
        for num in range(1, len(sure)):
            pace = (1.0 + sum(reach[:num])) / (cost.seconds(num, 1) + curve.seconds(1 + num))
            at_most = reach[num - 1] / max(pace, 1.0 / curve.plain)
            assert at_most >= cost.step, "a token was drafted that could never pay"

    # --- checks

    def believed(self) -> dict[Any, float]:
        """What is believed of rounds and drafts, in seconds."""
        rows = [r.own for r in self.last.rows]
        curve = self.control.curve(rows)
        found: dict[Any, float] = {w: curve.seconds(w) for w in range(len(rows), WIDEST + 1)}
        return found | {n: self.costs.draft(n, self.last.kind, curve.plain).seconds(3, 1) for n in MODELS}

    def check(self, way: Way, before: dict[Any, float], *, is_told: bool) -> None:
        """The theorem, of each row of a round that was read, and what the round has taught. is_told: no round in front was learned with
        it."""
        last = self.last
        if self.known and not last.is_plain:
            assert last.own / last.plain - 1.0 <= (way.worst or 0.0) + ROUNDING, "more than the worst case"
        for row in way.rows:
            row.elapsed += (last.own + last.held_up) / last.plain
            row.late += last.late
            if not self.known:
                row.left_out += self.left_out(way)
            bound = row.start + GROWTH * row.elapsed + row.left_out
            assert row.late <= bound + ROUNDING, f"row {row.number} is {row.late:.3f} late of {bound:.3f}"
            assert row not in self.live or not (said := self.drafts.row(row.number).notices), said
        assert len(self.unspent) <= REST, "the controller is not told of rounds"
        drafts = [
            each for (number, _), of in self.pending.items() for each in of if self.rows[number] in self.live
        ]
        assert all(is_probe for _, _, is_probe in drafts), "a draft was not judged"
        now, num_rows = self.believed(), len(way.rows)
        if not last.is_plain and is_told:
            assert now[num_rows] == before[num_rows], "rounds with drafts move the unit"
        kind = (num_rows, last.width, *(c.name for c in way.plan.calls))
        if last.held_up > 2.5 * last.own and not last.is_plain and last.is_warm and self.usual[kind] > 3:
            assert now == before, "a round that was held up has taught something"
            self.did["held up"] += 1
        self.late.append(kind if self.off > 0.6 and last.is_warm and not last.is_plain else ())
        if (
            is_told
            and self.late.count(kind) == 3
            and max(last.curve.known) <= last.width
            and now[last.width] > now[num_rows]
        ):
            assert now != before, "the third late round in a row is not believed"
            self.did["late"] += 1
        self.usual[kind] = self.usual[kind] + 1 if abs(self.off) < CLIP / 2 else 0

    def left_out(self, way: Way) -> float:
        """The plain rounds by which the theorem lets a round be later than what its accounts paid."""
        last = self.last
        if last.is_plain:
            return last.late
        unit = last.curve.plain / last.plain
        over = max(0.0, last.own / last.plain - 1.0 - (way.worst or 0.0) * unit)
        return over + abs(math.log(unit)) * last.own / last.plain

    def disturb(self) -> None:
        """Steal seconds, or change the machine."""
        which = int(self.rng.integers(12))
        if which < 2:
            self.thieves = 4
        elif which < 10:
            self.stolen = float(self.rng.choice([0.5, 3.0, 20.0]))
        elif which == 10:
            self.machine.speed *= float(self.rng.choice([0.5, 0.8, 1.25, 2.0]))
            self.usual.clear()
        else:
            self.machine.wide = float(self.rng.choice([0.7, 1.0, 1.5]))
            self.usual.clear()

    def restart(self) -> None:
        """Go on in another process with what this one wrote."""
        for row in list(self.live):
            self.leave(row)
        self.next = None
        data = self.costs.as_data()
        written = json.loads(json.dumps(data))
        costs = CostModel(guesses=self.costs.guesses, pause=self.costs.pause)
        costs.learn_from(written)
        assert alike(json.loads(json.dumps(costs.as_data())), written), "another process knows something else"
        taught = {c for c, tries in self.tries.items() if tries[0] >= TRUST}
        assert len(written["curves"]) >= len(taught), "what rounds have taught is not written"
        kinds = {(c["kind"], c["rows"], c["bucket"]) for c in written["curves"]}
        assert {key for key, num in self.taught.items() if num > 2 * TRUST} <= kinds
        assert written["bank"] == self.control.bank.balance
        balance = self.control.bank.balance
        self.begin_process(costs)
        assert self.control.bank.balance == balance
        self.did["restarts"] += 1

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if not self.known and self.rng.random() < 0.03:
                self.disturb()
            if self.rng.random() < self.restarts:
                self.restart()
            if not self.live or (len(self.live) < self.most and self.rng.random() < 0.02):
                self.join()
            elif self.rng.random() < 0.005:
                self.leave(self.live[int(self.rng.integers(len(self.live)))])
                continue
            self.step()

    def finish(self) -> None:
        """What a policy that drafts nothing, or that waits for each round, would not reach."""
        if self.runs_ahead and self.known and self.did["drafted"] > 40:
            assert self.did["behind"] > 0.2 * self.did["drafted"], "rounds wait for those in front"
        if self.is_flat:
            assert self.did["widest"] >= 11, "wide rounds cost nothing, and none was run"


def agreed(came: Sequence[int], tokens: Sequence[int]) -> int:
    """How many of a draft's first tokens have come."""
    pairs = zip(came, tokens, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(came), len(tokens)))


def alike(one: Any, other: Any) -> bool:
    """Whether two values of JSON are equal but for rounding."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == (pytest.approx(other, rel=1e-9) if isinstance(one, float) else other)


def never(balance: float, price: float, num: int) -> int:
    return 0


def always(balance: float, price: float, num: int) -> int:
    return num


def full(balance: float, price: float, num: int) -> int:
    return num if balance < 14 else 0


def dear(balance: float, price: float, num: int) -> int:
    return num if price < 0.4 * balance else 0


def as_it_is(balance: float, price: float, num: int) -> int:
    return num


# ---- faults


def pays_nothing(right: Any) -> Any:
    return lambda self, rounds, gained=0.0, worst=0.0: right(self, rounds, max(gained, 0.0), worst)


def asks_at_once(right: Any) -> Any:
    def read(cls: type[Acceptance], data: Any) -> Acceptance:
        found = right.__func__(cls, data)
        found.asked_at = cls().asked_at
        return found

    return classmethod(read)


def all_alike(right: Any) -> Any:
    def shared(self: Controller, rows: Any, reaches: Any, *more: Any) -> list[int]:
        num = sum(right(self, rows, reaches, *more)) // len(rows)
        return [min(num, len(reach)) for reach in reaches]

    return shared


def moves_the_unit(right: Any) -> Any:
    def refine(self: Curve, num_tokens: int, seconds: float, *, is_sure: bool = False) -> None:
        off = math.log(seconds / self.seconds(num_tokens))
        right(self, num_tokens, seconds, is_sure=is_sure)
        if num_tokens != self.num_rows:
            self.plain *= math.exp(0.05 * max(-0.15, min(0.15, off)))

    return refine


def takes_all(right: Any) -> Any:
    return lambda self, rows, most=None: right(self, rows)


def prices_once(right: Any) -> Any:
    """What rows pay for a call that others share is not raised when those are left out."""

    def together(self: Controller, rows: Any, choices: Any, *more: Any) -> Any:
        found = right(self, rows, choices, *more)
        priced = self._priced(rows, choices, more[1], more[2])
        return [c if c is PLAIN else c._replace(price=p.price) for c, p in zip(found, priced, strict=True)]

    return together


def keeps_old_offers(right: Any) -> Any:
    def look_up(self: Drafts, rows: Any) -> Any:
        before = [dict(row.offers) for row in rows]
        right(self, rows)
        for row, old in zip(rows, before, strict=True):
            row.offers = old | row.offers
        return [dict(row.offers) for row in rows]

    return look_up


def leaves_out_ended(right: Any) -> Any:
    def propose(self: Drafts, rooms: Any, unread: Any = None) -> Any:
        return right(self, {n: room for n, room in rooms.items() if room > 0}, unread)

    return propose


@catches(
    "a round need not be paid for beforehand",
    "mlxspec.policy.controller:Controller._available",
    lambda right: lambda *_: 1e9,
    case="[0-learned]",
)
@catches(
    "losses are free",
    "mlxspec.policy.account:Account.settle",
    pays_nothing,
    case="[1-known]",
)
@catches(
    "what is reserved for an unread round is spent once more",
    "mlxspec.policy.account:Account.available",
    lambda right: lambda self, *, is_alone: self.balance,
    case="[1-known]",
)
@catches(
    "rounds at rest are learned together with the drafted round behind them",
    "mlxspec.policy.auto:Auto._learn_rested",
    lambda right: lambda self: right(self) if self._rested >= REST else None,
    case="[0-known]",
)
@catches(
    "a round at rest takes the tokens of the drafted one behind it",
    "mlxspec.policy.auto:Auto._emitted",
    takes_all,
    case="[2-known]",
)
@catches(
    "a row at its last token pays for nothing",
    "mlxspec.drafters.drafts:Drafts.propose",
    leaves_out_ended,
    case="[1-known]",
)
@catches(
    "a call is as cheap for one row as for several",
    "mlxspec.policy.controller:Controller._together",
    prices_once,
    case="[2-learned]",
)
@catches(
    "drafts are weighed in seconds of which none has been measured",
    "mlxspec.policy.costs:Curve.__init__",
    lambda right: (
        lambda self, *args, **more: (right(self, *args, **more), vars(self).update(is_timed=True))[0]
    ),
    case="[0-learned]",
)
@catches(
    "a plain round is timed once for all",
    "mlxspec.policy.costs:Curve.is_stale",
    lambda right: property(lambda self: False),
    case="[0-known]",
)
@catches(
    "the richest row's account pays for all",
    "mlxspec.policy.controller:Controller._available",
    lambda right: (
        lambda self, rows, curve: max(r.account.available(is_alone=False) for r in rows) * curve.plain
    ),
    case="[1-known]",
)
@catches(
    "what one row verifies is not taken from what is left for the next",
    "mlxspec.policy.controller:Controller._share",
    lambda right: (
        lambda self, rows, reaches, curve, left, drafting=0.0: right(
            self, rows, reaches, curve, len(rows) * left, drafting
        )
    ),
    case="[2-known]",
)
@catches(
    "all rows get as much",
    "mlxspec.policy.controller:Controller._share",
    all_alike,
    case="[1-known]",
)
@catches(
    "probes stay rare behind drafts that were asked for what they gain",
    "mlxspec.policy.controller:Controller.asked",
    lambda right: lambda self, row, choice: right(self, row, choice._replace(probe=True)),
    case="[0-known]",
)
@catches(
    "a lookup that finds nothing gives what it found before",
    "mlxspec.drafters.drafts:Drafts.look_up",
    keeps_old_offers,
    case="[0-known]",
)
@catches(
    "drafts never stop",
    "mlxspec.policy.controller:Controller.stops",
    lambda right: lambda *_: False,
    case="[0-known]",
)
@catches(
    "a width that has never run costs what others do",
    "mlxspec.policy.controller:Controller._compiling",
    lambda right: lambda *_: 0.0,
    case="[5-learned]",
)
@catches(
    "the first row decides",
    "mlxspec.policy.controller:dearest",
    lambda _: lambda rows: rows[0].kind,
    case="[2-learned]",
)
@catches(
    "what a width took is never forgotten",
    "mlxspec.policy.costs:FORGET",
    lambda right: 10**9,
    case="[0-known]",
)
@catches(
    "every round counts",
    "mlxspec.policy.doubt:CLIP",
    lambda right: 1e9,
    case="[0-learned]",
)
@catches(
    "each process probes what is known",
    "mlxspec.policy.acceptance:Acceptance.from_data",
    asks_at_once,
    case="[1-learned]",
)
@catches(
    "other widths move the unit",
    "mlxspec.policy.costs:Curve.refine",
    moves_the_unit,
    case="[0-learned]",
)
@pytest.mark.parametrize("known", [True, False], ids=["known", "learned"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_promises_hold_by_the_clock(seed: int, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(seed, known=known, patch=monkeypatch)
    walk.run(STEPS)
    walk.finish()


def test_the_walk_reaches_what_it_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds would hold as well if nothing were ever drafted, and a weak adversary would find none that is broken."""
    walks = {seed: Walk(seed, known=True, patch=monkeypatch) for seed in (1, 4, 2, 12)}
    for walk in walks.values():
        walk.run(STEPS)
    late = {
        seed: [(r.late, r.start + GROWTH * r.elapsed) for r in w.rows.values()] for seed, w in walks.items()
    }
    assert max(a / b for seed in (1, 4) for a, b in late[seed]) > 0.7
    assert sum(a for seed in (2, 12) for a, _ in late[seed]) < -100
