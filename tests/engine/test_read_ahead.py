"""Prompts that are read ahead: the request that brings one reads what is new alone and gets the same text, and no other request waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import pytest
from planting import catches

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine import worker as workers
from mlxspec.engine.engine import Engine
from mlxspec.engine.read_ahead import read_ahead
from mlxspec.engine.request import Request
from mlxspec.engine.worker import Worker
from mlxspec.events import FinishEvent
from tests import tiny_models
from tests.engine import equality

LONG = 120.0
CHUNK = 64
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
SPEC = SpecConfig(drafters=("suffix", "ngram-simple", "mtp"), policy="fixed", owner="me")


def make(**options: Any) -> Engine:
    given = {"max_rows": 4, "prefill_chunk": CHUNK} | options
    return equality.engine(["ngram-simple", "mtp"], spec=SPEC, **given)


def text(num: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(10, tiny_models.EOS, num).tolist()


def answered(engine: Engine, prompt: Sequence[int], spec: SpecConfig = SPEC) -> Request:
    request = engine.submit(prompt, PARAMS, spec=spec)
    while not engine.is_idle:
        engine.step()
    return request


def nothing(*_: Any) -> Generator[None]:
    yield from ()


@catches("nothing is read", "mlxspec.engine.read_ahead:read_ahead", lambda right: nothing)
@pytest.mark.parametrize("num_pieces", [None, 2])
def test_a_request_reads_what_is_new_alone(num_pieces: int | None) -> None:
    """Also where the reading ended after some pieces: these are known. The text is that of an engine that read nothing ahead."""
    engine, plain, prompt = make(), make(), text(5 * CHUNK)
    before = vars(engine.stats).copy()
    running = read_ahead(engine, prompt, SPEC, {})
    for count, _ in enumerate(running, 1):
        if count == num_pieces:
            break
    running.close()
    assert engine.is_idle
    assert vars(engine.stats) == before
    whole = [*prompt, *text(30, seed=1)]
    request, other = answered(engine, whole), answered(plain, whole)
    assert request.history == other.history
    assert request.stats.num_cached == (len(prompt) if num_pieces is None else num_pieces * CHUNK)
    assert request.stats.num_read == len(whole) - request.stats.num_cached


@catches(
    "what is known is read once more",
    "mlxspec.engine.prefix.rows:Prefix.num_unknown",
    lambda right: lambda self, request, drafts: len(request.prompt),
)
def test_a_prompt_that_is_known_is_not_read() -> None:
    engine, prompt = make(), text(3 * CHUNK)
    assert [*read_ahead(engine, prompt, SPEC, {})]
    assert [*read_ahead(engine, prompt, SPEC, {})] == []
    assert [*read_ahead(engine, [*prompt, 11], SPEC, {})] == []


def test_it_is_of_its_owner_alone() -> None:
    engine, prompt = make(), text(3 * CHUNK)
    assert [*read_ahead(engine, prompt, SPEC, {})]
    other = answered(engine, [*prompt, 11], SpecConfig(drafters=("mtp",), policy="fixed", owner="another"))
    assert other.stats.num_cached == 0


@catches(
    "one's own texts hold what was only expected",
    "mlxspec.engine.read_ahead:replace",
    lambda right: lambda spec, **_: spec,
)
def test_it_is_not_among_the_earlier_texts() -> None:
    """What a person has not sent is in no text that drafts are looked up in."""
    engine = make(past_texts=1 << 20)
    before = engine.texts.nbytes
    assert [*read_ahead(engine, text(3 * CHUNK), SPEC, {})]
    while engine.texts.has_work:
        engine.texts.work()
    assert engine.texts.nbytes == before


def test_without_a_prefix_cache_nothing_is_read() -> None:
    assert [*read_ahead(make(prefix_budget=0), text(3 * CHUNK), SPEC, {})] == []


class Reads:
    """What a worker reads ahead. begun: a piece has been read; the second piece waits for `goes_on`. counts: pieces, by reading."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.counts: list[int] = []
        self.num_ended = 0

        def counted(engine: Engine, *expected: Any) -> Generator[None]:
            running = read_ahead(engine, *expected)
            self.counts.append(0)
            try:
                for _ in running:
                    self.counts[-1] += 1
                    self.begun.set()
                    yield
                    assert self.goes_on.wait(LONG)
            finally:
                running.close()
                self.num_ended += 1

        monkeypatch.setattr(workers, "read_ahead", counted)
        monkeypatch.setattr(workers, "rehearse", nothing)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_worker_reads_what_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, prompt = Reads(monkeypatch), text(3 * CHUNK)
    reads.goes_on.set()
    with Worker(make) as worker:
        worker.wait_ready(LONG)
        worker.expect(prompt, SPEC, "a")
        until(lambda: reads.counts == [3] and not worker.expected)
        stream = worker.submit([*prompt, 11], PARAMS, spec=SPEC, client="a")
        assert isinstance([*stream][-1], FinishEvent)
        assert stream.request is not None
        assert stream.request.stats.num_cached == len(prompt)


