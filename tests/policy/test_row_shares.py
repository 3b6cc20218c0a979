"""How several rows share the drafted tokens of a round, against every way to share them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planting import catches

from mlxspec.kernels.flat import LADDER
from mlxspec.policy import shares

RIGHT = shares.share_out
CHANCES = st.lists(st.floats(0.05, 1.0), max_size=4).map(lambda chances: sorted(chances, reverse=True))
STEPS = st.lists(st.floats(0.0, 1.5), min_size=12, max_size=12)


def _alike(
    reaches: list[list[float]], rates: list[float], longer: Callable[[int, float], float]
) -> list[int]:
    least = min(map(len, reaches))
    return [least if least * len(reaches) in LADDER else 0] * len(reaches)


def _first(
    reaches: list[list[float]], rates: list[float], longer: Callable[[int, float], float]
) -> list[int]:
    return RIGHT(reaches[:1], rates[:1], longer) + [0] * (len(reaches) - 1)


def _gain(
    taken: tuple[int, ...], reaches: list[list[float]], rates: list[float], seconds: list[float]
) -> float:
    drafting = [rate for rate, reach in zip(rates, reaches, strict=True) if reach]
    accepted = sum(sum(reach[:num]) for reach, num in zip(reaches, taken, strict=True))
    longer = seconds[sum(taken) - 1] if sum(taken) else 0.0
    return accepted - sum(drafting) / max(1, len(drafting)) * longer


@catches("all rows get as much", "mlxspec.policy.shares:share_out", lambda right: _alike)
@catches("the first row takes all", "mlxspec.policy.shares:share_out", lambda right: _first)
@given(reaches=st.lists(CHANCES, min_size=1, max_size=3), steps=STEPS, rate=st.floats(0.1, 3.0))
def test_no_other_shares_gain_more(reaches: list[list[float]], steps: list[float], rate: float) -> None:
    seconds = [sum(steps[: i + 1]) for i in range(len(steps))]
    rates = [rate + 0.1 * i for i in range(len(reaches))]
    found = shares.share_out(reaches, rates, lambda num, _: seconds[num - 1])
    every = product(*(range(len(reach) + 1) for reach in reaches))
    best = max(_gain(s, reaches, rates, seconds) for s in every if sum(s) in {0, *LADDER})
    assert sum(found) in {0, *LADDER}
    assert _gain(tuple(found), reaches, rates, seconds) == pytest.approx(best)


def test_a_step_of_the_curve_is_shared() -> None:
    """The first token costs two tokens' time, the next three nothing: no row alone would pay for it."""
    reaches = [[0.9], [0.8], [0.7], [0.6]]
    assert shares.share_out(reaches, [1.0] * 4, lambda num, _: 2.0) == [1, 1, 1, 1]
    assert shares.share_out(reaches[:2], [1.0] * 2, lambda num, _: 2.0) == [0, 0]


def test_what_may_not_be_run_is_not_shared() -> None:
    reaches = [[0.9, 0.9], [0.95]]
    assert shares.share_out(reaches, [1.0, 1.0], lambda num, _: inf if num > 1 else 0.1) == [0, 1]
    assert shares.share_out([[], []], [1.0, 1.0], lambda num, _: 0.0) == [0, 0]
