"""Requests for several models, of which one is in memory at a time, are served in the order in which they came."""

from __future__ import annotations

import asyncio

from mlxspec.engine.engine import Engine
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
