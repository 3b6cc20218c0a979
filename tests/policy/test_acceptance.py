"""Acceptance rates by what drafters say of themselves: they converge, follow the row, and survive their file."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.errors import ConfigError
from mlxspec.policy.acceptance import Acceptance, Cells, Offer
from mlxspec.policy.controller import Controller, PolicyRow
from mlxspec.policy.costs import CostModel
from tests.known_costs import known_costs

pytestmark = pytest.mark.smoke


def controller() -> Controller:
    return Controller(known_costs({1: 1.0}))


def sure(*confidences: float) -> Offer:
    return Offer("mtp", len(confidences), list(confidences))


def lookup(length: int, backing: int | None = None) -> Offer:
    return Offer("ngram-simple", length, None, backing)


def first(control: Controller, row: PolicyRow, offer: Offer) -> float:
    """The chance that a draft's first token is accepted."""
    return control.reaches(row, offer)[0]


def test_before_anything_is_known_a_confidence_is_taken_at_its_word() -> None:
    control = controller()
    row = PolicyRow("", 0, 1.0)
    assert control.reaches(row, sure(0.75, 0.75, 0.75)) == pytest.approx([0.75, 0.75**2, 0.75**3])
    assert first(control, row, sure(0.05)) < 0.1


def test_lookups_are_tried_and_more_so_the_longer_they_were_right() -> None:
    control = controller()
    reaches = control.reaches(PolicyRow("", 0, 1.0), lookup(12))
    chances = [b / a for a, b in zip([1.0, *reaches], reaches, strict=False)]
    assert chances[0] == pytest.approx(0.75)
    assert all(b > a - 1e-9 for a, b in zip(chances, chances[1:], strict=False))


def test_an_overconfident_drafter_is_found_out_also_by_rows_to_come() -> None:
    control, rng = controller(), random.Random(0)
    row = PolicyRow("", 0, 1.0)
    for _ in range(400):
        control.learn(row, sure(0.9), int(rng.random() < 0.4), 1)
    assert first(control, row, sure(0.9)) == pytest.approx(0.4, abs=0.2)
    assert first(control, PolicyRow("", 0, 1.0), sure(0.9)) == pytest.approx(0.4, abs=0.08)
    assert first(control, PolicyRow("", 0, 1.0), sure(0.5)) == pytest.approx(0.55)


def test_longer_streaks_go_their_own_way() -> None:
    control = controller()
    for _ in range(50):
        control.learn(PolicyRow("", 0, 1.0), lookup(16), 0, 1)  # a first lookup that fails
        row = PolicyRow("", 0, 1.0)
        row.streak["ngram-simple"] = 8
        control.learn(row, lookup(1), 1, 1)
    row = PolicyRow("", 0, 1.0)
    assert first(control, row, lookup(2)) < 0.1
    row.streak["ngram-simple"] = 8
    assert first(control, row, lookup(2)) > 0.8


def test_streaks_grow_by_what_matched_and_end_with_a_miss() -> None:
    control = controller()
    row = PolicyRow("", 0, 1.0)
    for length, matched, known, streak in ((16, 4, 4, 4), (3, 3, 5, 7), (16, 2, 5, 0)):
        control.learn(row, lookup(length), matched, known)
        assert row.streak["ngram-simple"] == streak


def test_a_place_that_would_have_been_right_is_read_by_that() -> None:
    control = controller()
    for _ in range(50):
        control.learn(PolicyRow("", 0, 1.0), lookup(16, 0), 0, 1)
        control.learn(PolicyRow("", 0, 1.0), lookup(16, 20), 1, 1)
    row = PolicyRow("", 0, 1.0)
    assert first(control, row, lookup(1, 0)) < 0.1 < 0.9 < first(control, row, lookup(1, 20))
    row.streak["ngram-simple"] = 30
    assert first(control, row, lookup(1, 0)) < 0.1, "a streak of other places does not speak for this one"


def test_what_lies_behind_a_miss_or_has_not_come_teaches_nothing() -> None:
    seen, other = controller(), controller()
    for control, length, known in ((seen, 8, 3), (other, 2, 2)):
        control.learn(PolicyRow("", 0, 1.0), sure(*[0.5] * length), 1, known)
    seen.learn(PolicyRow("", 0, 1.0), sure(*[0.5] * 8), 0, 0)
    found = [c.costs.accepted("", "mtp").as_data() for c in (seen, other)]
    assert found[0] == found[1]


def test_what_was_learned_survives_its_file() -> None:
    control = controller()
    for _ in range(30):
        control.learn(PolicyRow("greedy", 0, 1.0), Offer("mtp", 1, [0.9]), 0, 1)
    control.costs.accepted("greedy", "mtp").gap = 64.0
    again = CostModel()
    again.learn_from(json.loads(json.dumps(control.costs.as_data())))
    assert list(again.acceptance) == [("greedy", "mtp")]
    assert again.accepted("greedy", "mtp").as_data() == control.costs.accepted("greedy", "mtp").as_data()


@pytest.mark.parametrize(
    "change",
    [
        {"sure": [[1.5] * 12, [4.0] * 12]},
        {"sure": [[0.5] * 12, [0.0] * 12]},
        {"streaks": [[0.1] * 11, [4.0] * 10]},
        {"streaks": ["a"] * 2},
        {"depths": [[-0.5] * 11, [4.0] * 11]},
        {"depths": [[float("nan")] * 11, [4.0] * 11]},
        {"gap": 10**400},
        {"gap": None},
    ],
    ids=str,
)
def test_what_cannot_have_been_learned_is_refused(change: dict[str, object]) -> None:
    data = {**Acceptance().as_data(), **change}
    with pytest.raises((ConfigError, ArithmeticError, LookupError, TypeError, ValueError)):
        Acceptance.from_data(data)


@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(0, 1), max_size=10), st.booleans(), st.integers(0, 12), st.integers(0, 12)
        ),
        max_size=40,
    )
)
def test_chances_stay_chances(rounds: list[tuple[list[float], bool, int, int]]) -> None:
    control = controller()
    row = PolicyRow("", 0, 1.0)
    for confidences, knows, matched, known in rounds:
        offer = Offer("mtp", len(confidences), confidences if knows else None)
        reaches = control.reaches(row, offer)
        assert all(0 < p < 1 for p in reaches)
        assert all(a >= b for a, b in zip(reaches, reaches[1:], strict=False))
        control.learn(row, offer, min(matched, known, len(confidences)), known)


def test_a_rate_is_a_mean_of_no_more_than_it_remembers() -> None:
    """So a drafter that was right for long is found out in the time that the memory has."""
    cells = Cells([0.5])
    for _ in range(5000):
        cells.count(0, is_right=True)
    for _ in range(333):
        cells.count(0, is_right=False)
    assert cells.rates[0] < 0.4
