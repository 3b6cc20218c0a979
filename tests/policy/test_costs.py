"""Latency curves and costs of drafts: guesses, what rounds make of them, and the file that they are kept in."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planting import catches

from mlxspec.errors import ConfigError
from mlxspec.kernels.flat import LADDER
from mlxspec.policy.acceptance import TRUST
from mlxspec.policy.costs import (
    MAX_TOKENS,
    SOON,
    CostModel,
    Curve,
    DraftCall,
    DraftCost,
    bucket,
    likely,
)
from tests.known_costs import known_costs

pytestmark = pytest.mark.smoke

points = st.dictionaries(st.integers(2, 40), st.floats(0.5, 20.0), max_size=6)


@given(points)
def test_a_curve_passes_through_what_was_measured_and_never_falls(measured: dict[int, float]) -> None:
    curve = Curve({1: 1.0, **measured})
    seconds = [curve.seconds(w) for w in range(1, MAX_TOKENS + 50)]
    assert all(b >= a - 1e-9 for a, b in zip(seconds, seconds[1:], strict=False))
    least, known = float("inf"), sorted({1: 1.0, **measured}.items(), reverse=True)
    for width, taken in known:
        least = min(least, taken)
        assert curve.seconds(width) == pytest.approx(max(1.0, least))


def test_between_and_beyond_lie_lines() -> None:
    curve = Curve({1: 1.0, 3: 2.0, 5: 4.0})
    assert [curve.seconds(w) for w in (1, 2, 3, 4, 5, 6)] == pytest.approx([1, 1.5, 2, 3, 4, 5])
    assert curve.seconds(MAX_TOKENS + 10) == pytest.approx(MAX_TOKENS + 9)


def test_with_a_plain_step_alone_every_token_costs_one() -> None:
    assert Curve({1: 2.0}).seconds(7) == pytest.approx(14.0)


@pytest.mark.parametrize("bad", [{}, {1: 0.0}, {1: float("nan")}, {0: 1.0, 1: 1.0}, {1: -1.0}], ids=str)
def test_what_is_no_curve_is_refused(bad: dict[int, float]) -> None:
    with pytest.raises(ConfigError):
        Curve(bad)


def test_a_wrong_width_is_put_right_by_what_rounds_take() -> None:
    curve = Curve({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.7})
    for _ in range(150):
        curve.refine(4, 1.6)
        curve.refine(1, 1.0)
    assert curve.seconds(4) / curve.seconds(1) == pytest.approx(1.6, rel=0.03)


def test_a_slower_machine_is_slower_at_all_widths() -> None:
    curve = Curve({1: 1.0, 8: 2.0})
    for _ in range(100):
        curve.refine(1, 1.5)
    assert curve.seconds(1) == pytest.approx(1.5, rel=0.05)
    assert curve.seconds(8) == pytest.approx(3.0, rel=0.05)


def test_one_hiccup_moves_little() -> None:
    curve = Curve({1: 1.0, 2: 1.2})
    for _ in range(50):
        curve.refine(1, 1.0)
    curve.refine(1, 100.0)
    assert curve.seconds(1) < 1.02


def test_rounds_of_other_widths_leave_the_unit_alone() -> None:
    """Accounts count in plain rounds, so only plain rounds tell how long one is; one counts the more, the longer none was timed."""
    moved = []
    for num in (0, 50):
        curve = Curve({1: 1.0, 4: 1.5})
        for _ in range(100):
            curve.refine(1, 1.0)
        for _ in range(num):
            curve.refine(4, 1.9)
        assert curve.plain == pytest.approx(1.0)
        assert curve.age == num
        curve.refine(1, 1.1)
        assert curve.age == 0
        moved.append(curve.plain - 1.0)
    assert moved[1] > 3 * moved[0] > 0


def test_nonsense_measurements_change_nothing() -> None:
    curve = Curve({1: 1.0, 2: 1.2})
    before = curve.known
    for width, seconds in ((0, 1.0), (MAX_TOKENS + 1, 1.0), (1, 0.0), (1, -1.0), (1, float("nan"))):
        curve.refine(width, seconds)
    assert curve.known == before


# ---- guesses


def test_the_first_plain_round_tells_the_machines_speed() -> None:
    curve = CostModel().curve(0)
    curve.refine(1, 0.3)
    assert [curve.seconds(w) for w in (1, 2, 4)] == pytest.approx([0.3 * likely(w) for w in (1, 2, 4)])


@catches(
    "a guess keeps its shape whatever rounds take",
    "mlxspec.policy.costs:_STEEP",
    lambda right: 1.0,
)
def test_a_guess_that_is_off_by_one_width_is_off_at_wider_ones() -> None:
    """Else a machine on which wide rounds cost nothing would never be asked for one."""
    curve = CostModel().curve(0)
    curve.refine(1, 1.0)
    for _ in range(4):
        curve.refine(4, 1.1)
        curve.refine(1, 1.0)
    assert curve.seconds(4) == pytest.approx(1.1, rel=0.03)
    assert curve.seconds(8) < 0.6 * likely(8)
    assert curve.seconds(2) < likely(2)


def test_a_slow_first_round_counts_less_than_a_fast_one() -> None:
    """What else a machine does makes single rounds slower, never faster."""
    for first in (20.0, 1.65):
        curve = CostModel().curve(0)
        curve.refine(1, 1.0)
        for seconds in (first, 1.65, 1.65):
            curve.refine(4, seconds)
        assert curve.seconds(4) == pytest.approx(1.65, rel=0.1)


def test_a_wider_round_that_was_faster_tells_of_narrower_ones() -> None:
    curve = Curve({1: 1.0, 4: 9.0, 8: 2.0})
    assert curve.seconds(4) == pytest.approx(2.0)


def test_a_context_nobody_measured_begins_like_its_neighbour_and_goes_its_own_way() -> None:
    costs = known_costs({1: 1.0, 2: 1.5})
    far = costs.curve(bucket(50_000))
    assert far.seconds(2) == pytest.approx(1.5)
    for _ in range(50):
        far.refine(2, 3.0)
    assert costs.curve(0).seconds(2) == pytest.approx(1.5)


def test_contexts_have_buckets() -> None:
    assert [bucket(n) for n in (1, 1024, 1025, 20_000, 1 << 20)] == [0, 0, 1, 3, 4]


# ---- drafts


def test_drafts_cost_their_steps_and_what_they_catch_up_on() -> None:
    cost = DraftCost(call=0.5, step=1.0, queued=0.25, row=0.5)
    assert cost.seconds(3, 1) == 3.5
    assert cost.seconds(3, 5) == 4.5
    assert cost.seconds(3, 2, num_rows=2) == 5.25


@pytest.mark.parametrize("wrong", [{"step": -1.0}, {"row": 1.5}, {"call": float("inf")}], ids=str)
def test_what_is_no_cost_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        DraftCost(**wrong)


def refine(costs: CostModel, seconds: float, kind: str = "greedy") -> None:
    """A round of which no draft was verified took so long beyond a plain one."""
    curve = costs.curve(0, 1, kind)
    costs.drafted(curve, 1, [DraftCall("mtp", kind, 1, 1, 1)], curve.plain + seconds)


def test_draft_costs_follow_what_drafts_take() -> None:
    costs = known_costs({1: 1.0}, {"mtp": DraftCost(step=0.1)})
    for _ in range(100):
        refine(costs, 0.2)
    assert costs.draft("mtp", "greedy", 1.0).step == pytest.approx(0.2, rel=0.02)


def test_what_a_round_takes_longer_is_shared_by_its_drafts_and_its_width() -> None:
    """So their sum is what such rounds take, and rounds of that width without a model's drafts put the width right."""
    costs = known_costs({1: 1.0, 4: 1.6}, {"mtp": DraftCost(step=0.2)})
    curve, call = costs.curve(0), DraftCall("mtp", "greedy", 3, 1, 1)
    assert costs.seconds(curve, 4, [call]) == pytest.approx(2.2)
    for _ in range(200):
        costs.drafted(curve, 4, [call], 3.0)
    assert costs.seconds(curve, 4, [call]) == pytest.approx(3.0, rel=0.02)
    assert curve.seconds(4) > 1.9
    for _ in range(200):
        costs.drafted(curve, 4, [call], 3.0)
        curve.refine(4, 1.6)
    assert curve.seconds(4) == pytest.approx(1.6, rel=0.05)
    assert costs.seconds(curve, 4, [call]) == pytest.approx(3.0, rel=0.05)


