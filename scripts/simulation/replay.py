"""The controller driven by traces instead of an engine: how long answers would take with it, alone or several decoding together.

As in the engine, all rows of a group share a round: the controller chooses for each, cuts all drafts together, pays one forward as wide as
all of them and one call of each model drafter that is asked. Counted are verifies, drafts with catch-up, looks, lookups and the choosing
itself. Knows simulated machines and their requests; knows no model and measures nothing itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from mlxspec.kernels.flat import LADDER
from mlxspec.policy.acceptance import Offer
from mlxspec.policy.controller import Choice, Controller
from mlxspec.policy.costs import CostModel, Curve, DraftCall, DraftCost, bucket

from .requests import MODELS, Machine, Request, forward_seconds, moods


class Replay:
    """The controller as one engine has it. What it believes of the machine when it starts is off by `error`, and what it believes of
    rounds of several rows it guesses from those of one."""

    def __init__(
        self,
        machine: Machine,
        rng: np.random.Generator,
        *,
        error: float = 0.03,
    ) -> None:
        self.machine = machine
        true = machine.curve()
        wrong = {w: true.seconds(w) * float(np.exp(rng.normal(0.0, error))) for w in LADDER}
        drafts = {
            n: DraftCost(**{k: v * float(np.exp(rng.normal(0.0, error))) for k, v in vars(d).items()})
            for n, d in machine.drafts.items()
        }
        costs = CostModel(pause=machine.pause)
        costs.know(wrong, drafts)
        costs.curve(0).keep()
        self.control = Controller(costs)
        # of the last requests: row, place, choice, drafted tokens verified
        self.rounds: list[tuple[int, int, Choice, int]] = []
        self._there: dict[int, Machine] = {}  # by context
        self._curves: dict[tuple[int, int], Curve] = {}

    def seconds(self, *requests: Request) -> float:
        """Plain steps of one row that these requests take together, each till its end. What was learned stays."""
        self.rounds = []
        rows = [_Row(self.control, request) for request in requests]
        time = 0.0
        while active := [r for r in rows if r.place < len(r.request)]:
            time += self._round(rows, active)
        for row in rows:
            self.control.ended(row.control, len(row.request))
        return time

    def restart(self) -> None:
        """A new process knows what this one would have kept."""
        costs = CostModel(pause=self.machine.pause)
        costs.learn_from(json.loads(json.dumps(self.control.costs.as_data())))
        self.control = Controller(costs)

    def at(self, context: int) -> Machine:
        """Return the machine after this number of tokens."""
        if context not in self._there:
            self._there[context] = self.machine.at(context)
        return self._there[context]

    def curve(self, num_rows: int, context: int = 0) -> Curve:
        """Return what rounds of this number of rows really take after `context` tokens."""
        if (num_rows, context) not in self._curves:
            self._curves[num_rows, context] = self.at(context).curve(num_rows)
        return self._curves[num_rows, context]

    def _round(self, rows: Sequence[_Row], active: Sequence[_Row]) -> float:
        """Plain steps that one round takes."""
        controls, num_rows = [r.control for r in active], len(active)
        for row in active:
            row.control.room = row.room
        offers = [r.offers() for r in active]
        choices = self.control.choose(controls, offers, [r.asked() for r in active])
        noise, tilt = moods([r.request for r in active], [r.place for r in active])
        drafts = [None if c.offer is None else o[c.offer] for c, o in zip(choices, offers, strict=True)]
        drafting, calls = 0.0, list[DraftCall]()
        for name in dict.fromkeys(c.model for c in choices if c.model is not None):
            drafting += self._draft(name, active, choices, drafts, noise, calls)
        decision = self.control.trim(controls, drafts, choices)._replace(calls=tuple(calls))
        verified = decision.widths
        curve = self.curve(num_rows, max(r.request.context for r in active))
        width = num_rows + sum(verified)
        forward = forward_seconds(curve, num_rows, width, noise, tilt)
        parts = []
        for row, choice, given, draft, num in zip(active, choices, offers, drafts, verified, strict=True):
            self.rounds.append((rows.index(row), row.place, choice, num))
            emitted = row.advance(given, draft, choice, num)
            parts.append((row.control, emitted))
        self.control.spent(parts, num_rows, width, forward + drafting, decision, is_ahead=True)
        return forward + drafting + self.machine.overhead(any(c.model is not None for c in choices))

    def _draft(
        self,
        name: str,
        active: Sequence[_Row],
        choices: Sequence[Choice],
        drafts: list[Offer | None],
        noise: float,
        calls: list[DraftCall],
    ) -> float:
        """What a model drafter says to all rows that ask it, into `drafts`, and its call, into `calls`. Returns plain steps."""
        places = [i for i, c in enumerate(choices) if c.model == name]
        depth, looks = self._depth(name, [active[i] for i in places], [choices[i] for i in places])
        queued = sum(active[i].hear(name) for i in places)
        machine = self.at(max(active[i].request.context for i in places))
        time = machine.drafts[name].seconds(depth, queued, len(places)) * noise
        calls.append(DraftCall(name, active[0].control.kind, depth, queued, len(places)))
        for i in places:
            drafts[i] = active[i].offer(name, min(depth, choices[i].depth))
            self.control.asked(active[i].control, choices[i])
        return time + looks * self.machine.look

    def _depth(self, name: str, rows: Sequence[_Row], choices: Sequence[Choice]) -> tuple[int, int]:
        """How many tokens a model drafts, and how often somebody looks at confidences for it: one row's draft ends where the controller
        stops it, as in the engine."""
        depth = max(c.depth for c in choices)
        offer = rows[0].offer(name, depth)
        if (
            len(rows) > 1
            or choices[0].probe
            or offer is None
            or offer.confidences is None
            or name == "dflash"
        ):
            return depth, 0
        for num in range(1, offer.length):
            if self.control.stops(rows[0].control, name, offer.confidences[:num]):
                return num, num
        return offer.length, max(0, offer.length - 1)


class _Row:
    """One request under way: its row of the controller, its drafters' catch-up, and probes whose text has not come yet."""

    def __init__(self, control: Controller, request: Request) -> None:
        self.request = request
        self.control = control.row(request.kind)
        self.control.bucket = bucket(request.context)
        self.place = 0
        self._learn = control.learn
        said = request.said
        self._stood = {n: s.stood.tolist() for n, s in said.items()}
        self._length = {n: s.length.tolist() for n, s in said.items()}
        self._sure = {
            n: (s.confidences / 255.0).tolist() for n, s in said.items() if s.confidences is not None
        }
        self._backing = {n: s.backing.tolist() for n, s in said.items() if s.backing is not None}
        self._last = {n: -1 for n in said if n in MODELS}
        # what was said, how much of it will stand, where the text will have shown it
        self._probes: list[tuple[Offer, int, int]] = []

    @property
    def room(self) -> int:
        return len(self.request) - self.place - 1

    def offers(self) -> list[Offer]:
        """Of all lookups that say something here."""
        return [o for n in self._stood if n not in MODELS and (o := self.offer(n, self.room))]

    def asked(self) -> dict[str, tuple[int, int]]:
        """By model drafter: how many tokens it may draft and how many it has not heard."""
        return {
            n: (min(self.room, self._length[n][self.place]), self.place - last)
            for n, last in self._last.items()
        }

    def offer(self, name: str, limit: int) -> Offer | None:
        """What a drafter says here, up to so many tokens."""
        place, length = self.place, min(limit, self._length[name][self.place])
        if length < 1:
            return None
        sure, backing = self._sure.get(name), self._backing.get(name)
        return Offer(
            name,
            length,
            None if sure is None else sure[place][:length],
            None if backing is None else backing[place],
        )

    def hear(self, name: str) -> int:
        """A model drafter catches up; returns on how many tokens."""
        queued = self.place - self._last[name]
        self._last[name] = self.place
        return queued

    def advance(self, offers: Sequence[Offer], draft: Offer | None, choice: Choice, verified: int) -> int:
        """A round verified so many tokens of a draft. All that was said is judged; returns how many tokens came."""
        place = self.place
        emitted = 1 + (min(verified, self._stood[draft.drafter][place]) if draft is not None else 0)
        for offer in offers:
            stands = min(self._stood[offer.drafter][place], offer.length)
            self._learn(self.control, offer, min(stands, emitted), emitted)
        if draft is not None and choice.model is not None:
            stands = min(self._stood[draft.drafter][place], draft.length)
            if choice.probe:
                self._probes.append((draft, stands, place + draft.length))
            else:
                self._learn(self.control, draft, min(stands, emitted), emitted)
        for probed in [p for p in self._probes if p[2] <= place + emitted]:
            self._probes.remove(probed)
            self._learn(self.control, probed[0], probed[1], probed[0].length)
        self.place += emitted
        return emitted
