"""Who waits for whom, counted in steps and pieces, never in seconds; and that what fails, is late or is cancelled is one request only."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from mlxspec.config import SamplingParams
from mlxspec.engine.engine import Engine
from mlxspec.engine.request import Request
from mlxspec.engine.schedule import Turns
from mlxspec.errors import ConfigError, EngineStoppedError, QueueFullError
from mlxspec.events import FinishEvent, PrefillEvent, TokensEvent
from tests import tiny_models
from tests.engine import equality
from tests.engine.equality import ALL, asked, prompts, same, spec

CHUNK = 32
LONG = (np.arange(12 * CHUNK) * 7 % tiny_models.EOS).tolist()
FEW = SamplingParams(max_tokens=4, ignore_eos=True)
MANY = SamplingParams(max_tokens=60, ignore_eos=True)


@cache
def small() -> Engine:
    """One engine for all tests that leave it empty. Without a prefix cache: what one test read would be there for the next one."""
    return equality.engine(prefill_chunk=CHUNK, prefix_budget=0)


def answer_of(request: Request) -> tuple[int, ...]:
    return tuple(request.history[len(request.prompt) :])


def run(engine: Engine) -> list:
    events = []
    while not engine.is_idle:
        events += engine.step()
    return events + engine.step()


# ---- order


def test_every_second_piece_is_the_oldest_ones() -> None:
    turns, served = Turns(), [0, 0, 0]
    order = []
    for _ in range(8):
        place = turns.next(served)
        assert turns.next(served) == place
        turns.took()
        served[place] += 1
        order.append(place)
    assert order == [0, 1, 0, 2, 0, 1, 0, 2]


def test_a_short_prompt_waits_for_one_piece_of_a_long_one() -> None:
    """Time to its first token, in chunks of prompts: the oldest one's, and its own."""
    engine = small()
    long = engine.submit(LONG, FEW)
    engine.step()
    for _ in range(3):  # whoever's turn it is when it comes
        short = engine.submit([5, 6, 7, 8], FEW)
        read = 0
        while not answer_of(short):
            pieces = [e for e in engine.step() if isinstance(e, PrefillEvent) and e.request == long.number]
            read += len(pieces)
        assert read <= 1
        assert not answer_of(long)
    run(engine)
    assert len(answer_of(long)) == 4


def test_short_prompts_without_end_do_not_starve_a_long_one() -> None:
    engine = small()
    long = engine.submit(LONG, FEW)
    steps = 0
    while not answer_of(long):
        if engine.num_waiting + engine.num_running < 4:
            engine.submit([1 + steps % 90] * (CHUNK - 1), FEW)
        engine.step()
        steps += 1
    assert steps <= 2 * len(LONG) // CHUNK + 1
    run(engine)


@pytest.mark.parametrize("drafters", [(), ALL], ids=["plain", "drafted"])
def test_rows_that_decode_wait_for_one_chunk_at_most(drafters: tuple[str, ...]) -> None:
    """While a long prompt is read, each step still is a round for those who decode; several short prompts share a chunk."""
    engine = small()
    wish = spec(*drafters)
    alone = engine.generate([1, 2, 3], MANY, spec=wish)
    first = engine.submit([1, 2, 3], MANY, spec=wish)
    engine.step()
    engine.step()
    engine.submit(LONG, FEW, spec=wish)
    others = [engine.submit([9, i], FEW, spec=wish) for i in range(3)]
    done: dict[int, int] = {}
    while first.finish_reason is None:
        before = len(answer_of(first))
        events = engine.step()
        ends = [e for e in events if isinstance(e, PrefillEvent)]
        assert len(answer_of(first)) > before
        assert sum(e.num_done - done.get(e.request, e.num_cached) for e in ends) <= CHUNK
        done |= {e.request: e.num_done for e in ends}
    assert answer_of(first) == alone.tokens
    run(engine)
    assert all(len(answer_of(r)) == 4 for r in others)


def test_progress_is_told_piece_by_piece() -> None:
    events = [e for e in small().stream(LONG[:100], FEW) if isinstance(e, PrefillEvent)]
    assert [e.num_done for e in events] == [32, 64, 96, 100]
    assert all((e.num_total, e.num_cached) == (100, 0) for e in events)


# ---- whose events are whose


def test_generate_leaves_submitted_requests_their_events() -> None:
    engine = small()
    request = engine.submit([1, 2, 3], MANY)
    engine.generate([4, 5, 6], MANY)
    list(engine.stream([7, 8], MANY))
    events = run(engine)
    assert {e.request for e in events} == {request.number}
    assert tuple(t for e in events if isinstance(e, TokensEvent) for t in e.tokens) == answer_of(request)
    assert [type(e) for e in (events[0], events[-1])] == [PrefillEvent, FinishEvent]


