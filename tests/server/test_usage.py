"""Counts of several answers of one request, as the APIs tell them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planting import catches
from serving import Served

from mlxspec.engine.stats import DrafterStats, RequestStats
from mlxspec.server.usage import drafting, timings, usage

ONE = RequestStats(num_prompt=10, num_cached=8, num_read=2, num_generated=5, seed=1)


@catches(
    "a prompt counts once for each of its answers",
    "mlxspec.server.usage:usage",
    lambda right: lambda stats, num_prompts: right(stats, len(stats)),
)
def test_a_prompt_that_answers_share_counts_once() -> None:
    other = RequestStats(num_prompt=7, num_cached=1, num_generated=2, seed=2)
    found = usage([ONE, replace(ONE), other, replace(other)], 2)
    assert found == {
        "prompt_tokens": 17,
        "completion_tokens": 14,
        "total_tokens": 31,
        "prompt_tokens_details": {"cached_tokens": 9},
    }
    assert usage([ONE, replace(ONE)], 1)["prompt_tokens_details"] == {"cached_tokens": 8}


def test_predictions_of_all_answers_count() -> None:
    found = usage(
        [replace(ONE, num_predicted=6, num_foretold=4), replace(ONE, num_predicted=6, num_foretold=9)], 1
    )
    assert found["completion_tokens_details"] == {
        "accepted_prediction_tokens": 12,
        "rejected_prediction_tokens": 0,
    }


def test_times_of_answers_beside_one_another_are_the_longest() -> None:
    found = timings([replace(ONE, decode_seconds=2.0), replace(ONE, decode_seconds=1.0, prefill_seconds=0.5)])
    assert (found["prompt_n"], found["prompt_ms"], found["predicted_n"], found["predicted_ms"]) == (
        4,
        500.0,
        10,
        2000.0,
    )
    assert found["predicted_per_second"] == 5.0
    assert "draft_n" not in found


def test_drafters_of_all_answers_add_up() -> None:
    both = [
        replace(ONE, num_rounds=2, drafters={"mtp": DrafterStats()}, notices=["a", "b"]) for _ in range(2)
    ]
    for one, accepted in zip(both, (3, 1), strict=True):
        one.drafters["mtp"].add(4, accepted)
    found = drafting(both, ["b"])
    assert found["drafters"]["mtp"] == {"drafted": 8, "accepted": 4, "judged": 0, "right": 0}
    assert (found["rounds"], found["drafted_rounds"]) == (4, 2)
    assert found["notices"] == ["b", "a"]
    assert found["seeds"] == [1, 1]


@pytest.mark.parametrize(
    ("exact", "widest", "said"), [((8, 8), (8, 2), True), ((8, 8), (2, 9), False), ((None, 8), (2, 2), None)]
)
def test_answers_are_bit_exact_together(
    exact: tuple[int | None, ...], widest: tuple[int, ...], said: bool | None
) -> None:
    stats = [replace(ONE, exact_width=e, widest=w) for e, w in zip(exact, widest, strict=True)]
    assert drafting(stats)["bit_exact"] is said


def test_the_rule_for_ratios_answers_the_page(served: Served) -> None:
    rounds = {"rounds": 8, "drafted_rounds": 8}
    measured = {"drafted": [90, 100, 60], "plain": [45, 55, 32], **rounds}
    status, found = served.post("/api/ratio", measured)
    assert (status, found["words"]) == (200, "1.88 times as fast as without drafting (1.82 to 2.00)")
    _, found = served.post("/api/ratio", {**measured, "drafted_rounds": 1})
    assert (found["median"], found["refusal"]) == (None, "only 1 of 8 rounds had a draft")
    _, found = served.post("/api/ratio", {"drafted": [0], "plain": [1e9], **rounds})
    assert "too short" in found["refusal"]
    for wrong, says in (
        ({"plain": [1]}, "one number for each pair"),
        ({"drafted": [1e-300] * 3}, "drafted[0]"),
    ):
        status, found = served.post("/api/ratio", {**measured, **wrong})
        assert status == 400
        assert says in found["error"]
