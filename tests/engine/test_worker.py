"""The engine's thread: what callers see of it from threads and event loops, and that nothing but its end ends it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from planting import catches, rewritten

from mlxspec.config import SamplingParams
from mlxspec.drafters.lookup import ngram_lookup
from mlxspec.engine import worker as workers
from mlxspec.engine.engine import Engine
from mlxspec.engine.stats import DrafterStats
from mlxspec.engine.stream import Stream
from mlxspec.engine.thread import JobThread
from mlxspec.engine.worker import Worker
from mlxspec.errors import CancelledError, ConfigError, ContextOverflowError, EngineStoppedError, ModelError
from mlxspec.events import FinishEvent, PrefillEvent, TokensEvent
from mlxspec.platform import device
from tests.engine import equality

ROOT = Path(__file__).resolve().parents[2]
LONG = 120.0
PROMPT = [5, 6, 7, 8]


def make() -> Engine:
    return equality.engine([ngram_lookup("ngram-simple", 2, 8)], max_rows=4, prefill_chunk=64)


def params(num: int = 16) -> SamplingParams:
    return SamplingParams(max_tokens=num, ignore_eos=True)


def tokens_of(events: list) -> list[int]:
    return [t for e in events if isinstance(e, TokensEvent) for t in e.tokens]


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker(make) as running:
        running.wait_ready(LONG)
        yield running


def test_events_are_those_of_the_engine(worker: Worker) -> None:
    wanted = worker.call(lambda engine: engine.generate(PROMPT, params())).result(LONG)
    events = list(worker.submit(PROMPT, params()))
    assert tuple(tokens_of(events)) == wanted.tokens
    assert isinstance(events[-1], FinishEvent)
    assert sum(isinstance(e, FinishEvent) for e in events) == 1
    assert events[-1].reason == "length"
    assert worker.num_open == 0


@catches(
    "a stream is open when its reader has the end",
    "mlxspec.engine.worker:Worker._step",
    rewritten("self._forget(stream)  #", "threading.Timer(0.2, self._forget, (stream,)).start()  #"),
)
def test_a_stream_whose_reader_has_the_end_is_not_open(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the worker is slow: what comes next may depend on whether others are open."""
    forget = Worker._forget

    def slowly(self: Worker, stream: Stream) -> None:
        time.sleep(0.1)
        forget(self, stream)

    monkeypatch.setattr(Worker, "_forget", slowly)
    assert isinstance(list(worker.submit(PROMPT, params()))[-1], FinishEvent)
    assert worker.num_open == 0


def test_events_reach_an_event_loop(worker: Worker) -> None:
    async def one(number: int) -> list[int]:
        stream = worker.submit([number, *PROMPT], params())
        await stream.accepted()
        async with stream:
            return tokens_of([event async for event in stream])

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(one(n) for n in range(6)))

    several = asyncio.run(asyncio.wait_for(all_of_them(), LONG))
    for number, tokens in enumerate(several):
        assert tokens == tokens_of(list(worker.submit([number, *PROMPT], params())))


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ([], None, ConfigError),
        ([10**6], None, ConfigError),
        ([1] * 5000, None, ContextOverflowError),
        (PROMPT, "no options", ConfigError),
    ],
)
def test_what_is_wrong_with_a_request_is_the_streams(worker: Worker, prompt, options, error) -> None:
    stream = worker.submit(prompt, options)
    with pytest.raises(error):
        stream.wait_accepted(LONG)
    with pytest.raises(error):
        next(stream)
    with pytest.raises(error):
        asyncio.run(stream.accepted())
    assert worker.num_open == 0
    assert tokens_of(list(worker.submit(PROMPT, params())))  # and it goes on


def test_closed_before_the_engine_took_it() -> None:
    go = threading.Event()

    def slow() -> Engine:
        go.wait(LONG)
        return make()

    with Worker(slow) as worker:
        stream = worker.submit(PROMPT, params())
        stream.close()
        go.set()
        with pytest.raises(CancelledError):
            stream.wait_accepted(LONG)
        assert [e.reason for e in stream] == ["cancelled"]
        engine, until = worker.wait_ready(LONG), time.monotonic() + LONG
        while not engine.is_idle and time.monotonic() < until:  # it runs artificial rounds while nobody asks
            time.sleep(0.01)
        assert engine.is_idle


