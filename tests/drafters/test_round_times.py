"""What rounds took reaches the controller whole, whenever it is told, and nothing of rounds that compiled."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.policy.auto_row import AutoRow
from mlxspec.policy.controller import Controller
from mlxspec.policy.cost import CostModel
from mlxspec.policy.round_times import RoundTimes

PLAIN, WIDE = 1.0, 3.0


def made(num_rows: int) -> tuple[RoundTimes, Controller, list[AutoRow]]:
    control = Controller(CostModel({0: {1: PLAIN, 4: WIDE}}, {}))
    return RoundTimes(control), control, [AutoRow(control=control.open("", 0)) for _ in range(num_rows)]


def took(
    times: RoundTimes,
    rows: list[AutoRow],
    num_tokens: int,
    seconds: float,
    *,
    ahead: bool = False,
    is_warm: bool = True,
    emitted: int = 1,
) -> None:
    for row in rows:
        row.emitted = emitted
        row.calm = row.calm + 1 if num_tokens == len(rows) else 0
    times.took(rows, len(rows), num_tokens, seconds, drafting=0.0, ahead=ahead, is_warm=is_warm)


@settings(deadline=None)
@given(
    num_rows=st.integers(1, 5),
    rounds=st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0.1, 9.0)), min_size=1, max_size=60),
)
def test_every_token_and_second_is_told_once(num_rows: int, rounds: list[tuple[bool, bool, float]]) -> None:
    times, control, rows = made(num_rows)
    told: list[tuple[list[int], float, int]] = []
    control.spent = lambda parts, num_rows, seconds, num_rounds: told.append(  # type: ignore
        ([num for _, num, _ in parts], seconds, num_rounds)
    )
    for drafts, ahead, seconds in rounds:
        took(times, rows, num_rows + 3 * drafts, seconds, ahead=ahead and not drafts)
    times.settle()
    assert sum(sum(t) for t, _, _ in told) == len(rounds) * num_rows
    assert sum(n for _, _, n in told) == len(rounds)
    assert sum(s for _, s, _ in told) == pytest.approx(sum(s for _, _, s in rounds))
    assert all(row.emitted == row.rested == 0 and row.plain[0] == len(rounds) for row in rows)
    told.clear()
    times.settle()
    assert told == []


def test_plain_rounds_that_run_ahead_are_told_together() -> None:
    times, control, rows = made(2)
    told = []
    spent = control.spent
    control.spent = lambda *a, **k: (told.append(a[3]), spent(*a, **k))[1]  # type: ignore
    for _ in range(20):
        took(times, rows, 2, 1.5, ahead=True)
    assert told == [16]  # the last four wait
    assert rows[0].control.rate == pytest.approx(1 / 0.75)


def test_a_row_that_joins_or_leaves_is_told_of_its_own_rounds_only() -> None:
    times, _, rows = made(3)
    for _ in range(3):
        took(times, rows[:2], 2, 1.0, ahead=True)
    for _ in range(2):
        took(times, rows, 3, 1.0, ahead=True)
    times.settle()
    assert [r.plain[0] for r in rows] == [5, 5, 2]


@pytest.mark.parametrize("ahead", [True, False])
def test_a_round_that_compiled_moves_no_cost_and_counts_as_what_it_will_be(ahead: bool) -> None:
    times, control, rows = made(1)
    curve = control.costs.curve(0)
    for num_tokens in (1, 4, 1, 4, 4, 1, 1, 1):
        took(times, rows, num_tokens, 50.0, ahead=ahead and num_tokens == 1, is_warm=False)
    times.settle()
    assert curve.seconds(1) == pytest.approx(PLAIN)
    assert curve.seconds(4) == pytest.approx(WIDE)
    assert rows[0].control.seconds == pytest.approx(5 * PLAIN + 3 * WIDE)


def test_what_a_plain_round_takes_longer_behind_drafts_is_their_cost() -> None:
    alone, behind = made(1), made(1)
    for times, _, rows in (alone, behind):
        took(times, rows, 4, WIDE)
        took(times, rows, 1, PLAIN if times is alone[0] else 1.8 * PLAIN)
    assert behind[1].costs.curve(0).seconds(4) > alone[1].costs.curve(0).seconds(4)
    assert behind[1].costs.curve(0).seconds(1) < behind[1].costs.curve(0).seconds(4) / 2.9
    paid = alone[2][0].control.account.balance - behind[2][0].control.account.balance
    assert paid == pytest.approx(0.8, abs=0.01)


def test_costs_follow_as_fast_however_many_rounds_are_told_at_once() -> None:
    """Within a third: eight rounds told together are one measurement that counts eight times."""
    together, single = made(1), made(1)
    for _ in range(64):
        took(together[0], together[2], 1, 1.1 * PLAIN, ahead=True)
        single[1].costs.curve(0).refine(1, 1.1 * PLAIN)
    together[0].settle()
    moved = [c.costs.curve(0).seconds(1) - PLAIN for _, c, _ in (together, single)]
    assert moved[0] == pytest.approx(moved[1], rel=1 / 3)