def test_a_lookup_costs_nothing() -> None:
    assert known_costs({1: 1.0}, {}).draft("ngram-simple", "greedy", 1.0).seconds(4, 0) == 0.0


def test_a_guess_is_in_plain_rounds_and_drafts_replace_it() -> None:
    costs = CostModel(guesses={"mtp": DraftCost(call=0.1, step=0.4)})
    assert costs.is_guess("mtp", "greedy")
    assert costs.draft("mtp", "greedy", 3.0).seconds(1, 1) == pytest.approx(1.5)
    refine(costs, 0.25)
    assert not costs.is_guess("mtp", "greedy")
    assert costs.draft("mtp", "greedy", 3.0).seconds(1, 1) == pytest.approx(0.25)
    for _ in range(int(TRUST) + 4):
        refine(costs, 0.25)
    refine(costs, 3.0)
    assert costs.draft("mtp", "greedy", 1.0).seconds(1, 1) == pytest.approx(0.25, rel=0.05)


def test_a_stalled_draft_is_forgotten() -> None:
    costs = CostModel(guesses={"mtp": DraftCost(step=0.2)})
    for seconds in (50.0, 0.3, 0.3, 0.3):
        refine(costs, seconds)
    assert costs.draft("mtp", "greedy", 1.0).step == pytest.approx(0.3, rel=0.05)


