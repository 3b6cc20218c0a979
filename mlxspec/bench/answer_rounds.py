"""The rounds of one answer: what each drafted, what was accepted, how long it took. Knows the engine; prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class AnswerRound:
    """One round of an answer: the number of verified draft tokens, the number accepted, and the round's seconds."""

    num_drafted: int
    num_accepted: int
    seconds: float


def time_rounds(
    engine: Engine, prompt: Sequence[int], spec: SpecConfig, max_tokens: int
) -> list[AnswerRound]:
    """Generate one greedy answer and return its rounds with their times."""
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
