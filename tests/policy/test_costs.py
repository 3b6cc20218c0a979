"""Latency curves, what drafts cost, and the file they are kept in."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planting import catches

from mlxspec.errors import ConfigError
from mlxspec.policy.costs import ENOUGH, MAX_TOKENS, CostModel, Curve, DraftCost, bucket

pytestmark = pytest.mark.smoke

points = st.dictionaries(st.integers(2, 40), st.floats(0.5, 20.0), max_size=6)


@given(points)
def test_a_curve_passes_through_what_was_measured_at_knots(measured: dict[int, float]) -> None:
    curve = Curve({1: 1.0, **measured})
    knots = curve.knots()
    for width, seconds in {1: 1.0, **measured}.items():
        if width in knots:
            assert curve.seconds(width) == pytest.approx(seconds)
    again = Curve(knots)
    assert all(again.seconds(w) == pytest.approx(curve.seconds(w)) for w in range(1, MAX_TOKENS + 50))


def test_between_and_beyond_lie_lines() -> None:
    curve = Curve({1: 1.0, 3: 2.0, 5: 4.0})
    assert [curve.seconds(w) for w in (1, 2, 3, 4, 5, 6)] == pytest.approx([1, 1.5, 2, 3, 4, 5])
    assert curve.seconds(MAX_TOKENS + 10) == pytest.approx(MAX_TOKENS + 9)


def test_with_a_plain_step_alone_every_token_costs_one() -> None:
    assert Curve({1: 2.0}).seconds(7) == pytest.approx(14.0)


@pytest.mark.parametrize(
    "bad", [{}, {2: 1.0}, {1: 0.0}, {1: float("nan")}, {0: 1.0, 1: 1.0}, {1: -1.0}], ids=str
)
def test_what_is_no_curve_is_refused(bad: dict[int, float]) -> None:
    with pytest.raises(ConfigError):
        Curve(bad)


def test_a_wrong_width_is_put_right_by_what_rounds_take() -> None:
    curve = Curve({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.5})
    for _ in range(150):
        curve.refine(4, 1.6)
        curve.refine(1, 1.0)
    assert curve.seconds(4) / curve.seconds(1) == pytest.approx(1.6, rel=0.03)


def test_a_slower_machine_is_slower_at_widths_nobody_has_seen() -> None:
    curve = Curve({1: 1.0, 8: 2.0})
    before = curve.seconds(8)
    for _ in range(100):
        curve.refine(1, 1.5)
    assert curve.seconds(1) == pytest.approx(1.5, rel=0.05)
    assert curve.seconds(8) > 1.1 * before


def test_one_hiccup_moves_little() -> None:
    curve = Curve({1: 1.0, 2: 1.2})
    for _ in range(50):
        curve.refine(1, 1.0)
    curve.refine(1, 100.0)
    assert curve.seconds(1) < 1.02


def test_nonsense_measurements_change_nothing() -> None:
    curve = Curve({1: 1.0, 2: 1.2})
    before = curve.knots()
    for width, seconds in ((0, 1.0), (MAX_TOKENS + 1, 1.0), (1, 0.0), (1, -1.0), (1, float("nan"))):
        curve.refine(width, seconds)
    assert curve.knots() == before


def test_drafts_cost_their_steps_and_what_they_catch_up_on() -> None:
    cost = DraftCost(call=0.5, step=1.0, queued=0.25, row=0.5)
    assert cost.seconds(3, 1) == 3.5
    assert cost.seconds(3, 5) == 4.5
    assert cost.seconds(3, 2, num_rows=2) == 5.25


def test_draft_costs_follow_what_drafts_take() -> None:
    costs = CostModel({0: {1: 1.0}}, {"mtp": DraftCost(step=0.1)})
    for _ in range(100):
        costs.refine_draft("mtp", 2, 1, 1, 0.4)
    assert costs.draft("mtp").step == pytest.approx(0.2, rel=0.02)
    costs.refine_draft("ngram-simple", 4, 0, 1, 5.0)
    assert costs.draft("ngram-simple").seconds(4, 0) == 0.0


def test_the_first_drafts_replace_a_guess_and_later_ones_move_it_slowly() -> None:
    costs = CostModel({0: {1: 1.0}}, {})
    costs.guess_draft("mtp", DraftCost(call=0.05, step=0.15))
    costs.refine_draft("mtp", 1, 1, 1, 0.6)
    assert costs.draft("mtp").seconds(1, 1) == pytest.approx(0.6)
    costs.refine_draft("mtp", 1, 1, 1, 0.6 / 4)
    assert costs.draft("mtp").seconds(1, 1) == pytest.approx(0.3)  # the geometric mean
    assert costs.is_guess("mtp")
    for _ in range(2):
        costs.refine_draft("mtp", 1, 1, 1, 0.3)
    assert not costs.is_guess("mtp")
    costs.refine_draft("mtp", 1, 1, 1, 3.0)
    assert costs.draft("mtp").seconds(1, 1) == pytest.approx(0.3, rel=0.02)


def test_one_hiccup_does_not_make_a_guess_dearer_than_a_few_times() -> None:
    costs = CostModel({0: {1: 1.0}}, {})
    costs.guess_draft("mtp", DraftCost(step=0.2))
    costs.refine_draft("mtp", 1, 1, 1, 50.0)
    assert costs.draft("mtp").step < 1.0


def test_a_stalled_draft_is_forgotten_with_the_guess() -> None:
    costs = CostModel({0: {1: 1.0}}, {})
    costs.guess_draft("mtp", DraftCost(step=0.2))
    for seconds in (50.0, 0.3, 0.3, 0.3):
        costs.refine_draft("mtp", 1, 1, 1, seconds)
    assert not costs.is_guess("mtp")
    assert costs.draft("mtp").step == pytest.approx(0.3)


def test_the_first_plain_round_replaces_a_guessed_speed_of_all_widths() -> None:
    costs = CostModel({0: {1: 0.1, 2: 0.12, 4: 0.16}}, {}, measured=())
    costs.curve(0).refine(1, 0.3)
    assert [costs.curve(0).seconds(w) for w in (1, 2, 4)] == pytest.approx([0.3, 0.36, 0.48])


def test_the_first_round_of_a_guessed_width_replaces_the_guess() -> None:
    costs = CostModel({0: {1: 1.0, 2: 1.2, 4: 1.6}}, {}, measured=[1])
    costs.curve(0).refine(4, 2.4)
    assert costs.curve(0).seconds(4) == pytest.approx(2.4, rel=0.03)
    assert costs.measured == {1}
    for _ in range(3):
        costs.curve(0).refine(4, 2.4)
    assert costs.measured == {1, 4}
    again = kept(costs)
    assert again.measured == {1, 4}


def test_a_context_nobody_measured_begins_like_its_neighbour_and_goes_its_own_way() -> None:
    costs = CostModel({0: {1: 1.0, 2: 1.5}}, {})
    far = costs.curve(bucket(50_000))
    assert far.seconds(2) == pytest.approx(1.5)
    for _ in range(50):
        far.refine(2, 3.0)
    assert costs.curve(0).seconds(2) == pytest.approx(1.5)


def test_contexts_have_buckets() -> None:
    assert [bucket(n) for n in (1, 1024, 1025, 20_000, 1 << 20)] == [0, 0, 1, 3, 4]


def kept(costs: CostModel) -> CostModel:
    """As a file gives them back."""
    return CostModel.from_data(json.loads(json.dumps(costs.as_data())))


def test_costs_survive_their_file() -> None:
    costs = CostModel(
        {0: {1: 0.01, 4: 0.02}, 2: {1: 0.03}}, {"mtp": DraftCost(call=0.001, step=0.002, queued=0.0001)}
    )
    costs.curve(0).refine(4, 0.03)
    found = kept(costs)
    assert found.curve(0).seconds(4) == pytest.approx(costs.curve(0).seconds(4))
    assert found.curve(2).seconds(5) == pytest.approx(costs.curve(2).seconds(5))
    assert found.draft("mtp") == costs.draft("mtp")


@catches("all kinds share a curve", "mlxspec.policy.costs:DEARER", lambda _: ())
def test_kinds_of_sampling_have_costs_of_their_own() -> None:
    """They begin as greedy rounds and what choosing was measured to take longer, and learn from their own rounds and drafts alone."""
    known = CostModel({0: {1: 1.0, 4: 1.6}}, {"mtp": DraftCost(step=0.1)}, choosing={"sampled": 0.1})
    assert known.curve(0, 1, "sampled").seconds(4) == pytest.approx(1.6 + 4 * 0.1)
    assert known.curve(0, 1, "sampled").measured == [1, 4]
    assert known.curve(0, 1, "constrained").seconds(4) == pytest.approx(1.6)  # nobody has said
    assert known.curve(0, 1, "constrained").measured == []
    assert known.draft("mtp", "sampled") == known.draft("mtp")
    for _ in range(2 * int(ENOUGH)):
        known.curve(0, 1, "sampled").refine(4, 3.0)
        known.curve(0, 1, "sampled").refine(1, 1.5)
        known.refine_draft("mtp", 1, 1, 1, 0.3, "sampled")
    for found in (known, kept(known)):
        assert found.curve(0).seconds(4) == pytest.approx(1.6)
        assert found.curve(0, 1, "sampled").seconds(4) == pytest.approx(3.0, rel=0.1)
        assert found.draft("mtp").step == pytest.approx(0.1)
        assert found.draft("mtp", "sampled").step == pytest.approx(0.3, rel=0.1)
        assert found.choosing == {"sampled": 0.1}


def test_rounds_of_several_rows_have_a_curve_of_their_own() -> None:
    costs = CostModel({0: {1: 1.0, 2: 2.0, 3: 2.5, 4: 3.0, 8: 5.0}}, {}, pause=0.3)
    rows = costs.curve(0, 3)
    assert rows.seconds(3) == pytest.approx(1.0 + costs.curve(0).seconds(4) - 2.0)  # no step to wide rounds
    assert rows.seconds(5) == pytest.approx(1.3 * rows.seconds(3) + costs.curve(0).seconds(3) - 1.0)
    before = costs.curve(0).seconds(3)
    rows.refine(3, 4.0)
    assert costs.curve(0).seconds(3) == before
    assert costs.curve(0, 3) is rows
    linear = CostModel({0: {1: 1.0}}, {}, pause=0.3).curve(0, 4)
    assert [linear.seconds(w) for w in (4, 6, 12)] == pytest.approx([4.0, 7.2, 13.2])


@given(points, st.integers(2, 64), st.floats(0.0, 2.0))
def test_any_curve_of_one_row_gives_one_of_several(
    measured: dict[int, float], num_rows: int, pause: float
) -> None:
    """Rounds that something else delayed leave curves that fall; a request must not end by them."""
    rows = CostModel({0: {1: 1.0, **measured}}, {}, pause=pause).curve(0, num_rows)
    assert all(rows.seconds(width) > 0 for width in range(1, MAX_TOKENS + 1))


def test_where_reading_weights_is_what_takes_time_it_does_not_matter_whose_a_token_is() -> None:
    costs = CostModel({0: {1: 1.0, 2: 1.1, 4: 1.5, 8: 2.7}}, {})
    one, rows = costs.curve(0), costs.curve(0, 4)
    assert [rows.seconds(w) for w in (4, 7, 20)] == pytest.approx([one.seconds(w) for w in (4, 7, 20)])
    rows.refine(4, 2.0)
    assert one.seconds(4) == pytest.approx(1.5)


def test_what_was_guessed_yields_to_a_few_measurements() -> None:
    rows = CostModel({0: {1: 1.0, 2: 1.2, 12: 3.0}}, {}).curve(0, 4)
    for _ in range(8):
        rows.refine(12, 6.0)
    assert rows.seconds(12) == pytest.approx(6.0, rel=0.15)


def test_what_rounds_of_several_rows_taught_is_kept() -> None:
    costs = CostModel({0: {1: 1.0, 2: 1.2, 12: 3.0}}, {}, pause=0.3)
    guess = costs.curve(0, 4).seconds(12)
    costs.curve(0, 2).refine(3, 9.0)  # one round teaches too little
    for _ in range(60):
        costs.curve(0, 4).refine(12, 2 * guess)
    again = kept(costs)
    again.pause = 0.3
    assert again.curve(0, 4).seconds(12) == pytest.approx(costs.curve(0, 4).seconds(12))
    assert again.curve(0, 2).seconds(3) < 3.0
    for width, moved in ((12, 1.2), (4, 1.3)):  # what was met yields slowly, what was not at once
        before = again.curve(0, 4).seconds(width)
        again.curve(0, 4).refine(width, 4 * before)
        assert (again.curve(0, 4).seconds(width) > moved * before) == (width == 4)


def test_what_was_measured_is_told_from_what_was_guessed() -> None:
    likely = {1: 1.0, 2: 1.2, 4: 1.6}
    for measured, first in (([1], 2.4), ([1, 2, 4], 1.35)):
        costs = CostModel({0: likely}, {}, measured=measured)
        again = kept(costs)
        assert again.measured == costs.measured == set(measured)
        for _ in range(4):
            again.curve(0).refine(2, 2.6)
        assert (again.curve(0).seconds(2) > 2.0) == (first > 2.0)