# ---- kinds and rows


@catches("all kinds share a curve", "mlxspec.policy.costs:DEARER", lambda _: ())
def test_kinds_of_sampling_have_costs_of_their_own() -> None:
    """They begin as greedy rounds and learn from their own rounds and drafts alone."""
    known = known_costs({1: 1.0, 4: 1.6}, {"mtp": DraftCost(step=0.1)})
    assert known.curve(0, 1, "sampled").seconds(4) == pytest.approx(1.6)
    assert known.draft("mtp", "sampled", 1.0) == known.draft("mtp", "greedy", 1.0)
    for _ in range(60):
        known.curve(0, 1, "sampled").refine(4, 3.0)
        known.curve(0, 1, "sampled").refine(1, 1.5)
        refine(known, 0.3, "sampled")
    for found in (known, kept(known)):
        assert found.curve(0).seconds(4) == pytest.approx(1.6)
        assert found.curve(0, 1, "sampled").seconds(4) == pytest.approx(3.0, rel=0.1)
        assert found.draft("mtp", "greedy", 1.0).step == pytest.approx(0.1)
        assert found.draft("mtp", "sampled", 1.0).step == pytest.approx(0.3, rel=0.1)


def test_rounds_of_several_rows_have_a_curve_of_their_own() -> None:
    costs = known_costs({1: 1.0, 2: 2.0, 3: 2.5, 4: 3.0, 8: 5.0}, pause=0.3)
    rows = costs.curve(0, 3)
    assert rows.plain == pytest.approx(1.0 + costs.curve(0).seconds(4) - 2.0)  # no step to wide rounds
    assert rows.seconds(5) == pytest.approx(1.3 * rows.plain + costs.curve(0).seconds(3) - 1.0)
    before = costs.curve(0).seconds(3)
    rows.refine(3, 4.0)
    assert costs.curve(0).seconds(3) == before
    assert costs.curve(0, 3) is rows


@given(points, st.integers(2, 64), st.floats(0.0, 2.0))
def test_any_curve_of_one_row_gives_one_of_several(
    measured: dict[int, float], num_rows: int, pause: float
) -> None:
    rows = known_costs({1: 1.0, **measured}, pause=pause).curve(0, num_rows)
    assert all(rows.seconds(width) > 0 for width in range(1, MAX_TOKENS + 1))


def test_where_reading_weights_is_what_takes_time_it_does_not_matter_whose_a_token_is() -> None:
    costs = known_costs({1: 1.0, 2: 1.1, 4: 1.5, 8: 2.7})
    one, rows = costs.curve(0), costs.curve(0, 4)
    assert [rows.seconds(w) for w in (4, 7, 20)] == pytest.approx([one.seconds(w) for w in (4, 7, 20)])


