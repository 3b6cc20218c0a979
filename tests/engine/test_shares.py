"""Places are shared out by client, and a row that made room for another client's, or rested because nobody read it, goes on with the text
that it would have had. Counted in steps."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from planting import catches

from mlxspec.config import SamplingParams
from mlxspec.engine.api import Result
from mlxspec.engine.engine import Engine
from mlxspec.engine.places import Rows
from mlxspec.engine.request import Request
from mlxspec.engine.schedule import TURN, Queue, Shares, Turns, makes_room
from mlxspec.errors import QueueFullError
from tests.engine import equality
from tests.engine.equality import ALL, prompts, same, spec

ROWS = 3
CHUNK = 32
LONG = [[(7 * i + j) % 90 + 1 for i in range(12 * CHUNK)] for j in range(ROWS + 2)]
DRAFTING = [
    (ALL, {}),
    pytest.param((), {}, marks=pytest.mark.slow),
    pytest.param(("mtp",), {"policy": "auto"}, marks=pytest.mark.slow),
    pytest.param(("draft-model",), {}, marks=pytest.mark.slow),
    pytest.param(("mtp",), {}, marks=pytest.mark.slow),
    pytest.param(("ngram-simple",), {"policy": "auto"}, marks=pytest.mark.slow),
]


def requests(*clients: str, generated: int = 1) -> list:
    return [
        SimpleNamespace(number=i, client=c, num_generated=generated, since=i) for i, c in enumerate(clients)
    ]


def test_the_next_place_is_that_of_the_client_with_the_fewest() -> None:
    waiting, shares = requests("a", "a", "b", "c"), Shares()
    assert shares.next(waiting, {"a": 1, "b": 1, "c": 0}) is waiting[3]
    assert shares.next(waiting, {"a": 1, "b": 1, "c": 2}) is waiting[0]
    assert shares.next([], {}) is None


def test_clients_with_as_many_places_take_turns() -> None:
    """However many requests one of them has, and although its oldest is older than all others."""
    waiting, shares, order = requests("a", "a", "a", "b", "c", "c", "b"), Shares(), []
    while waiting:
        chosen = shares.next(waiting, {})
        shares.took(chosen.client)
        waiting.remove(chosen)
        order.append(chosen.number)
    assert order == [0, 3, 4, 1, 6, 5, 2]
    shares.next(requests("d"), {})
    assert list(shares._turns) == ["d"]


def test_a_request_makes_room_where_that_makes_shares_more_equal() -> None:
    rows = requests("a", "a", "a", "b")
    assert makes_room(rows, "c", 0, 1) is rows[2]  # the newest of the client that has most
    assert makes_room(rows, "b", 0, 1) is rows[2]
    assert makes_room(rows, "a", 99, 1) is None
    rows[0].num_generated = 0
    assert makes_room(rows, "c", 0, 1) is rows[0]  # a prompt before a row


def test_where_shares_are_equal_the_longest_turn_makes_room() -> None:
    rows = requests("a", "b")
    first = rows[1].since + TURN // 2  # two clients wait: a place changes hands twice in a turn
    assert makes_room(rows, "c", first - 1, 2) is None
    assert makes_room(rows, "c", first, 2) is rows[0]
    rows[0].since = first
    assert makes_room(rows, "a", first + TURN // 2 - 1, 2) is None
    assert makes_room(rows, "c", first + TURN // 2, 2) is rows[1]
    assert makes_room(rows, "c", first + TURN - 1, 1) is None
    assert makes_room(rows, "c", first + TURN, 1) is rows[1]
    read = requests("a", "b", generated=0)
    assert makes_room(read, "c", 0, 1) is None  # it has just come
    assert makes_room(read, "c", 1, 1) is read[0]
    assert makes_room(requests("a", "a", "b", generated=0), "b", 5, 1) is None


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


def gaps(engine: Engine, *asked: Request) -> dict[int, int]:
    """The longest time between two tokens of each, from now on, in steps."""
    last, longest = {r.number: 0 for r in asked}, Counter[int]()
    for step in range(1, 3000):
        before = [r.num_generated for r in asked]
        engine.step()
        for request, had in zip(asked, before, strict=True):
            if request.num_generated > had or (request.finish_reason and last[request.number]):
                longest[request.number] = max(longest[request.number], step - last[request.number])
                last[request.number] = step if request.finish_reason is None else 0
        if all(r.finish_reason for r in asked):
            break
    return longest


def ended(engine: Engine) -> None:
    engine.step()
    assert engine.is_idle
    assert engine.nbytes == 0
    assert engine.memory.reserved == 0


@catches(
    "a prompt that is read does not make room",
    "mlxspec.engine.schedule:makes_room",
    lambda right: lambda running, *more: right([r for r in running if r.num_generated], *more),
)
@pytest.mark.parametrize(("drafters", "options"), DRAFTING, ids=str)
def test_long_prompts_of_one_client_do_not_hold_up_another(drafters: tuple[str, ...], options: dict) -> None:
    engine = equality.engine(max_rows=ROWS, prefill_chunk=CHUNK, prefix_budget=0)
    wish, params = (
        spec(*drafters, **options),
        SamplingParams(max_tokens=12, ignore_eos=True, seed=3, temperature=0.7),
    )
    given = [*LONG, [5, 6, 7, 8]]
    wanted = [engine.generate(p, params, spec=wish) for p in given]
    many = [engine.submit(p, params, spec=wish, client="agent") for p in LONG]
    for _ in range(3):
        engine.step()
    assert engine.num_running == len(engine.places.prefills) == ROWS
    short = engine.submit(given[-1], params, spec=wish, client="person")
    for _ in range(2):  # one chunk of the others, and its own
        engine.step()
    assert short.num_generated
    assert engine.num_running == ROWS
    assert engine.places.prefills.parked
    answered(engine, *many, short)
    ended(engine)
    for i, request in enumerate((*many, short)):
        same(wanted[i], Result.of(request), given[i], params, f"request {i}")


@catches(
    "the more clients wait, the longer each of them does",
    "mlxspec.engine.schedule:makes_room",
    lambda right: lambda running, client, step, num: right(running, client, step, 1),
    case=str(3 * ROWS),
)
@pytest.mark.parametrize("num_clients", [ROWS + 1, 3 * ROWS])
def test_more_clients_than_places_take_turns(num_clients: int) -> None:
    """As connections on this machine, each of which is a client."""
    engine, params = equality.engine(max_rows=ROWS), SamplingParams(max_tokens=6 * TURN, ignore_eos=True)
    given = prompts(num_clients, 9)
    wanted = [engine.generate(p, params, spec=equality.PLAIN) for p in given]
    asked = [engine.submit(p, params, spec=equality.PLAIN, client=str(i)) for i, p in enumerate(given)]
    longest = gaps(engine, *asked)
    num_waiting = num_clients - ROWS
    turn = -(-TURN // num_waiting) + 1  # until the next place changes hands, with a round that is on its way
    assert max(longest.values()) <= num_waiting * turn + 4, longest
    ended(engine)
    for i, request in enumerate(asked):
        same(wanted[i], Result.of(request), given[i], params, f"client {i}")


def test_a_row_that_goes_on_has_its_own_adapters() -> None:
    kept, scales = object(), (0.0, 2.0)
    cache = SimpleNamespace(scales=[()], restored=None)
    cache.restore = lambda snapshot: setattr(cache, "restored", snapshot)
    request, rows = type("Asked", (), {"scales": scales, "seen": None})(), Rows()
    rows.parked[request] = kept  # type: ignore[index, assignment]
    rows.unpark(request, cache)  # type: ignore[arg-type]
    assert (cache.restored, cache.scales[0], rows[0]) == (kept, scales, request)
