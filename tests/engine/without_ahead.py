"""A plugin for pytest: engines are built without `Pipeline`, so every round is read before the next is launched."""

from __future__ import annotations

from typing import Any

from mlxspec.drafters.drafts import Drafts
from mlxspec.engine import engine
from mlxspec.engine.rounds import Rounds
from mlxspec.engine.stats import EngineStats


def rounds_alone(drafts: Drafts, stats: EngineStats, *, widest: int | None, **_: Any) -> Rounds:
    """Return what stands for `Pipeline` at the one place where an engine makes one."""
    return Rounds(drafts, stats, widest=widest)


def pytest_configure() -> None:
    engine.Pipeline = rounds_alone  # type: ignore[assignment,misc]
