"""Simulated machines, the requests they meet, and how long those take by rules that do not look at costs.

Every policy meets the same requests and the same noise: the time of a forward is the curve's at its width, times what the machine
happened to be doing at that place of the text. Counted are verifies, drafts with their catch-up and lookups; not prompts. Costs are in
plain steps of the curve at hand. The controller is driven by replay.py. Knows traces and curves; knows no model and measures nothing
itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mlxspec.policy.costs import Curve, DraftCost

from .traces import Answer, Said, join

MODELS = ("mtp", "eagle3", "dflash", "draft-model")  # drafters that run a model; all others look up
_SPIKE = 0.005  # of forwards take twice as long


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A latency curve: width -> plain steps, what drafts cost in plain steps, and one plain step in milliseconds, against which host
    work counts. rows: by number of rows, width of all of them together -> plain steps of one row, where that was measured; elsewhere so
    many tokens cost the same whosever they are. pause: as CostModel has it.
    """

    name: str
    widths: Mapping[int, float]
    drafts: Mapping[str, DraftCost]
    rows: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    pause: float = 0.0
    step_ms: float = 30.0
    prefill: float = 0.13  # plain steps that a token of a prompt takes: a 27B model in 4 bits on an M3 Max
    head: float = 1 / 65  # of that, what the head takes more
    lookup_ms: float = 0.01  # all lookups of a round
    choose_ms: float = 0.015  # the controller, a round
    judge_ms: float = 0.02  # the controller, a round in which a model drafted
    look: float = (
        0.01  # plain steps that reading a drafted token's confidence takes before the next one is drafted
    )
    attention: float = 0.0045  # plain steps that 1,024 tokens of keys and values take to read: a 27B model in 4 bits, 64 KB a token
    reread: float = 0.5  # share of them that each further token of a verify reads again
    head_attention: float = (
        1 / 16
    )  # of `attention`, what a drafted token of a model drafter reads: one layer of sixteen
    source: str = ""

    def curve(self, num_rows: int = 1) -> Curve:
        return Curve(self.rows.get(num_rows, self.widths))

    def at(self, context: int) -> Machine:
        """Return the machine as rounds and drafts take it after `context` tokens, still in plain steps of a short context."""
        if not context:
            return self
        read = self.attention * context / 1024

        def longer(widths: Mapping[int, float], num_rows: int) -> dict[int, float]:
            return {w: s + read * (num_rows + self.reread * (w - num_rows)) for w, s in widths.items()}

        return replace(
            self,
            widths=longer(self.widths, 1),
            rows={n: longer(widths, n) for n, widths in self.rows.items()},
            drafts={n: replace(d, step=d.step + self.head_attention * read) for n, d in self.drafts.items()},
        )

    @property
    def lookup(self) -> float:
        return self.lookup_ms / self.step_ms

    def overhead(self, drafted: bool) -> float:
        """What one round of the controller costs besides the device's work, in plain steps."""
        return (self.lookup_ms + self.choose_ms + self.judge_ms * drafted) / self.step_ms


@dataclass(frozen=True, kw_only=True)
class Request:
    """An answer to decode, and the machine's moods along it. noise (N,): factor on everything; tilt (N,): factor on what wider
    forwards cost beyond a plain one. workload: where its text is from; kind: as the controller knows kinds of rows. context: tokens
    before the answer; 0 for a short prompt, whose attention costs nothing."""

    said: Mapping[str, Said]
    noise: np.ndarray
    tilt: np.ndarray
    workload: str = ""
    kind: str = ""
    context: int = 0

    def __len__(self) -> int:
        return len(self.noise)


def make_requests(
    answers: Sequence[Answer],
    length: int,
    count: int,
    rng: np.random.Generator,
    *,
    sigma: float = 0.05,
    drift: float = 0.1,
    workload: str = "",
    kind: str = "",
) -> list[Request]:
    """Answers drawn with replacement and joined to `length` tokens. Every forward varies by `sigma`, the machine's speed by up to `drift`
    along a request, and in half of the requests wide forwards grow dearer by up to `drift` as well."""
    out = []
    for _ in range(count):
        drawn: list[Answer] = []
        size = 0
        while size < length:
            drawn.append(answers[int(rng.integers(len(answers)))])
            size += len(next(iter(drawn[-1].values())))
        said = {name: s.part(0, length) for name, s in join(drawn).items()}
        noise = np.exp(rng.normal(0.0, sigma, length)) * np.where(rng.random(length) < _SPIKE, 2.0, 1.0)
        noise *= 1.0 + drift * rng.random() * np.sin(np.linspace(0, 2 * np.pi * rng.random(), length))
        tilt = 1.0 + (
            drift * rng.random() * np.linspace(0, 1, length) if rng.random() < 0.5 else np.zeros(length)
        )
        noise = np.round(noise, 9)  # an exponential's last bit is another one on another CPU
        out.append(Request(said=said, noise=noise, tilt=tilt, workload=workload, kind=kind))
    return out


