"""What a job's run tells beside its updates."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from planting import catches, rewritten

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


@catches(
    "the second decoding belongs to nobody",
    "mlxspec.server.job_run:JobRun._prove",
    rewritten("SpecConfig(owner=self._job.spec.owner)", "SpecConfig()"),
)
@catches(
    "the second decoding drafts too",
    "mlxspec.server.job_run:JobRun._prove",
    rewritten("SpecConfig(owner=self._job.spec.owner)", "self._job.spec"),
)
def test_an_answer_is_proved_for_its_owner_and_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the second decoding leaves in the prefix cache is the owner's too."""

    def proof(prompt: Any, result: Any, params: Any) -> Any:
        yield prompt, params
        return "receipt"

    monkeypatch.setattr(job_run, "proof", proof)
    monkeypatch.setattr(job_run, "Result", SimpleNamespace(of=lambda request: request))
    spec = SpecConfig(owner="key", drafters=("suffix",))
    request = SimpleNamespace(
        stats=RequestStats(),
        spec=spec,
        params=None,
        finish_reason="stop",
        end_token=7,
        history=[1],
        max_context=10,
        constraints=None,
        answer=SimpleNamespace(stop_string=None, text=""),
        prompt_logprobs=None,
    )
    specs: list[SpecConfig] = []

    def submit(*_: Any, spec: SpecConfig, **__: Any) -> Stream:
        specs.append(spec)
        stream = Stream(lambda _: None)
        stream.accept(request)  # type: ignore[arg-type]
        stream.put(FinishEvent(request=1, reason="stop", error=None))
        return stream

    async def play() -> list[Any]:
        run = JobRun(replace(one_answer(), spec=spec, proves=True), SimpleNamespace(submit=submit))  # type: ignore[arg-type]
        await run.start()
        return [update async for update in run.updates()]

    (end,) = asyncio.run(play())
    assert end.receipt == "receipt"
    assert [(s.owner, s.drafters) for s in specs] == [("key", ("suffix",)), ("key", ())]