def greedy(right: Any) -> Any:
    """Return a Worker._end_ahead that first reads all that is expected."""

    def ended(self: Worker) -> None:
        for _ in self._ahead or ():
            pass
        right(self)

    return ended


@catches("a reading goes on to its end", "mlxspec.engine.worker:Worker._end_ahead", greedy)
def test_another_client_waits_for_one_piece_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that arrives during a piece of a long prompt is next. The rest of the prompt is read when the engine is idle again."""
    reads, prompt = Reads(monkeypatch), text(20 * CHUNK)
    with Worker(make) as worker:
        worker.wait_ready(LONG)
        worker.expect(prompt, SPEC, "a")
        assert reads.begun.wait(LONG)
        stream = worker.submit(text(5, seed=2), PARAMS, spec=SPEC, client="b")
        reads.goes_on.set()
        assert isinstance([*stream][-1], FinishEvent)
        assert reads.counts[0] <= 2
        until(lambda: not worker.expected)
        assert sum(reads.counts) <= 20 + 2  # what was read is not read again


@catches(
    "what is no longer expected is read on",
    "mlxspec.engine.worker:Worker._is_outdated",
    lambda right: lambda self: False,
    case="nothing",
)
@pytest.mark.parametrize("again", [None, text(2 * CHUNK, seed=3), []], ids=["request", "another", "nothing"])
def test_what_is_no_longer_expected_is_not_read(
    again: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's own request ends it, and so does another expectation, or none."""
    reads = Reads(monkeypatch)
    with Worker(make) as worker:
        worker.wait_ready(LONG)
        worker.expect(text(20 * CHUNK), SPEC, "a")
        assert reads.begun.wait(LONG)
        if again is None:
            worker.submit(text(5, seed=2), PARAMS, client="a")
        else:
            worker.expect(again, SPEC, "a")
        reads.goes_on.set()
        until(lambda: not worker.expected and not worker.num_open and reads.num_ended == len(reads.counts))
        assert reads.counts[0] <= 2
        assert reads.counts[1:] == ([2] if again else [])


def test_clients_that_are_expected_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    with Worker(make) as worker:
        worker.wait_ready(LONG)
        worker.expect(text(20 * CHUNK), SPEC, "first")
        assert reads.begun.wait(LONG)
        for i in range(20):
            worker.expect(text(CHUNK, seed=i), SPEC, str(i))
        assert [*worker.expected] == [str(i) for i in range(12, 20)]
        reads.goes_on.set()
    worker.expect(text(CHUNK), SPEC, "late")
    assert not worker.expected


def test_the_adapters_of_what_is_expected_reach_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix cache keeps apart what different adapters have read."""
    received: list[Any] = []

    def noted(engine: Engine, *expected: Any) -> Generator[None]:
        received.append(expected)
        yield from ()

    monkeypatch.setattr(workers, "read_ahead", noted)
    monkeypatch.setattr(workers, "rehearse", nothing)
    with Worker(make) as worker:
        worker.wait_ready(LONG)
        worker.expect(text(10), SPEC, adapters={"law": 0.5})
        until(lambda: bool(received))
    assert received == [(text(10), SPEC, {"law": 0.5})]
