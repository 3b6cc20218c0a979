"""Requests for several models, of which one is in memory at a time, are served in the order in which they came."""

from __future__ import annotations

import asyncio

import pytest
from planting import catches, rewritten

from mlxspec.config import EngineConfig
from mlxspec.engine.engine import Engine
from mlxspec.errors import MemoryBudgetError
from mlxspec.server.models import Models
from tests import tiny_models


def made() -> Engine:
    return Engine(tiny_models.target(), tiny_models.tokenizer())


def test_who_asks_for_the_model_in_memory_waits_behind_who_asks_for_another() -> None:
    """Else a busy model would keep the other one out for ever."""
    served: list[str] = []

    async def play() -> None:
        models = Models({"one": made, "other": lambda: made()})
        may_leave = asyncio.Event()

        async def ask(name: str, number: int) -> None:
            async with models.use(name):
                served.append(f"{name} {number}")
                await may_leave.wait()

        asking = [asyncio.create_task(ask("one", 1))]
        while not served:
            await asyncio.sleep(0.01)
        for name, number in (("other", 2), ("one", 3), ("one", 4)):
            asking.append(asyncio.create_task(ask(name, number)))
            await asyncio.sleep(0.01)
        assert served == ["one 1"]
        may_leave.set()
        await asyncio.gather(*asking)
        assert models.num_loads == 3
        await models.stop()

    asyncio.run(play())
    assert served[:2] == ["one 1", "other 2"]
    assert sorted(served[2:]) == ["one 3", "one 4"]


@catches(
    "what is held beside a model takes nothing of its budget",
    "mlxspec.server.models:Models._made",
    rewritten("engine.memory.hold(", "max(0, "),
)
@catches(
    "only one of the models beside takes memory",
    "mlxspec.server.models:Models._made",
    rewritten("engine.memory.hold(sum(", "engine.memory.hold(max("),
)
def test_models_for_vectors_take_their_part_of_the_budget() -> None:
    """However often the model beside them is loaded anew; where nothing would be left, it is not."""
    alone = made()
    weights = alone.memory.weights
    alone.close()

    async def play(budget: int) -> list[int]:
        def with_budget() -> Engine:
            config = EngineConfig(memory_budget=budget, prefix_budget=0)
            return Engine(tiny_models.target(), tiny_models.tokenizer(), config=config)

        models = Models(
            {"one": with_budget, "other": lambda: with_budget()},
            beside={"words": made, "ranks": lambda: made()},
        )
        found = []
        try:
            for name in ("one", "other", "one"):
                async with models.use(name) as loaded:
                    found.append(loaded.engine.memory.weights)
        finally:
            await models.stop()
        return found

    assert asyncio.run(play(64 * weights)) == [3 * weights] * 3
    assert asyncio.run(play(3 * weights + 1)) == [3 * weights] * 3
    with pytest.raises(MemoryBudgetError):
        asyncio.run(play(3 * weights))
