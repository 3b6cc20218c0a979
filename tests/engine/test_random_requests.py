"""Random requests have the same text drafted and plain, in every form of weights. scripts/fuzz_text.py runs thousands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import fast_tier
import pytest
from planting import catches

from tests.engine import random_slices
from tests.engine.random_requests import AXES, CONSTRAINTS, DRAFTERS, SAMPLERS, Case, case
from tests.engine.random_slices import SLICES, fast_case


@catches(
    "a rejected token is accepted",
    "mlxspec.sampling.acceptance:match",
    lambda right: lambda drafted, sampled: min(len(drafted), right(drafted, sampled) + 1),
    case="[bfloat16]",
)
@pytest.mark.parametrize(("made", "is_alike"), random_slices.cases("form"))
def test_every_form_of_weights(made: Case, is_alike: bool) -> None:
    random_slices.check(made, is_alike)


@pytest.mark.parametrize(("made", "is_alike"), random_slices.cases("auto"))
def test_policy_auto(made: Case, is_alike: bool) -> None:
    random_slices.check(made, is_alike)


def test_cases_are_made_from_their_number() -> None:
    assert case(7) == case(7)
    assert str(case(7)) != str(case(8))
    with pytest.raises(ValueError, match="No case fits"):
        case(7, family=("gemma3",), drafter=("eagle3",))


def test_fast_cases_reach_every_kind() -> None:
    """All together have every value of every axis, and the fast tier runs them all."""
    slices = {axis: [fast_case(axis, value) for value in SLICES[axis]] for axis in SLICES}
    made = [c for chosen in slices.values() for c in chosen]
    asks = [ask for c in made for turn in c.turns for ask in turn]
    for axis in ("family", "form", "kv_bits", "some_rows", "block", "prefix_budget", "joins"):
        assert {getattr(c, axis) for c in made} == set(AXES[axis]), axis
    assert {name for c in made for name in c.spec.drafters or ("none",)} == set(DRAFTERS)
    assert {c.spec.policy for c in made} == {"auto", "fixed"}
    assert {ask.sampler for ask in asks} == set(SAMPLERS)
    assert {ask.constraint for ask in asks} == set(CONSTRAINTS)
    assert {len(c.turns) for c in made} == {1, 2, 3}
    assert {len(c.turns[0]) for c in made} == {1, 2, 3, 4}
    assert {ask.is_cancelled for ask in asks} == {True, False}
    assert {bool(ask.params.top_logprobs) for ask in asks} == {True, False}
    assert min(c.spec.n_min for c in made) < max(c.spec.n_min for c in made)
    assert len({c.spec.p_min for c in made}) > 2


def test_the_fast_tier_runs_all_fast_cases() -> None:
    seconds = json.loads(fast_tier.SECONDS.read_text())
    for path in sorted(Path(__file__).parents[1].glob("*/test_random_*.py")):
        spent = seconds.get(f"tests/{path.parent.name}/{path.name}", {})
        axes = re.findall(r'random_slices.cases\("(\w+)"\)\)\ndef (\w+)', path.read_text())
        taken = sum(len(SLICES[axis]) * spent.get(test, fast_tier.UNTIMED) for axis, test in axes)
        assert taken <= fast_tier.ALLOWANCE, path.name
