"""Runs the ten tasks of `mlxspec bench mtp` and counts what drafting did in each. Columns are those of llama.cpp's MTP benchmark: predicted
tokens, drafted, accepted, rate, tokens a second. Knows engines; prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlxspec.bench.tasks import Task
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine

MAX_TOKENS = 192  # the benchmark's own

Ask = Callable[[Task, int], "Row"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One task. predicted, drafted, accepted: tokens. speed: tokens a second behind the prompt."""

    task: str
    predicted: int
    drafted: int
    accepted: int
    speed: float

    @property
    def rate(self) -> float | None:
        """Accepted over drafted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass(frozen=True, kw_only=True)
class MtpReport:
    """All tasks. seconds: wall time of everything, prompts included."""

    rows: tuple[Row, ...]
    seconds: float

    def aggregate(self) -> dict[str, Any]:
        """The benchmark's own summary."""
        drafted, accepted = sum(r.drafted for r in self.rows), sum(r.accepted for r in self.rows)
        return {
            "n_requests": len(self.rows),
            "total_predicted": sum(r.predicted for r in self.rows),
            "total_draft": drafted,
            "total_draft_accepted": accepted,
            "aggregate_accept_rate": round(accepted / drafted, 4) if drafted else None,
            "wall_s_total": round(self.seconds, 2),
        }


def run(tasks: Sequence[Task], ask: Ask, max_tokens: int, told: Callable[[Row], None]) -> MtpReport:
    """Every task once, greedy. told: of each as it ends."""
    started = time.perf_counter()
    rows = []
    for task in tasks:
        rows.append(ask(task, max_tokens))
        told(rows[-1])
    return MtpReport(rows=tuple(rows), seconds=time.perf_counter() - started)


def in_process(engine: Engine, spec: SpecConfig) -> Ask:
    """Asks an engine."""

    def ask(task: Task, max_tokens: int) -> Row:
        messages = [{"role": "user", "content": task.prompt}]
        stats = engine.chat(messages, SamplingParams(max_tokens=max_tokens), spec=spec).stats
        return Row(
            task=task.name,
            predicted=stats.num_generated,
            drafted=stats.num_drafted,
            accepted=stats.num_accepted,
            speed=stats.decode_speed,
        )

    return ask