@catches(
    "an idle engine is not asked for the ends of what it dropped",
    "mlxspec.engine.worker:Worker._must_step",
    lambda right: lambda self, engine: not engine.is_idle,
    errors=(TimeoutError,),
)
def test_what_a_full_queue_drops_has_an_end_where_all_others_leave_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "_OBEYS_FOR", LONG)
    begin, go = threading.Event(), threading.Event()
    with Worker(lambda: equality.engine([], max_waiting=2)) as worker:
        worker.call(lambda _: begin.wait(LONG))
        streams = [worker.submit(PROMPT, params(), client=client) for client in "aab"]
        worker.call(lambda _: go.wait(LONG))
        begin.set()
        for stream in streams:
            stream.wait_accepted(LONG)
        for stream in (streams[0], streams[2]):
            stream.close()
        go.set()
        last = streams[1].get(5.0)
        assert isinstance(last, FinishEvent)
        assert last.reason == "error"


def test_a_deadline_ends_the_answer(worker: Worker) -> None:
    kept = worker.submit(PROMPT, params(40))
    late = worker.submit(PROMPT, params(1500), deadline=0.01)
    last = list(late)[-1]
    assert last.reason == "error"
    assert "seconds" in last.error
    assert len(tokens_of(list(kept))) == 40


def test_a_fault_while_a_prompt_is_read_ends_that_request_only(worker: Worker) -> None:
    running = worker.submit(PROMPT, params(200))
    assert isinstance(running.get(LONG), PrefillEvent)
    assert isinstance(running.get(LONG), TokensEvent)

    def replace(engine: Engine) -> Stream:
        real, count = engine.model.forward, []

        def faulty(tokens, rows, cache, **kwargs):
            if rows.num_tokens == 33 and not count:
                count.append(1)
                raise RuntimeError("planted")
            return real(tokens, rows, cache, **kwargs)

        engine.model.forward = faulty
        return worker.submit([3] * 33, params())

    try:
        last = list(worker.call(replace).result(LONG))[-1]
        assert last.reason == "error"
        assert "planted" in last.error
        assert list(running)[-1].reason == "length"
        assert tokens_of(list(worker.submit(PROMPT, params())))
    finally:
        worker.call(lambda engine: engine.model.__dict__.pop("forward", None)).result(LONG)


def _sentence(stream: Stream) -> str:
    """Why a stream ended early, whether the engine had taken it or not."""
    try:
        last = list(stream)[-1]
    except EngineStoppedError as error:
        return str(error)
    assert last.reason == "error"
    return last.error


def test_a_broken_engine_fails_all_and_refuses_more() -> None:
    with Worker(make) as worker:

        def breaks(engine: Engine) -> None:
            def step() -> list:
                raise RuntimeError("planted")

            engine.step = step  # type: ignore[method-assign]

        worker.call(breaks).result(LONG)
        streams = [worker.submit(PROMPT, params()) for _ in range(3)]
        for stream in streams:
            assert "planted" in _sentence(stream)
        assert worker._ended.wait(LONG)
        assert worker.state == "failed"
        with pytest.raises(EngineStoppedError, match="planted"):
            worker.submit(PROMPT)
        with pytest.raises(EngineStoppedError):
            worker.call(lambda engine: None)
        with pytest.raises(EngineStoppedError):
            worker.wait_ready(LONG)


def test_a_model_that_cannot_be_made() -> None:
    go = threading.Event()

    def fails() -> Engine:
        go.wait(LONG)
        raise ModelError("There is nothing.")

    with Worker(fails) as worker:
        waiting, asked = worker.submit(PROMPT), worker.call(lambda engine: None)
        go.set()
        with pytest.raises(ModelError, match="nothing"):
            worker.wait_ready(LONG)
        with pytest.raises(EngineStoppedError, match="nothing"):
            waiting.wait_accepted(LONG)
        with pytest.raises(EngineStoppedError, match="nothing"):
            asked.result(LONG)


