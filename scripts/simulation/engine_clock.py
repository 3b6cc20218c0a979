"""The real engine under a simulated clock: rounds and drafts of the demo model take what a machine's curve says, so that a busy machine
changes nothing and machines that are not here can be asked for.

Texts, drafts, catch-up, rest, launching ahead, and when a head reads the prompt are the engine's own. Counted are rounds, drafts with their
catch-up, and what reading the prompt takes longer where a head reads it too; not the reading itself. Knows an engine and machines;
prints nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.drafters.base import Ask, Draft, Drafter
from mlxspec.drafters.chain import Proposal
from mlxspec.drafters.model_based import ModelDrafter
from mlxspec.drafters.plan import RoundPlan
from mlxspec.engine.engine import Engine
from mlxspec.policy.costs import CostModel

from .requests import Machine


@dataclass(kw_only=True)
class Answer:
    """One answer. seconds: plain rounds that it took; widths: of its rounds."""

    tokens: tuple[int, ...]
    seconds: float
    widths: list[int]
    num_drafted: int
    num_accepted: int
    asked: int
    has_read: bool


@dataclass(kw_only=True)
class _Clock:
    """Plain rounds of one answer so far."""

    seconds: float = 0.0
    drafting: float = 0.0  # since the last round
    widths: list[int] = field(default_factory=list)
    num_asked: int = 0
    num_read: int = 0
    heard: dict[tuple[int, str], int] = field(default_factory=dict)


class SimulatedEngine:
    """An engine whose policies learn what `machine` takes. cold: plain rounds that the first round of a width takes longer."""

    def __init__(self, engine: Engine, machine: Machine, *, cold: float = 0.0) -> None:
        self.engine, self.machine, self.cold = engine, machine, cold
        self._curve, self._clock, self._ran = machine.curve(), _Clock(), set[int]()
        chain, drafting = engine.chain, engine.drafting
        self._took, self._ask, self._ask_all = drafting.took, chain.ask, chain.ask_all
        drafting.took = self.took  # type: ignore[method-assign]
        chain.ask, chain.ask_all = self.ask, self.ask_all  # type: ignore[method-assign]
        for drafter in chain.drafters.values():
            if isinstance(drafter, ModelDrafter):
                self._count_reading(drafter)

    def costs(self) -> CostModel:
        """The machine's costs, as an engine has learned them."""
        found = CostModel(pause=self.machine.pause)
        found.know(self._curve.known, self.machine.drafts)
        return found

    def restart(self) -> None:
        """Policy auto knows the machine's costs and nothing else, and no width has run."""
        self._ran = set()
        self.engine.follow(self.costs())

    def answer(
        self, prompt: str, spec: SpecConfig, *, tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> Answer:
        """Answer a prompt, up to so many tokens."""
        self._clock = clock = _Clock()
        given = self.engine.chat_prompt([{"role": "user", "content": prompt}])
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed)
        result = self.engine.generate(given, params, spec=spec)
        return Answer(
            tokens=result.tokens,
            seconds=clock.seconds,
            widths=clock.widths,
            num_drafted=result.stats.num_drafted,
            num_accepted=result.stats.num_accepted,
            asked=clock.num_asked,
            has_read=clock.num_read > 0,
        )

    # --- in place of the engine's own clock

    def took(
        self, rows: Sequence[int], num_tokens: int, seconds: float, *, ahead: bool, is_warm: bool
    ) -> None:
        clock = self._clock
        drafting, clock.drafting = clock.drafting, 0.0
        is_new = num_tokens not in self._ran and self.cold > 0
        self._ran.add(num_tokens)
        taken = self._curve.seconds(num_tokens) + drafting + self.cold * is_new
        clock.seconds += taken
        clock.widths.append(num_tokens)
        self._took(rows, num_tokens, taken, ahead=ahead, is_warm=not is_new)

    def ask(self, drafter: Drafter, asks: Sequence[Ask], plan: RoundPlan) -> dict[int, Proposal]:
        made = self._ask(drafter, asks, plan)
        lengths = [made[a.row].draft.length if a.row in made else 0 for a in asks]
        self._count(drafter, asks, lengths)
        return made

    def ask_all(
        self, drafter: Drafter, asks: Sequence[Ask], plan: RoundPlan, *, looks: bool = True
    ) -> list[Draft]:
        made = self._ask_all(drafter, asks, plan, looks=looks)
        self._count(drafter, asks, [d.length for d in made])
        return made

    def _count(self, drafter: Drafter, asks: Sequence[Ask], lengths: Sequence[int]) -> None:
        if not isinstance(drafter, ModelDrafter) or not any(lengths):
            return
        clock, queued = self._clock, 0
        for ask in asks:
            length, key = len(ask.history), (ask.row, drafter.name)
            queued += length - clock.heard.get(key, 1 if clock.num_read else 0)
            clock.heard[key] = length
        seconds = self.machine.drafts[drafter.name].seconds(max(lengths), queued, len(asks))
        clock.drafting += seconds
        clock.num_asked += 1

    def _count_reading(self, drafter: ModelDrafter) -> None:
        prime, observe, heard = drafter.prime, drafter.observe_rounds, dict[int, int]()

        def counted_observe(row: int, rounds: Any) -> None:
            heard[row] = heard.get(row, 0) + sum(len(tokens) for tokens, _ in rounds)
            observe(row, rounds)

        def counted_prime(row: int) -> None:
            clock, num = self._clock, heard.get(row, 0)
            clock.num_read = num
            clock.heard[row, drafter.name] = num - 1
            clock.seconds += self.machine.prefill * self.machine.drafts[drafter.name].share * num
            prime(row)

        drafter.observe_rounds, drafter.prime = counted_observe, counted_prime  # type: ignore[method-assign]


def fixed_spec(engine: Engine, drafters: Sequence[str], n_max: int) -> SpecConfig:
    """A fixed setting: lookups first if they are named first, then the head to this depth."""
    return replace(engine.spec, drafters=tuple(drafters), policy="fixed", n_max=n_max)


SETTINGS: Mapping[str, tuple[tuple[str, ...], int] | None] = {
    "off": None,
    **{f"mtp {k}": (("mtp",), k) for k in (1, 2, 3, 4, 6, 8)},
    "lookup": (("ngram-simple",), 16),
    **{f"lookup, mtp {k}": (("ngram-simple", "mtp"), k) for k in (1, 2, 3, 4, 6, 8)},
}

__all__ = ["SETTINGS", "Answer", "SimulatedEngine", "fixed_spec"]
