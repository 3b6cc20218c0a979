"""The engine in an event loop: the answers of the engine itself, cancelled with their tasks, and errors where they are awaited."""

from __future__ import annotations

import asyncio
from functools import cache

import pytest

import mlxspec
from mlxspec import AsyncEngine, Engine, FinishEvent, SamplingParams, SpecConfig, TokensEvent
from mlxspec.errors import ConfigError, ContextOverflowError, EngineStoppedError

MESSAGES = [{"role": "user", "content": "what does os.path.join do?"}]
PARAMS = SamplingParams(max_tokens=24)
WAIT = 300  # seconds, on a machine that is busy


@cache
def plain() -> Engine:
    return mlxspec.load("demo", draft="off")


def test_answers_are_those_of_the_engine() -> None:
    async def main() -> None:
        async with AsyncEngine("demo", spec=SpecConfig(policy="fixed")) as engine:
            one, several, chat = await asyncio.gather(
                engine.generate("def main():", PARAMS),
                engine.generate(["import os\n", "x = 1\n"], [PARAMS, SamplingParams(max_tokens=5)]),
                engine.chat(MESSAGES, PARAMS),
            )
            assert (
                one == plain().generate("def main():", PARAMS)
                or one.text == plain().generate("def main():", PARAMS).text
            )
            assert [r.text for r in several] == [
                plain().generate("import os\n", PARAMS).text,
                plain().generate("x = 1\n", SamplingParams(max_tokens=5)).text,
            ]
            assert chat.text == plain().chat(MESSAGES, PARAMS).text
            events = [event async for event in engine.chat(MESSAGES, PARAMS, stream=True)]
            assert "".join(e.text for e in events if isinstance(e, TokensEvent)) == chat.text
            assert isinstance(events[-1], FinishEvent)
            assert chat.stats.num_accepted > 0

    asyncio.run(asyncio.wait_for(main(), WAIT))


def test_a_cancelled_task_cancels_its_request_and_others_go_on() -> None:
    async def main() -> None:
        async with AsyncEngine("demo") as engine:
            long = SamplingParams(max_tokens=2000, ignore_eos=True)
            task = asyncio.create_task(engine.generate("def main():", long))
            other = asyncio.create_task(engine.generate("import os\n", PARAMS))
            async with engine.stream("import os\n", long) as events:
                async for _ in events:
                    break
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await other).text == plain().generate("import os\n", PARAMS).text
            assert await asyncio.wrap_future(engine.worker.call(lambda e: e.is_idle))

    asyncio.run(asyncio.wait_for(main(), WAIT))


def test_errors_are_raised_where_they_are_awaited() -> None:
    async def main() -> None:
        engine = AsyncEngine("demo", draft="off")
        with pytest.raises(ConfigError, match="no prompt"):
            await engine.generate([])
        with pytest.raises(ConfigError, match="2 prompts"):
            await engine.generate(["a", "b"], [PARAMS])
        with pytest.raises(ContextOverflowError):
            await engine.generate([["a"], [1] * 100_000][1], PARAMS)
        with pytest.raises(ConfigError, match="empty"):
            await engine.generate(["a", ""], PARAMS)
        with pytest.raises(ContextOverflowError):
            async for _ in engine.stream([1] * 100_000):
                pass
        await engine.close()
        with pytest.raises(EngineStoppedError):
            await engine.generate("a")
        with pytest.raises(ConfigError, match="no drafter"):
            async with AsyncEngine("demo", draft="nonsense"):
                pass

    asyncio.run(asyncio.wait_for(main(), WAIT))
