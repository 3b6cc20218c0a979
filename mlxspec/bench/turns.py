"""Compares ways to draft with plain decoding on the same prompts, in turns: the speed-up of each pair, and whether the texts are the same.

Every way answers a group of prompts in each turn, in an order that turns, so what slows the machine slows all of them. Decode time only,
behind the first token. A pair is one turn over all groups. Where a text differs there is no speed-up: whatever was measured, it was not
the same work. Knows the engine; prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from statistics import median
from typing import NamedTuple

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.engine.api import Result
from mlxspec.engine.engine import Engine
from mlxspec.engine.image_prompt import PromptWithImages
from mlxspec.engine.ratio import Ratio, ratio
from mlxspec.engine.stats import DrafterStats

PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One way to draft. depth: tokens of a model's draft, None where the contestant does not set it. whole: models choose drafts from
    the whole vocabulary, whatever they were loaded for."""

    name: str
    spec: SpecConfig
    depth: int | None = None
    whole: bool = False


@dataclass(kw_only=True)
class TimedTurn:
    """One turn over all groups: the tokens decoded and the seconds of their rounds, of a contestant and of plain decoding."""

    num_decoded: int = 0
    seconds: float = 0.0
    num_plain: int = 0
    plain_seconds: float = 0.0


@dataclass(kw_only=True)
class Score:
    """The measured answers of one contestant. turns: tokens and seconds of each turn. works: the work of each drafter. newest: answers
    of the last turn. different: the first answer that differs from plain decoding's, with plain decoding's; num_different: the number
    of such answers, including unmeasured turns."""

    name: str
    drafters: tuple[str, ...]
    depth: int | None = None
    whole: bool = False
    num_answers: int = 0
    num_different: int = 0
    num_rounds: int = 0
    num_drafted_rounds: int = 0
    num_decoded: int = 0
    turns: list[TimedTurn] = field(default_factory=list)
    works: dict[str, DrafterStats] = field(default_factory=dict)
    newest: Sequence[Result] = ()
    different: tuple[Result, Result] | None = None

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """Return the tokens a second with drafting and without, one pair for each turn."""
        timed = [t for t in self.turns if t.seconds > 0 and t.plain_seconds > 0]
        return [(t.num_decoded / t.seconds, t.num_plain / t.plain_seconds) for t in timed]

    @property
    def ratio(self) -> Ratio:
        """Return the contestant's speed as a multiple of plain decoding's."""
        if self.num_different:
            return Ratio(refusal="the texts differ")
        return ratio(self.pairs, num_rounds=self.num_rounds, num_drafted_rounds=self.num_drafted_rounds)

    @property
    def decode_speed(self) -> float:
        """Return the contestant's tokens a second, the median of the turns."""
        return median([speed for speed, _ in self.pairs] or [0.0])

    @property
    def plain_speed(self) -> float:
        """Return the tokens a second of plain decoding in the same turns, the median."""
        return median([speed for _, speed in self.pairs] or [0.0])

    @property
    def num_drafted(self) -> int:
        return sum(w.num_drafted for w in self.works.values())

    @property
    def num_accepted(self) -> int:
        return sum(w.num_accepted for w in self.works.values())

    @property
    def acceptance(self) -> float | None:
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def tokens_per_round(self) -> float:
        return self.num_decoded / self.num_rounds if self.num_rounds else 0.0

    def data(self) -> dict[str, object]:
        """Return the score as plain JSON."""
        names = (
            *(
                "name",
                "drafters",
                "depth",
                "whole",
                "num_answers",
                "num_different",
                "num_drafted",
                "num_accepted",
            ),
            *("acceptance", "tokens_per_round", "pairs", "plain_speed", "decode_speed"),
        )
        return {n: getattr(self, n) for n in names} | {
            "ratio": self.ratio.data(),
            "drafted": {n: (w.num_drafted, w.num_accepted) for n, w in self.works.items()},
            "by_position": {n: w.by_position for n, w in self.works.items()},
        }

    def compare(self, answers: Sequence[Result], plain: Sequence[Result]) -> None:
        """Count the answers whose tokens differ from those of plain decoding in `num_different`, and keep the first of them, with plain
        decoding's answer, in `different`."""
        differing = [(a, b) for a, b in zip(answers, plain, strict=True) if a.tokens != b.tokens]
        self.num_different += len(differing)
        self.different = self.different or next(iter(differing), None)

    def add(self, number: int, own: Taken, plain: Taken) -> None:
        """Add the answers of one group to a turn, and plain decoding's."""
        self.newest = own.answers
        self.num_answers += len(own.answers)
        self.turns += [TimedTurn() for _ in range(len(self.turns), number + 1)]
        turn = self.turns[number]
        turn.num_decoded += own.num_decoded
        turn.seconds += own.seconds
        turn.num_plain += plain.num_decoded
        turn.plain_seconds += plain.seconds
        for stats in (a.stats for a in own.answers):
            self.num_rounds += stats.num_rounds
            self.num_drafted_rounds += stats.num_drafted_rounds
            self.num_decoded += stats.num_decoded
            for name, work in stats.drafters.items():
                total = self.works.setdefault(name, DrafterStats())
                total.num_drafted += work.num_drafted
                total.num_accepted += work.num_accepted
                total.by_position = added(total.by_position, work.by_position)


