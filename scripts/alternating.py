"""Alternating timings: every contestant once a round, in an order that turns, so that what slows the machine down slows all of them.

Knows functions without arguments; they must evaluate what they compute. Returns medians in seconds; ratios are the caller's business.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def alternate(
    contestants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 1,
    inner: int = 1,
) -> dict[str, list[float]]:
    """Seconds of one call (mean of `inner`), one entry a round and contestant, in the order they were taken."""
    names = list(contestants)
    for _ in range(warmup):
        for name in names:
            contestants[name]()
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            started = time.perf_counter()
            for _ in range(inner):
                contestants[name]()
            taken[name].append((time.perf_counter() - started) / inner)
    return taken


def median(taken: Mapping[str, list[float]], name: str) -> float:
    return statistics.median(taken[name])


def ratio(taken: Mapping[str, list[float]], name: str, base: str) -> float:
    """Median over rounds of name's time over base's time in the same round: drift of the machine cancels."""
    return statistics.median(a / b for a, b in zip(taken[name], taken[base], strict=True))
