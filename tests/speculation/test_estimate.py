"""Calibration of what drafters say of themselves: it converges, it inherits, it follows the row."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.policy.constants import Constants
from mlxspec.policy.estimate import Calibration, RowEstimate


def test_before_anything_is_known_a_confidence_is_taken_at_its_word() -> None:
    row = RowEstimate(Calibration(Constants()))
    assert row.chances(3, [0.75, 0.75, 0.75]) == pytest.approx([0.75] * 3)
    assert row.chances(1, [0.05])[0] < 0.1


def test_lookups_begin_a_little_hopeful_and_more_so_the_longer_they_were_right() -> None:
    chances = RowEstimate(Calibration(Constants())).chances(12, None)
    assert chances[0] == pytest.approx(0.75)
    assert chances == sorted(chances)


def test_an_overconfident_drafter_is_found_out_also_by_rows_to_come() -> None:
    shared = Calibration(Constants())
    rng = random.Random(0)
    row = RowEstimate(shared)
    for _ in range(400):
        row.learn(1, [0.9], int(rng.random() < 0.4), 1)
    assert row.chances(1, [0.9])[0] == pytest.approx(0.4, abs=0.2)
    assert RowEstimate(shared).chances(1, [0.9])[0] == pytest.approx(0.4, abs=0.08)
    assert RowEstimate(shared).chances(1, [0.5])[0] == pytest.approx(0.55)


def test_an_untried_depth_inherits_its_shallower_neighbour() -> None:
    shared = Calibration(Constants())
    for _ in range(200):
        RowEstimate(shared).learn(1, [0.5], 1, 1)
    first, second, third, fourth = RowEstimate(shared).chances(4, [0.5] * 4)
    assert first > 0.9
    assert first == second == third == fourth


def test_longer_streaks_inherit_too_and_then_go_their_own_way() -> None:
    shared = Calibration(Constants())
    for _ in range(50):
        row = RowEstimate(shared)
        row.learn(16, None, 0, 1)  # a first lookup that fails
    assert RowEstimate(shared).chances(2, None)[0] < 0.1
    for _ in range(50):
        row = RowEstimate(shared)
        row.streak = 8
        row.learn(1, None, 1, 1)
    row = RowEstimate(shared)
    row.streak = 8
    assert row.chances(1, None)[0] > 0.8


def test_streaks_grow_by_what_matched_and_end_with_a_miss() -> None:
    row = RowEstimate(Calibration(Constants()))
    row.learn(16, None, 4, 4)
    assert row.streak == 4
    row.learn(3, None, 3, 5)  # the draft was shorter than what came: nothing contradicts it
    assert row.streak == 7
    row.learn(16, None, 2, 5)
    assert row.streak == 0


def test_a_place_that_would_have_been_right_is_read_by_that() -> None:
    shared = Calibration(Constants())
    for _ in range(50):
        RowEstimate(shared).learn(16, None, 0, 1, 0)
        RowEstimate(shared).learn(16, None, 1, 1, 20)
    row = RowEstimate(shared)
    assert row.chances(1, None, 0)[0] < 0.1 < 0.9 < row.chances(1, None, 20)[0]
    row.streak = 30
    assert row.chances(1, None, 0)[0] < 0.1, "a long streak from other places does not speak for this one"


def test_what_lies_behind_a_miss_or_has_not_come_teaches_nothing() -> None:
    seen, other = Calibration(Constants()), Calibration(Constants())
    RowEstimate(seen).learn(8, [0.5] * 8, 1, 3)
    RowEstimate(other).learn(2, [0.5] * 2, 1, 2)
    assert seen.by_confidence == other.by_confidence
    RowEstimate(seen).learn(8, [0.5] * 8, 0, 0)
    assert seen.by_confidence == other.by_confidence


def test_a_row_follows_its_own_text_within_a_dozen_tokens() -> None:
    shared = Calibration(Constants())
    for i in range(400):
        RowEstimate(shared).learn(1, [0.6], i % 2, 1)
    row = RowEstimate(shared)
    before = row.chances(1, [0.6])[0]
    for _ in range(12):
        row.learn(1, [0.6], 0, 1)
    assert row.chances(1, [0.6])[0] < 0.6 * before
    assert RowEstimate(shared).chances(1, [0.6])[0] == pytest.approx(before, abs=0.1)


@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(0, 1), max_size=10), st.booleans(), st.integers(0, 12), st.integers(0, 12)
        ),
        max_size=40,
    )
)
def test_chances_stay_chances(rounds: list[tuple[list[float], bool, int, int]]) -> None:
    row = RowEstimate(Calibration(Constants()))
    for sure, knows, matched, known in rounds:
        confidences = sure if knows else None
        reaches = row.reaches(len(sure), confidences)
        assert all(0 < p < 1 for p in row.chances(len(sure), confidences))
        assert all(a >= b for a, b in zip(reaches, reaches[1:], strict=False))
        row.learn(len(sure), confidences, min(matched, known, len(sure)), known)