def test_a_group_that_was_never_met_begins_like_one_of_as_many_rows() -> None:
    costs = known_costs({1: 1.0, 2: 1.1, 12: 2.0})
    for _ in range(40):
        costs.curve(0, 4).refine(4, 3.0)
        costs.curve(0, 4).refine(12, 6.0)
    assert costs.curve(2, 4, "sampled").seconds(12) == pytest.approx(6.0, rel=0.1)


# ---- the file


def kept(costs: CostModel) -> CostModel:
    """As a file gives them back to another process, which guesses before it reads it."""
    found = CostModel(guesses={"mtp": DraftCost(step=9.0)}, pause=costs.pause)
    found.learn_from(json.loads(json.dumps(costs.as_data())))
    return found


def test_costs_survive_their_file() -> None:
    costs = CostModel({1: 1.0, 4: 2.0}, {"mtp": DraftCost(step=0.2)})
    for _ in range(40):
        costs.curve(0).refine(1, 0.01)
        costs.curve(0).refine(4, 0.03)
        costs.curve(2).refine(1, 0.05)
        costs.drafted(costs.curve(0), 1, [DraftCall("mtp", "greedy", 2, 1, 1)], 0.018)
    costs.lengths["greedy"], costs.bank = 77.0, 3.0
    costs.judged["mtp"] = (40, 30)
    costs.curve(0).pause = 0.001
    found = kept(costs)
    for width in (1, 4):
        assert found.curve(0).seconds(width) == pytest.approx(costs.curve(0).seconds(width))
    assert found.curve(2).plain == pytest.approx(costs.curve(2).plain)
    assert found.draft("mtp", "greedy", 1.0) == costs.draft("mtp", "greedy", 1.0)
    assert not found.is_guess("mtp", "greedy")
    assert (found.lengths, found.bank, found.judged) == (costs.lengths, costs.bank, costs.judged)
    assert found.curve(0).pause == 0.001
    assert json.dumps(kept(found).as_data()) == json.dumps(found.as_data())


def test_the_first_plain_round_of_a_process_replaces_what_another_one_knew() -> None:
    """The machine may have another speed now. What widths cost beside a plain round stays."""
    costs = CostModel({1: 1.0, 4: 2.0}, {})
    for _ in range(10):
        costs.took(costs.curve(0), 1, [], 0.01)
        costs.took(costs.curve(0), 4, [], 0.02)
    found = kept(costs).curve(0)
    assert found.is_timed
    for _ in range(SOON):
        assert not found.is_stale
        found.refine(4, 0.02)
    assert found.is_stale
    found.refine(1, 0.011)
    assert found.plain == pytest.approx(0.011)
    assert found.seconds(4) == pytest.approx(0.022, rel=0.02)
    assert not found.is_stale


def test_few_rounds_teach_the_next_process_nothing() -> None:
    costs = CostModel()
    costs.curve(0).refine(1, 0.01)
    assert costs.as_data()["curves"] == []


def test_what_was_learned_of_rows_is_kept_and_yields_slowly() -> None:
    costs = known_costs({1: 1.0, 2: 1.2, 12: 3.0}, pause=0.3)
    for _ in range(60):
        costs.curve(0, 4).refine(4, 2.0)
        costs.curve(0, 4).refine(12, 8.0)
    again = kept(costs)
    before = again.curve(0, 4).seconds(12)
    assert before == pytest.approx(costs.curve(0, 4).seconds(12))
    again.curve(0, 4).refine(12, 4 * before)
    assert again.curve(0, 4).seconds(12) < 1.2 * before


def test_the_ladder_has_few_widths() -> None:
    assert [w for w in LADDER if w <= 64] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]


def test_the_first_run_of_a_shape_is_expected_to_take_what_others_did() -> None:
    """One of three may have been held up, whichever it was."""
    for seconds in ((90.0, 4.0, 3.0), (4.0, 90.0, 3.0), (4.0, 3.0, 90.0)):
        costs = CostModel()
        assert costs.cold == 0.0
        for width, each in enumerate(seconds, 1):
            costs.compiled(1, width, each)
        costs.compiled(1, 4, None)
        assert costs.cold == 4.0
        assert costs.ran == {(1, 1), (1, 2), (1, 3), (1, 4)}