@dataclass(kw_only=True)
class Rounds:
    """The rounds of a policy that does not look at costs. Lists by round: request, place, verified width, drafter's depth and
    catch-up."""

    request: list[int] = field(default_factory=list)
    place: list[int] = field(default_factory=list)
    width: list[int] = field(default_factory=list)
    model: list[str] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    queued: list[int] = field(default_factory=list)

    def add(self, request: int, place: int, width: int, model: str, depth: int, queued: int) -> None:
        self.request.append(request)
        self.place.append(place)
        self.width.append(width)
        self.model.append(model)
        self.depth.append(depth)
        self.queued.append(queued)

    def seconds(self, requests: Sequence[Request], machine: Machine, *, lookups: bool) -> np.ndarray:
        """Time of each request, in plain steps."""
        request, width = np.array(self.request), np.array(self.width)
        begins = np.cumsum([0, *(len(r) for r in requests)])[request] + np.array(self.place)
        noise = np.concatenate([r.noise for r in requests])[begins]
        tilt = np.concatenate([r.tilt for r in requests])[begins]
        depth, queued, model = np.array(self.depth), np.array(self.queued), np.array(self.model)
        context, time = np.array([r.context for r in requests])[request], np.zeros(len(request))
        for tokens in sorted(set(context.tolist())):
            its, there = context == tokens, machine.at(tokens)
            curve = there.curve()
            verify = np.array([curve.seconds(w) for w in range(int(width.max()) + 1)])[width]
            plain = curve.seconds(1)
            time += np.where(its, noise * (plain + (verify - plain) * tilt), 0.0)
            for name in {m for m in self.model if m in MODELS}:
                cost, asked = there.drafts[name], its & (model == name)
                drafting = cost.call + cost.step * depth + cost.queued * np.maximum(0, queued - 1)
                time += np.where(asked, drafting * noise, 0.0)
        if lookups:
            time += machine.lookup
        return np.bincount(request, weights=time, minlength=len(requests))


def moods(requests: Sequence[Request], places: Sequence[int]) -> tuple[float, float]:
    """The machine's noise and tilt in a round of rows that stand there."""
    pairs = list(zip(requests, places, strict=True))
    return (
        float(sum(r.noise[p] for r, p in pairs)) / len(pairs),
        float(sum(r.tilt[p] for r, p in pairs)) / len(pairs),
    )


def forward_seconds(curve: Curve, num_rows: int, width: int, noise: float, tilt: float) -> float:
    """Plain steps that a forward of `width` tokens of so many rows takes."""
    plain = curve.seconds(num_rows)
    return noise * (plain + (curve.seconds(width) - plain) * tilt)


def plain_seconds(requests: Sequence[Request], machine: Machine) -> np.ndarray:
    """Return plain steps of a short context that each request takes without drafts."""
    plain = {c: machine.at(c).curve().seconds(1) for c in {r.context for r in requests}}
    return np.array([plain[r.context] * float(r.noise.sum()) for r in requests])


def plain_group_seconds(requests: Sequence[Request], machine: Machine) -> float:
    """Plain steps of one row that requests take which decode together without drafts, each till its end."""
    time = 0.0
    for place in range(max(map(len, requests))):
        active = [r for r in requests if place < len(r)]
        noise, _ = moods(active, [place] * len(active))
        time += machine.curve(len(active)).seconds(len(active)) * noise
    return time


def fixed(requests: Sequence[Request], drafter: str, depth: int) -> Rounds:
    """One drafter, always asked, never for more than `depth` tokens."""
    return first(requests, ((drafter, depth),))


def first(requests: Sequence[Request], order: Sequence[tuple[str, int]]) -> Rounds:
    """The first drafter in order that offers anything wins the round: llama.cpp's rule. order: (drafter, depth)."""
    rounds = Rounds()
    for r, request in enumerate(requests):
        place, last = 0, dict.fromkeys(MODELS, -1)
        while place < len(request):
            room = len(request) - place - 1
            name, depth = next(
                (
                    (n, min(d, room, int(request.said[n].length[place])))
                    for n, d in order
                    if request.said[n].length[place]
                ),
                ("", 0),
            )
            place = _advance(rounds, r, request, place, name, depth, last)
    return rounds


def _advance(
    rounds: Rounds, r: int, request: Request, place: int, name: str, depth: int, last: dict[str, int]
) -> int:
    """One round; returns the place behind it."""
    queued = place - last[name] if name in MODELS else 0
    if name in MODELS:
        last[name] = place
    rounds.add(r, place, 1 + depth, name, depth, queued)
    return place + 1 + (min(depth, int(request.said[name].stood[place])) if depth else 0)
