"""The real engine with its rounds noted, and under a simulated clock: rounds and drafts of the demo model take what a machine's curve says,
so that a busy machine changes nothing and machines that are not here can be asked for.

Texts, drafts, catch-up, rest, launching ahead, and when a head reads the prompt are the engine's own. Counted are rounds, drafts with their
catch-up, and what reading the prompt takes longer where a head reads it too; not the reading itself. Knows an engine and machines;
prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.base import Draft
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.drafters.policy import ModelCall, RoundPlan
from mlxspec.engine.engine import Engine
from mlxspec.policy.costs import CostModel

from .requests import Machine


class Round(NamedTuple):
    """One round of one row. drafts: depth and catch-up of those that a model made since the last round was read. seconds: that the engine
    was told of. is_ahead: launched before the one in front was read. is_warm: nothing was compiled in it."""

    width: int
    drafts: tuple[tuple[int, int], ...]
    seconds: float
    is_ahead: bool
    is_warm: bool


@dataclass(kw_only=True)
class Answer:
    """One answer. rounds: its rounds, in order; num_read: tokens of the prompt that a head read. seconds: of decoding."""

    tokens: tuple[int, ...] = ()
    rounds: list[Round] = field(default_factory=list)
    num_read: int = 0
    seconds: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def widths(self) -> list[int]:
        return [r.width for r in self.rounds]


class WatchedEngine:
    """An engine that notes the rounds of each answer, of one row with one drafter that runs a model: the head."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self._answer = engine, Answer()
        self._drafts: list[tuple[int, int]] = []  # since the last round was read
        self._heard = 0  # tokens of the row that the model has run
        drafts = engine.drafts
        self._learn, self._ask = drafts.learn, drafts._ask
        drafts.learn, drafts._ask = self.learn, self.ask  # type: ignore[method-assign]
        for drafter in drafts.drafters.values():
            if isinstance(drafter, ModelDrafter):
                self._note_reading(drafter)

    def answer(
        self, prompt: str, spec: SpecConfig, *, tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> Answer:
        """Answer a prompt, up to so many tokens."""
        self._answer, self._heard, self._drafts = Answer(), 0, []
        given = self.engine.chat_prompt([{"role": "user", "content": prompt}])
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed)
        started = time.perf_counter()
        result = self.engine.generate(given, params, spec=spec)
        seconds = time.perf_counter() - started - result.stats.prefill_seconds
        found = replace(
            self._answer,
            tokens=result.tokens,
            num_drafted=result.stats.num_drafted,
            num_accepted=result.stats.num_accepted,
        )
        return replace(found, seconds=self.seconds_of(found, seconds))

    def seconds_of(self, answer: Answer, seconds: float) -> float:
        """What decoding took."""
        return seconds

    def round_of(self, made: Round) -> Round:
        """What the engine is told of a round."""
        return made

    # --- in place of the engine's own

    def learn(
        self,
        plan: RoundPlan,
        numbers: Sequence[int],
        num_tokens: int,
        seconds: float,
        *,
        ahead: bool,
        is_warm: bool,
    ) -> None:
        made = self.round_of(Round(num_tokens, tuple(self._drafts), seconds, ahead, is_warm))
        self._drafts = []
        self._answer.rounds.append(made)
        self._learn(plan, numbers, num_tokens, made.seconds, ahead=ahead, is_warm=made.is_warm)

    def ask(self, *given: Any, **options: Any) -> tuple[list[Draft], ModelCall]:
        made, call = self._ask(*given, **options)
        if call.depth:
            (row,) = call.rows
            self._drafts.append((call.depth, len(row.history) - self._heard))
            self._heard = len(row.history)
        return made, call

    def _note_reading(self, drafter: ModelDrafter) -> None:
        prime, hear, heard = drafter.prime, drafter.hear, dict[int, int]()

        def noted_hear(row: int, tokens: Sequence[int], hidden: Any) -> None:
            heard[row] = heard.get(row, 0) + len(tokens)
            hear(row, tokens, hidden)

        def noted_prime(row: int) -> None:
            self._answer.num_read = heard.get(row, 0)
            self._heard = self._answer.num_read - 1
            prime(row)

        drafter.hear, drafter.prime = noted_hear, noted_prime  # type: ignore[method-assign]


class SimulatedEngine(WatchedEngine):
    """An engine whose policies learn what `machine` takes, in plain rounds. cold: plain rounds that the first round of a width takes
    longer."""

    def __init__(self, engine: Engine, machine: Machine, *, cold: float = 0.0) -> None:
        super().__init__(engine)
        self.machine, self.cold = machine, cold
        self._curve, self._ran = machine.curve(), set[int]()

    def costs(self) -> CostModel:
        """The machine's costs, as an engine has learned them."""
        found = CostModel(pause=self.machine.pause)
        found.know(self._curve.known, self.machine.drafts)
        return found

    def restart(self) -> None:
        """Policy auto knows the machine's costs and nothing else, and no width has run."""
        self._ran = set()
        self.engine.follow(self.costs())

    def round_of(self, made: Round) -> Round:
        is_new = made.width not in self._ran and self.cold > 0
        self._ran.add(made.width)
        seconds = self._curve.seconds(made.width) + self.cold * is_new
        seconds += sum(self.machine.drafts["mtp"].seconds(depth, queued) for depth, queued in made.drafts)
        return made._replace(seconds=seconds, is_warm=not is_new)

    def seconds_of(self, answer: Answer, seconds: float) -> float:
        read = self.machine.prefill * self.machine.head * answer.num_read
        return read + sum(r.seconds for r in answer.rounds)


def fixed_spec(engine: Engine, drafters: Sequence[str], n_max: int) -> SpecConfig:
    """A fixed setting: lookups first if they are named first, then the head to this depth."""
    return replace(engine.spec, drafters=tuple(drafters), policy="fixed", n_max=n_max)


SETTINGS: Mapping[str, tuple[tuple[str, ...], int] | None] = {
    "off": None,
    **{f"mtp {k}": (("mtp",), k) for k in (1, 2, 3, 4, 6, 8)},
    "lookup": (("ngram-simple",), 16),
    **{f"lookup, mtp {k}": (("ngram-simple", "mtp"), k) for k in (1, 2, 3, 4, 6, 8)},
}

__all__ = ["SETTINGS", "Answer", "Round", "SimulatedEngine", "WatchedEngine", "fixed_spec"]