def added(*counts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the sums, position by position, of verified and accepted tokens."""
    columns = zip_longest(*counts, fillvalue=(0, 0))
    return [(sum(v for v, _ in column), sum(a for _, a in column)) for column in columns]


def compare(
    engine: Engine,
    groups: Sequence[Sequence[Sequence[int] | PromptWithImages]],
    several: Sequence[Contestant],
    params: SamplingParams,
    *,
    repeat: int,
    told: Callable[[int, int], None] = lambda done, total: None,
    turns: Callable[[Sequence[Result]], int] | None = None,
) -> tuple[Score, list[Score]]:
    """Return plain decoding's score and the contestants'. Each group is answered together, `repeat` times after one unmeasured turn, in
    which shapes compile; row i of it has the seed of `params` plus i.

    told: called with the number of answers so far and of all. turns: replaces `repeat`: receives plain decoding's answers of a group's
    unmeasured turn and returns that group's number of measured turns.
    """
    plain = Contestant(name=PLAIN, spec=replace(engine.spec, drafters=(), policy="fixed", n_min=0))
    everybody = [plain, *several]
    scores = [Score(name=c.name, depth=c.depth, drafters=c.spec.drafters, whole=c.whole) for c in everybody]
    total, done = len(everybody) * (1 + repeat) * sum(map(len, groups)), 0

    def one_more(size: int) -> None:
        nonlocal done
        done += size
        told(done, total)

    for number, group in enumerate(groups):
        turn, last = 0, repeat
        while turn <= last:
            found = take_turn(
                engine, group, params, everybody, scores, turn=turn, first=number + turn, told=one_more
            )
            if turns is not None and not turn:
                last = turns(found[0].answers)
            turn += 1
    return scores[0], scores[1:]


class Taken(NamedTuple):
    """The answers of one contestant in one turn. seconds: of their rounds."""

    answers: Sequence[Result]
    seconds: float

    @property
    def num_decoded(self) -> int:
        return sum(a.stats.num_decoded for a in self.answers)


def take_turn(
    engine: Engine,
    group: Sequence[Sequence[int] | PromptWithImages],
    params: SamplingParams,
    everybody: Sequence[Contestant],
    scores: Sequence[Score],
    *,
    turn: int,
    first: int | None = None,
    told: Callable[[int], None] = lambda num: None,
) -> dict[int, Taken]:
    """Let every contestant answer a group, add the answers to the scores, and return them by contestant. Plain decoding is the first
    contestant.

    turn: 0 is not measured. first: the contestant that begins, by default chosen by the turn's number. told: called with the number of
    answers.
    """
    seeds = [replace(params, seed=(params.seed or 0) + i) for i in range(len(group))]
    found: dict[int, Taken] = {}
    start = (turn if first is None else first) % len(everybody)
    for i in [*range(start, len(everybody)), *range(start)]:
        before = engine.stats.round_seconds
        with proposing(engine, everybody[i].whole):
            answers = engine.generate(list(group), seeds, spec=everybody[i].spec)
        found[i] = Taken(answers, engine.stats.round_seconds - before)
        told(len(group))
    for i, score in enumerate(scores):
        score.compare(found[i].answers, found[0].answers)
        if turn:
            score.add(turn - 1, found[i], found[0])
    return found


@contextmanager
def proposing(engine: Engine, whole: bool) -> Iterator[None]:
    """Let models choose drafts from the whole vocabulary inside this context, or from the part that they were loaded for."""
    models = [d for d in engine.drafts.drafters.values() if isinstance(d, ModelDrafter)]
    before = [d.uses_whole_head for d in models]
    for drafter in models:
        drafter.uses_whole_head = whole
    try:
        yield
    finally:
        for drafter, uses_whole_head in zip(models, before, strict=True):
            drafter.uses_whole_head = uses_whole_head
