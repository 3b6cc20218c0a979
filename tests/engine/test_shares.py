"""Rows are shared out by client, and a row that made room for another client's goes on with the text that it would have had."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from planting import catches

from mlxspec.config import SamplingParams
from mlxspec.engine.api import Result
from mlxspec.engine.engine import Engine
from mlxspec.engine.request import Request
from mlxspec.engine.schedule import Queue, Turns, makes_room, next_of
from mlxspec.errors import QueueFullError
from tests.engine import equality
from tests.engine.equality import ALL, prompts, same, spec

ROWS = 3
MANY = SamplingParams(max_tokens=48, ignore_eos=True)


def requests(*clients: str) -> list:
    return [SimpleNamespace(number=i, client=c, history=[0] * (9 - i)) for i, c in enumerate(clients)]


def test_the_next_row_is_that_of_the_client_with_the_fewest() -> None:
    waiting = requests("a", "a", "b", "c")
    assert next_of(waiting, {"a": 1, "b": 1, "c": 0}) is waiting[3]
    assert next_of(waiting, {"a": 1, "b": 1, "c": 2}) is waiting[0]
    assert next_of([], {}) is None


def test_a_row_makes_room_where_that_makes_shares_more_equal() -> None:
    rows = requests("a", "a", "a", "b")
    places = {"a": 3, "b": 1}
    assert makes_room(rows, "c", places) is rows[2]  # the shortest of those of the client that has most
    assert makes_room(rows, "b", places) is rows[2]
    assert makes_room(rows, "a", places) is None
    assert makes_room(requests("a", "b"), "c", {"a": 1, "b": 1}) is None


def test_a_full_queue_takes_the_request_of_a_client_that_waits_with_fewer() -> None:
    queue, (a, b, c, d, e) = Queue(3), requests("x", "x", "x", "y", "y")
    for request in (a, b, c):
        assert queue.put(request) is None
    with pytest.raises(QueueFullError):
        queue.check("x")
    assert queue.put(d) is c
    with pytest.raises(QueueFullError):
        queue.put(e)
    assert list(queue) == [a, b, d]


def test_pieces_of_prompts_go_to_the_client_that_has_had_the_fewest() -> None:
    turns, clients, served = Turns(), ["a", "a", "a", "b"], [0, 0, 0, 0]
    order = []
    for _ in range(8):
        place = turns.next(served, clients)
        turns.took()
        served[place] += 1
        order.append(place)
    assert order[1::2] == [3, 3, 3, 3]
    assert order[::2] == [0, 0, 0, 0]


def answered(engine: Engine, *asked: Request) -> None:
    for _ in range(3000):
        if all(r.finish_reason for r in asked):
            return
        engine.step()
    raise AssertionError("it does not end")


@catches(
    "rows go to whoever came first",
    "mlxspec.engine.schedule:next_of",
    lambda right: lambda waiting, places: min(waiting, key=lambda r: r.number, default=None),
)
@catches(
    "no row makes room for another client",
    "mlxspec.engine.schedule:makes_room",
    lambda right: lambda *_: None,
)
@pytest.mark.parametrize(
    ("drafters", "options"),
    [
        (ALL, {}),
        pytest.param((), {}, marks=pytest.mark.slow),
        pytest.param(("mtp",), {"policy": "auto"}, marks=pytest.mark.slow),
        pytest.param(("draft-model",), {}, marks=pytest.mark.slow),
        pytest.param(("mtp",), {}, marks=pytest.mark.slow),
        pytest.param(("ngram-simple",), {"policy": "auto"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_many_answers_of_one_client_do_not_hold_up_another(drafters: tuple[str, ...], options: dict) -> None:
    """The other one's first token comes within a few steps, though it comes when all rows are taken; and all texts are those of requests
    that were alone."""
    engine, wish = equality.engine(max_rows=ROWS), spec(*drafters, **options)
    given = prompts(2 * ROWS + 2, 5)
    sampled = [
        SamplingParams(max_tokens=48, ignore_eos=True, seed=i, temperature=0.9 * (i % 2))
        for i in range(len(given))
    ]
    wanted = [engine.generate(p, s, spec=wish) for p, s in zip(given, sampled, strict=True)]
    many = [engine.submit(p, s, spec=wish, client="many") for p, s in zip(given[:-2], sampled, strict=False)]
    for _ in range(6):
        engine.step()
    assert engine.num_running == ROWS
    few = [engine.submit(given[i], sampled[i], spec=wish, client="few") for i in (-2, -1)]
    for _ in range(6):
        engine.step()
    assert few[0].num_generated
    assert not few[1].num_generated  # one of three rows is its share
    assert engine.num_running == ROWS
    assert engine._rows.parked
    answered(engine, *many, *few)
    engine.step()
    assert engine.is_idle
    assert engine.nbytes == 0
    assert engine.memory.reserved == 0
    for i, request in enumerate((*many, *few)):
        same(wanted[i], Result.of(request), given[i], sampled[i], f"request {i}")


def test_a_parked_row_can_be_cancelled() -> None:
    engine = equality.engine(max_rows=2)
    many = [engine.submit([5, 6, 7 + i], MANY, client="many") for i in range(3)]
    for _ in range(4):
        engine.step()
    one = engine.submit([9, 10], MANY, client="one")
    for _ in range(3):
        engine.step()
    (parked,) = engine._rows.parked
    assert engine.num_waiting == 2
    assert engine.cancel(parked.number)
    answered(engine, *many, one)
    engine.step()
    assert engine.is_idle
    assert [r.finish_reason for r in many].count("cancelled") == 1
    assert engine.memory.reserved == 0
