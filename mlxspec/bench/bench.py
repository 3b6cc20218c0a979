"""Times plain decoding and drafting on recorded prompts, in turns: the speed-up of each pair, and whether the texts are the same.

Decode time only, behind the first token. Where a text differs there is no speed-up: whatever was measured, it was not the same work.
Knows the engine; prints nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import median

from mlxspec.bench.workloads import Workload
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine, Result
from mlxspec.engine.stats import DrafterStats


@dataclass(frozen=True, kw_only=True)
class WorkloadOutcome:
    """One workload. pairs: drafted over plain speed, one a group of prompts and repetition; num_different: answers that were not the
    same. Speeds are tokens a second over all rows, one a run; plain_speed and decode_speed are their medians. by_position: of each
    drafter, how often its draft token i was verified and how often it was accepted."""

    workload: str
    num_prompts: int
    num_rows: int
    num_different: int
    pairs: tuple[float, ...]
    plain_speeds: tuple[float, ...]
    speeds: tuple[float, ...]
    tokens_per_round: float
    drafted: dict[str, tuple[int, int]]  # by drafter: drafted, accepted
    by_position: dict[str, list[tuple[int, int]]]

    @property
    def plain_speed(self) -> float:
        return median(self.plain_speeds)

    @property
    def decode_speed(self) -> float:
        return median(self.speeds)

    @property
    def is_same(self) -> bool:
        return self.num_different == 0

    @property
    def speedup(self) -> float | None:
        """Median of the pairs; None where texts differ."""
        return median(self.pairs) if self.is_same and self.pairs else None


@dataclass(frozen=True, kw_only=True)
class _Run:
    results: Sequence[Result]
    seconds: float

    @property
    def num_decoded(self) -> int:
        return sum(r.stats.num_decoded for r in self.results)

    @property
    def speed(self) -> float:
        return self.num_decoded / self.seconds if self.seconds > 0 else 0.0


def run_workload(
    engine: Engine, workload: Workload, spec: SpecConfig, *, num_rows: int, repeat: int, max_tokens: int
) -> WorkloadOutcome:
    """Every group of `num_rows` prompts `repeat` times plainly and with `spec`, taking turns in changing order, behind one pair of
    each that is not measured: shapes compile in it."""
    prompts = list(workload.prompts)
    groups = [prompts[i : i + num_rows] for i in range(0, len(prompts), num_rows)]
    pairs, plain_runs, runs, different = [], [], [], 0
    for index, group in enumerate(groups):
        for turn in range(1 + repeat):
            order = (False, True) if (turn + index) % 2 else (True, False)
            pair = {d: _run(engine, group, workload, spec if d else None, max_tokens) for d in order}
            different += _different(pair[False], pair[True])
            if turn:
                plain_runs.append(pair[False])
                runs.append(pair[True])
                if pair[False].speed > 0:
                    pairs.append(pair[True].speed / pair[False].speed)
    stats = [r.stats for run in runs for r in run.results]
    works: dict[str, list[DrafterStats]] = {}
    for s in stats:
        for name, work in s.drafters.items():
            works.setdefault(name, []).append(work)
    return WorkloadOutcome(
        workload=workload.name,
        num_prompts=len(prompts),
        num_rows=num_rows,
        num_different=different,
        pairs=tuple(pairs),
        plain_speeds=tuple(r.speed for r in plain_runs),
        speeds=tuple(r.speed for r in runs),
        tokens_per_round=sum(s.num_decoded for s in stats) / max(1, sum(s.num_rounds for s in stats)),
        drafted={
            n: (sum(w.num_drafted for w in found), sum(w.num_accepted for w in found))
            for n, found in works.items()
        },
        by_position={n: _added(found) for n, found in works.items()},
    )


def _added(works: Sequence[DrafterStats]) -> list[tuple[int, int]]:
    """Verified and accepted tokens by position, over several answers."""
    columns = zip_longest(*(w.by_position for w in works), fillvalue=(0, 0))
    return [(sum(v for v, _ in column), sum(a for _, a in column)) for column in columns]


@dataclass(frozen=True, kw_only=True)
class AnswerRound:
    """One round of an answer: verified draft tokens, those that were accepted, and how long it took."""

    num_drafted: int
    num_accepted: int
    seconds: float


def time_rounds(
    engine: Engine, prompt: Sequence[int], spec: SpecConfig, max_tokens: int
) -> list[AnswerRound]:
    """The rounds of one greedy answer."""
    request = engine.submit(prompt, SamplingParams(max_tokens=max_tokens), spec=spec)
    found, stats = list[AnswerRound](), request.stats
    rounds, drafted, accepted, seconds = 0, 0, 0, 0.0
    while request.finish_reason is None:
        engine.step()
        if stats.num_rounds > rounds:
            found.append(
                AnswerRound(
                    num_drafted=stats.num_drafted - drafted,
                    num_accepted=stats.num_accepted - accepted,
                    seconds=stats.decode_seconds - seconds,
                )
            )
            rounds, drafted, accepted = stats.num_rounds, stats.num_drafted, stats.num_accepted
            seconds = stats.decode_seconds
    return found


def _run(
    engine: Engine,
    group: Sequence[Sequence[int]],
    workload: Workload,
    spec: SpecConfig | None,
    max_tokens: int,
) -> _Run:
    plain = replace(engine.spec, drafters=(), policy="fixed")
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=workload.temperature, seed=i)
        for i in range(len(group))
    ]
    before = engine.stats.round_seconds
    results = engine.generate(list(group), params, spec=spec or plain)
    return _Run(results=results, seconds=engine.stats.round_seconds - before)


def _different(plain: _Run, drafted: _Run) -> int:
    return sum(a.tokens != b.tokens for a, b in zip(plain.results, drafted.results, strict=True))
