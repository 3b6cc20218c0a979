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
MANY = SamplingParams(max_tokens=48, ignore_eos=True)
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
    "places go to whoever came first",
    "mlxspec.engine.schedule:Shares.next",
    lambda right: lambda self, waiting, places: min(waiting, key=lambda r: r.number, default=None),
)
@catches(
    "no row makes room for another client",
    "mlxspec.engine.schedule:makes_room",
    lambda right: lambda *_: None,
)
@pytest.mark.parametrize(("drafters", "options"), DRAFTING, ids=str)
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
        if not few[0].num_generated:
            engine.step()
    assert few[0].num_generated
    assert not few[1].num_generated  # it has one place at once, and a second one by turns
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
    assert engine.num_running == len(engine._prefills) == ROWS
    short = engine.submit(given[-1], params, spec=wish, client="person")
    for _ in range(2):  # one chunk of the others, and its own
        engine.step()
    assert short.num_generated
    assert engine.num_running == ROWS
    assert engine._prefills.parked
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


@catches(
    "what waits for memory holds up who has it",
    "mlxspec.engine.schedule:Shares.next",
    lambda right: (
        lambda self, waiting, places: right(self, [r for r in waiting if not r.num_generated], places)
    ),
)
def test_who_waits_for_memory_lets_those_go_on_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parked row would never leave its memory if a request that waits for it had the next place for itself."""
    engine = equality.engine(max_rows=2)
    many = [engine.submit([5, 6, 7 + i], MANY, client="many") for i in range(2)]
    for _ in range(4):
        engine.step()
    small = engine.submit([9, 10], SamplingParams(max_tokens=12, ignore_eos=True), client="one")
    for _ in range(3):
        engine.step()
    assert engine._rows.parked
    large = engine.submit([9, 11], MANY, client="one")
    has_room = engine.memory.has_room
    monkeypatch.setattr(
        engine.memory, "has_room", lambda r: has_room(r) and (r is not large or not engine.memory.reserved)
    )
    answered(engine, *many, small, large)
    ended(engine)
    assert all(len(r.history) == len(r.prompt) + r.params.max_tokens for r in (*many, small, large))


@catches(
    "rows that nobody reads go on",
    "mlxspec.engine.engine:Engine.rest",
    lambda right: lambda self, numbers: None,
)
@pytest.mark.parametrize(("drafters", "options"), DRAFTING, ids=str)
def test_rows_that_nobody_reads_rest_and_go_on_later(drafters: tuple[str, ...], options: dict) -> None:
    engine, wish = equality.engine(max_rows=ROWS), spec(*drafters, **options)
    given = prompts(ROWS + 1, 6)
    sampled = [
        SamplingParams(max_tokens=48, ignore_eos=True, seed=i, temperature=0.9 * (i % 2))
        for i in range(len(given))
    ]
    wanted = [engine.generate(p, s, spec=wish) for p, s in zip(given, sampled, strict=True)]
    asked = [engine.submit(p, s, spec=wish) for p, s in zip(given, sampled, strict=True)]
    for _ in range(5):
        engine.step()
    sleepers = asked[:ROWS]
    engine.rest(frozenset(r.number for r in sleepers))
    for _ in range(3):
        engine.step()
    had = [r.num_generated for r in sleepers]
    answered(engine, asked[-1])  # which had no place before
    assert [r.num_generated for r in sleepers] == had
    assert engine.is_resting
    assert not engine.is_idle
    engine.cancel(sleepers[0].number)
    engine.rest(frozenset())
    assert not engine.is_resting
    answered(engine, *asked)
    ended(engine)
    for i, request in enumerate(asked[1:], 1):
        same(wanted[i], Result.of(request), given[i], sampled[i], f"request {i}")


def test_a_row_that_goes_on_has_its_own_adapters() -> None:
    kept, scales = object(), (0.0, 2.0)
    cache = SimpleNamespace(scales=[()], restored=None)
    cache.restore = lambda snapshot: setattr(cache, "restored", snapshot)
    request, rows = type("Asked", (), {"scales": scales, "seen": None})(), Rows()
    rows.parked[request] = kept  # type: ignore[index, assignment]
    rows.unpark(request, cache)  # type: ignore[arg-type]
    assert (cache.restored, cache.scales[0], rows[0]) == (kept, scales, request)