def test_stopping_ends_streams_and_thread() -> None:
    worker = Worker(make)
    worker.wait_ready(LONG)
    streams = [worker.submit(PROMPT, params(1500)) for _ in range(6)]
    assert isinstance(streams[0].get(LONG), PrefillEvent)
    assert isinstance(streams[0].get(LONG), TokensEvent)
    assert worker.stop(LONG)
    assert list(streams[0])[-1].reason == "cancelled"
    for stream in streams[1:]:
        try:
            assert list(stream)[-1].reason == "cancelled"
        except EngineStoppedError:
            assert stream.request is None
    assert worker.state == "stopped"
    assert worker.stop()


def test_stopping_while_it_loads_holds_nobody_up() -> None:
    go = threading.Event()

    def slow() -> Engine:
        go.wait(LONG)
        return make()

    worker = Worker(slow)
    stream = worker.submit(PROMPT)
    assert not worker.stop(0.05)
    with pytest.raises(EngineStoppedError):
        stream.wait_accepted(LONG)
    go.set()
    assert worker.stop(LONG)
    assert worker.state == "stopped"


def test_nobody_waits_for_ever() -> None:
    with Worker(make) as worker:
        worker.wait_ready(LONG)
        stream = worker.submit(PROMPT, params(4))
        list(stream)
        assert stream.get(LONG) is None
        with pytest.raises(TimeoutError):
            Stream(lambda _: None).wait_accepted(0.01)
        with pytest.raises(TimeoutError):
            Stream(lambda _: None).get(0.01)


def test_a_process_that_used_one_ends_cleanly() -> None:
    code = """
from mlxspec.engine.thread import JobThread
from mlxspec.engine.worker import Worker
def make():
    from mlxspec.engine.load import load
    return load("demo", draft="off")
worker = Worker(make)
print(worker.wait_ready(120).name, len(list(worker.submit("def main():"))) > 0)
if {stopped}:
    assert worker.stop(60)
"""
    for stopped in (True, False):
        done = subprocess.run(
            [sys.executable, "-c", code.format(stopped=stopped)], capture_output=True, text=True, timeout=300
        )
        assert (done.returncode, done.stdout) == (0, "demo True\n"), done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_engines_one_after_the_other_leave_no_threads() -> None:
    """MLX keeps a CPU stream's thread for every thread that used it."""
    shared, counts = JobThread(), []
    for _ in range(4):
        with Worker(make, thread=shared) as worker:
            assert len(tokens_of(list(worker.submit(PROMPT, params())))) == 16
        counts.append(len(os.listdir("/proc/self/task")))
    shared.close()
    assert shared.join(LONG)
    assert counts[1:] == counts[:1] * 3, counts


def test_a_worker_that_is_stopped_before_its_turn_makes_no_engine() -> None:
    shared, busy, made = JobThread(), threading.Event(), []
    shared.run(lambda: bool(busy.wait(LONG)))  # type: ignore[arg-type, return-value]
    waiting = Worker(lambda: made.append(1) or make(), thread=shared)  # type: ignore[func-returns-value]
    assert not waiting.stop(0.01)
    busy.set()
    assert waiting.stop(LONG)
    assert not made
    shared.close()
    assert shared.join(LONG)


@catches(
    "what nobody reads grows without end",
    "mlxspec.engine.stream:Stream._count",
    lambda right: lambda self, event, sign: None,
)
def test_a_stream_that_nobody_reads_rests(worker: Worker) -> None:
    """Others go on, and it has its whole text in the end."""
    most, num = 24, 200
    wanted = tokens_of(list(worker.submit(PROMPT, params(num))))
    unread = worker.submit(PROMPT, params(num), most_unread=most)
    assert unread.wait_accepted(LONG)
    until = time.monotonic() + LONG
    while not (unread.is_done or worker.call(lambda engine: engine.is_resting).result(LONG)):
        assert time.monotonic() < until
        time.sleep(0.01)
    num_waiting = sum(len(e.tokens) for e in unread._events if isinstance(e, TokensEvent))
    assert most <= num_waiting <= 2 * most
    assert tokens_of(list(worker.submit(PROMPT, params(num)))) == wanted
    assert sum(len(e.tokens) for e in unread._events if isinstance(e, TokensEvent)) == num_waiting
    assert tokens_of(list(unread)) == wanted