@pytest.mark.parametrize("stage", ["waiting", "reading", "first", "ahead", "drafting"])
def test_cancel_at_every_stage_tells_once_and_frees(stage: str) -> None:
    engine = small()
    wish = spec(*ALL) if stage == "drafting" else spec()
    beside = engine.submit([3, 1, 2], MANY, spec=wish)
    doomed = engine.submit(LONG if stage == "reading" else [1, 2, 3], MANY, spec=wish)
    for _ in range({"waiting": 0, "reading": 3, "first": 1, "ahead": 4, "drafting": 4}[stage]):
        engine.step()
    assert engine.cancel(doomed.number)
    assert not engine.cancel(doomed.number)
    events = run(engine)
    ends = [e for e in events if isinstance(e, FinishEvent)]
    assert [(e.request, e.reason) for e in ends] == [(doomed.number, "cancelled"), (beside.number, "length")]
    assert engine.nbytes == 0
    assert answer_of(beside) == engine.generate([3, 1, 2], MANY, spec=wish).tokens


# ---- limits


@pytest.mark.parametrize("steps", [0, 3, 20])
def test_a_deadline_ends_a_request_wherever_it_is(steps: int) -> None:
    engine = small()
    late = engine.submit(LONG, SamplingParams(max_tokens=500, ignore_eos=True), deadline=1000)
    other = engine.submit([1, 2], FEW)
    events = []
    for _ in range(steps):
        events += engine.step()
    assert late._deadline is not None
    late._deadline = (0.0, late._deadline[1])
    events += run(engine)
    (end,) = [e for e in events if isinstance(e, FinishEvent) and e.request == late.number]
    assert (end.reason, end.error) == ("error", "1000 seconds were not enough.")
    assert len(answer_of(other)) == 4
    assert engine.nbytes == 0


def test_a_deadline_must_be_seconds() -> None:
    for bad in (-1, float("nan"), "5", True):
        with pytest.raises(ConfigError):
            small().submit([1], FEW, deadline=bad)
    assert small().is_idle


def test_the_queue_is_bounded_for_those_who_submit() -> None:
    engine = equality.engine([], max_rows=1, max_waiting=2)
    first = engine.submit([1, 2], FEW)
    engine.step()
    waiting = [engine.submit([3, i], FEW) for i in range(2)]
    with pytest.raises(QueueFullError) as caught:
        engine.submit([4], FEW)
    assert caught.value.num_waiting == engine.num_waiting == 2
    assert len(engine.generate([[5]] * 4, FEW)) == 4  # they are the caller's own
    run(engine)
    assert all(len(answer_of(r)) == 4 for r in [first, *waiting])


def test_a_draining_engine_ends_what_it_has() -> None:
    engine = equality.engine([])
    request = engine.submit([1, 2], FEW)
    engine.drain()
    with pytest.raises(EngineStoppedError):
        engine.submit([3], FEW)
    with pytest.raises(EngineStoppedError):
        engine.generate([3], FEW)
    run(engine)
    assert len(answer_of(request)) == 4


@pytest.mark.parametrize("marks", [[-1], [99], ["1"], [True]])
def test_marks_are_places_in_the_prompt(marks: list) -> None:
    with pytest.raises(ConfigError):
        small().submit([1, 2, 3], FEW, marks=marks)
    assert small().is_idle


# ---- failures of one row


class Planted:
    """Raises at its n-th call for one request, else does what it replaced."""

    def __init__(self, work, at: int) -> None:
        self._work, self._left = work, at

    def __call__(self, *args, **kwargs):
        self._left -= 1
        if self._left <= 0:
            raise RuntimeError("planted")
        return self._work(*args, **kwargs)


PLACES = {
    "stop": lambda r, at: setattr(r.answer, "push", Planted(r.answer.push, at)),
    "processor": lambda r, at: setattr(r.sampler, "observe", Planted(r.sampler.observe, at)),
    "constraint": lambda r, at: setattr(r.constraints, "masks", Planted(r.constraints.masks, at)),
    "constraint's state": lambda r, at: setattr(r.constraints, "push", Planted(r.constraints.push, at)),
}


@cache
def three() -> tuple[list, list, list]:
    """Prompts, parameters, and what plain decoding says to each alone."""
    some, params = prompts(3, 5), asked(0, 3)
    return some, params, [small().generate(p, s) for p, s in zip(some, params, strict=True)]


@pytest.mark.parametrize("drafters", [(), ALL], ids=["plain", "drafted"])
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_what_fails_for_a_row_ends_that_row_only(place: str, at: int, drafters: tuple[str, ...]) -> None:
    engine, wish = small(), spec(*drafters)
    some, params, plain = three()
    rows = [engine.submit(p, s, spec=wish) for p, s in zip(some, params, strict=True)]
    bad = SamplingParams(max_tokens=30, bad_words=("qqq",), ignore_eos=True)
    doomed = engine.submit([1, 2, 3], bad, spec=wish)
    PLACES[place](doomed, at)
    ends = {e.request: e for e in run(engine) if isinstance(e, FinishEvent)}
    assert (ends[doomed.number].reason, ends[doomed.number].error) == ("error", "RuntimeError: planted.")
    for number, request in enumerate(rows):
        result = plain[number].__class__.of(request)
        same(plain[number], result, some[number], params[number], f"beside a failing {place}")
    assert engine.nbytes == 0
