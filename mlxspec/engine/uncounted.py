"""Runs requests of the engine's own, which are in none of its statistics: artificial ones, and prompts that are read ahead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlxspec.engine.engine import Engine, Prompt
from mlxspec.engine.request import Request


@contextmanager
def uncounted(engine: Engine, prompt: Prompt, *given: Any, **options: Any) -> Iterator[Request]:
    """Submit a request to an idle engine and yield it; at the end of the context cancel it and step until the engine is idle. given,
    options: further arguments of `Engine.submit`. The engine's statistics are then as they were. Raises what `Engine.submit` raises."""
    stats = vars(engine.stats).copy()
    request = engine.submit(prompt, *given, **options)
    try:
        yield request
    finally:
        engine.cancel(request.number)
        while not engine.is_idle:
            engine.step()
        vars(engine.stats).update(stats)
