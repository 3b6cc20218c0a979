"""The longest context that a model can have in its memory budget: one row grows by chunks while memory is measured, and stops before the
next chunk would take more than there is. Knows the engine; prints nothing and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from mlxspec.config import SamplingParams
from mlxspec.engine.engine import Engine
from mlxspec.errors import MemoryBudgetError
from mlxspec.platform import device

LEAST = 64  # tokens
_ANSWER = 16  # tokens that are decoded at the end, so that a verify at full length is measured too


@dataclass(frozen=True, kw_only=True)
class Longest:
    """context: in tokens. ended_by: the model's own context; the engine's estimate, above which it refuses requests; or what was measured.
    peak: bytes that MLX had at most; budget: bytes that it may have."""

    context: int
    ended_by: Literal["model", "estimate", "memory"]
    peak: int
    budget: int


def longest(engine: Engine, told: Callable[[int, int], None] = lambda done, total: None) -> Longest:
    """Of an engine without a prefix store that has nothing to do. told: is given how many tokens were read, of how many. Raises
    MemoryBudgetError where not even LEAST tokens fit."""
    memory, spec = engine.memory, engine.spec
    most = min(engine.max_context, memory.most_tokens(spec))
    if most < LEAST:
        raise MemoryBudgetError(
            f"Not even {LEAST} tokens fit beside the weights: raise memory_budget, or take a smaller model."
        )
    vocab = engine.model.vocab_size
    request = engine.submit(
        [i % vocab for i in range(most - _ANSWER)],
        SamplingParams(max_tokens=_ANSWER, ignore_eos=True),
        spec=spec,
    )
    done = over = peak = grown = 0
    began = held = mx.get_active_memory()
    while request.finish_reason is None:
        # the row behind the next chunk, as it is estimated or by the largest step so far, which buffers outgrow by an eighth; and what a
        # chunk takes while it runs
        after = memory.row(min(done + engine.prefill_chunk, most), spec)
        grows = max(began + after - held, grown + grown // 8) + over
        if not _fits(held, grows, memory.budget):
            break
        mx.reset_peak_memory()
        engine.step()
        taken, before, held = mx.get_peak_memory(), held, mx.get_active_memory()
        grown = max(grown, held - before)
        peak, over = max(peak, taken), max(over, taken - held)
        if taken > memory.budget:
            break
        done = request.stats.num_read
        told(done, most)
    ended = request.finish_reason == "length"
    engine.cancel(request.number)
    engine.step()
    if not ended and done < LEAST:
        raise MemoryBudgetError(
            f"The memory that was measured is full behind {done} tokens: raise memory_budget, or take a smaller model."
        )
    by: Literal["model", "estimate", "memory"] = "estimate" if most < engine.max_context else "model"
    return Longest(
        context=most if ended else done, ended_by=by if ended else "memory", peak=peak, budget=memory.budget
    )


def _fits(held: int, grows: int, budget: int) -> bool:
    """Whether so many bytes more may be taken: of the budget, and of what the machine has free now."""
    free = device.free_memory()
    return held + grows <= budget and (free is None or grows <= free)