# ---- what else a machine does

MTP = DraftCall("mtp", "greedy", 3, 1, 1)
# seconds on a machine of which nothing is known: plain, verifies of 4 and 16 tokens, and a draft of three
TRUE = {1: 0.01, 4: 0.012, 16: 0.03}
DRAFT = 0.006


def answering(held_up: Callable[[int], float], num: int) -> CostModel:
    """What a process has learned from `num` rounds: some plain ones, then those of drafts, and plain ones where costs are in doubt.
    held_up: round -> how many times as long it takes."""
    costs = CostModel(guesses={"mtp": DraftCost(call=0.1, step=0.3)})
    curve = costs.curve(0)
    for i in range(num):
        width, calls = (1, []) if i < 2 or costs.is_in_doubt else (16, []) if i % 5 == 0 else (4, [MTP])
        costs.took(curve, width, calls, held_up(i) * (TRUE[width] + DRAFT * len(calls)))
    return costs


def wrong(costs: CostModel, width: int, calls: Sequence[DraftCall]) -> float:
    """What a round is believed to take beside a plain one, over what it does."""
    believed = costs.seconds(costs.curve(0), width, calls) / costs.curve(0).plain
    return believed * TRUE[1] / (TRUE[width] + DRAFT * len(calls))


ROUNDS = 60


@catches(
    "rounds that are far off count alone",
    "mlxspec.policy.doubt:CLIP",
    lambda right: 1e9,
    case="1000-6",
)
@pytest.mark.parametrize("first", [*range(0, 30, 3)])
@pytest.mark.parametrize("length", [4, 15, 1000])
def test_a_machine_that_is_slower_for_a_while_is_so_for_all_rounds(first: int, length: int) -> None:
    """Plain rounds are asked for, and what drafts cost beside them stays."""
    costs = answering(lambda i: 2.0 if first <= i < first + length else 1.0, ROUNDS)
    assert 0.7 < wrong(costs, 4, [MTP]) < 1.3
    assert 0.7 < wrong(costs, 16, []) < 1.3
    assert costs.curve(0).plain == pytest.approx(0.02 if first + length > ROUNDS else 0.01, rel=0.3)


def test_a_round_between_what_is_expected_and_what_was_guessed_first_teaches() -> None:
    """A narrower width was faster than guessed, so more is expected of a wider one than its guess said: no round is far off between."""
    costs = CostModel(guesses={})
    curve = costs.curve(0)
    for _ in range(2):
        costs.took(curve, 1, [], TRUE[1])
    for _ in range(8):
        costs.took(curve, 4, [], TRUE[1])
    expected = curve.seconds(12)
    assert curve.most(12) > 1.3 * expected
    for _ in range(3):
        costs.took(curve, 12, [], 1.02 * expected)
    assert 12 in curve.known


def test_rounds_that_have_become_dear_are_believed() -> None:
    """Where plain ones have not, after a few rounds."""
    costs = answering(lambda i: 1.0, ROUNDS)
    curve, counted, plain = costs.curve(0), list[float](), 0
    for _ in range(8):
        if costs.is_in_doubt:
            costs.took(curve, 1, [], TRUE[1])
            plain += 1
        counted.append(costs.took(curve, 4, [MTP], 0.036))
    assert counted[0] == pytest.approx(TRUE[4] + DRAFT, rel=0.1)
    assert counted[-1] == pytest.approx(0.036, rel=0.05)
    assert costs.seconds(curve, 4, [MTP]) == pytest.approx(0.036, rel=0.05)
    assert 1 <= plain <= 2


def test_a_machine_of_another_speed_changes_what_drafts_cost() -> None:
    costs = known_costs({1: 1.0, 4: 1.5}, {"mtp": DraftCost(step=0.2)})
    curve = costs.curve(0)
    for _ in range(4):
        costs.took(curve, 1, [], 2.0)
    assert [curve.plain, curve.seconds(4)] == pytest.approx([2.0, 3.0], rel=0.05)
    assert costs.draft("mtp", "greedy", curve.plain).step == pytest.approx(0.4, rel=0.05)
