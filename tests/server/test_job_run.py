"""What a job's run tells beside its updates."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from planting import catches

from mlxspec.config import SpecConfig
from mlxspec.engine.stats import RequestStats
from mlxspec.engine.stream import Stream
from mlxspec.events import FinishEvent, TokensEvent
from mlxspec.server import job_run
from mlxspec.server.job_run import Delta, End, JobRun
from tests.server.jobs import one_answer


def _always_anew(right: Any) -> Any:
    async def follow(self: JobRun, choice: int, stream: Stream) -> Any:
        async for update in right(self, choice, stream):
            self.first_token = None
            yield update

    return follow


@catches("the last token is taken for the first", "mlxspec.server.job_run:JobRun._follow", _always_anew)
def test_the_first_token_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics tell the time until it came."""
    now = [10.0]
    monkeypatch.setattr(job_run, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stream = Stream(lambda _: None)

    async def play() -> JobRun:
        run = JobRun(one_answer(), SimpleNamespace(submit=lambda *_, **__: stream))  # type: ignore[arg-type]
        stream.accept(SimpleNamespace(stats=RequestStats()))  # type: ignore[arg-type]
        await run.start()
        updates = run.updates()
        for token in range(3):
            now[0] += 1.0
            stream.put(TokensEvent(request=1, tokens=(token,), text="x"))
            assert isinstance(await anext(updates), Delta)
        await updates.aclose()
        return run

    run = asyncio.run(play())
    assert run.first_token is not None
    assert run.first_token - run.started == 1.0


@pytest.mark.parametrize(
    ("reason", "length", "end_token", "cause"),
    [
        ("length", 9, None, "limit"),
        ("length", 10, None, "context"),
        ("stop", 10, 7, "end"),
        ("stop", 10, None, "stop_string"),
    ],
)
def test_why_an_answer_ended(reason: Any, length: int, end_token: int | None, cause: str) -> None:
    """An answer that fills the context is told apart from one that reaches its own limit."""
    stream = Stream(lambda _: None)
    request = SimpleNamespace(
        stats=RequestStats(),
        spec=SpecConfig(),
        history=[1] * length,
        max_context=10,
        finish_reason=reason,
        end_token=end_token,
        constraints=None,
        answer=SimpleNamespace(stop_string=None, text=""),
        prompt_logprobs=None,
    )

    async def play() -> list[Any]:
        run = JobRun(one_answer(), SimpleNamespace(submit=lambda *_, **__: stream))  # type: ignore[arg-type]
        stream.accept(request)  # type: ignore[arg-type]
        stream.put(FinishEvent(request=1, reason=reason, error=None))
        await run.start()
        return [update async for update in run.updates()]

    (end,) = asyncio.run(play())
    assert isinstance(end, End)
    assert (end.cause, end.reason) == (cause, reason)