def test_the_deadline_of_a_stream_that_nobody_reads_passes(worker: Worker) -> None:
    unread = worker.submit(PROMPT, params(10_000), most_unread=8, deadline=0.5)
    assert unread.wait_accepted(LONG)
    until = time.monotonic() + LONG
    while not unread.is_done and time.monotonic() < until:
        time.sleep(0.01)
    (*_, last) = list(unread)
    assert isinstance(last, FinishEvent)
    assert last.error == "0.5 seconds were not enough."


def test_a_stream_is_behind_by_tokens_and_until_half_of_them_are_read() -> None:
    stream = Stream(lambda _: None, 8)
    for num in (4, 3):
        stream.put(TokensEvent(request=0, tokens=(1,) * num, text=""))
    assert not stream.is_behind
    stream.put(TokensEvent(request=0, tokens=(1,), text=""))
    assert stream.is_behind
    stream.put(TokensEvent(request=0, tokens=(1, 1), text=""))
    stream.get()
    assert stream.is_behind  # six wait
    stream.get()
    assert not stream.is_behind  # three


@pytest.mark.skipif(device.has_gpu(), reason="a GPU's memory is limited by what is claimed")
@catches(
    "an idle engine keeps what it computed with",
    "mlxspec.platform.device:give_back_heap",
    lambda _: lambda: None,
)
def test_memory_of_an_answer_is_given_back_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back, held = device.give_back_heap, list[tuple[int, int]]()
    is_idle = threading.Event()

    def noted() -> None:
        before = mx.get_cache_memory()
        given_back()
        held.append((before, mx.get_cache_memory()))
        is_idle.set()

    monkeypatch.setattr(device, "give_back_heap", noted)
    with Worker(make) as worker:
        assert is_idle.wait(LONG)
        is_idle.clear()
        list(worker.submit(PROMPT, params()))
        assert is_idle.wait(LONG)
    assert len(held) == 2
    assert all(before > after == 0 for before, after in held), held


def test_a_drafters_places_count_what_was_accepted_there() -> None:
    stats = DrafterStats()
    stats.add(3, 1)
    stats.add(2, 2)
    assert stats.by_position == [(2, 2), (2, 1), (1, 0)]
    assert (stats.num_drafted, stats.num_accepted) == (5, 3)


FAILING = """
import sys
import mlx.core as mx
from mlxspec.config import SamplingParams
from mlxspec.engine.engine import Engine
from mlxspec.engine.worker import Worker
from mlxspec.errors import EngineStoppedError
from tests import tiny_models

PROMPT, usual = [5, 6, 7], SamplingParams(max_tokens=8)

def fails(tokens, logits):
    return logits + mx.linalg.inv(mx.zeros((3, 3)), stream=mx.cpu).sum()

with Worker(lambda: Engine(tiny_models.target())) as worker:
    worker.wait_ready()
    wanted = list(worker.submit(PROMPT, usual))[-1].reason
    for number in range(100):
        try:
            (*_, end) = worker.submit(PROMPT, SamplingParams(max_tokens=8, logits_processors=(fails,)))
            (*_, good) = worker.submit(PROMPT, usual)
        except EngineStoppedError as error:
            print(number, error)
            break
        print(end.error, file=sys.stderr)
        if good.reason != wanted:
            print(number, good.error)
            break
"""


@pytest.mark.skipif(device.has_gpu(), reason="a GPU's failed evaluations lose no tasks")
def test_a_process_in_which_computations_fail_ends_with_a_sentence() -> None:
    """MLX on a CPU counts the tasks of a failed evaluation that never run, and waits for ever once they are a hundred."""
    done = subprocess.run(
        [sys.executable, "-c", FAILING], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    number, _, said = done.stdout.partition(" ")
    assert int(number) == device.FAILED_AT_MOST - 1, done.stdout + done.stderr
    assert "MLX has failed to compute 20 times in this process" in said
