"""Random requests have the same text drafted and plain. scripts/fuzz_text.py runs thousands."""

from __future__ import annotations

from collections.abc import Container, Iterable

import pytest

from tests.engine.random_requests import case, play


def numbered(numbers: Iterable[int], fast: Container[int]) -> list:
    return [pytest.param(n, marks=[] if n in fast else [pytest.mark.slow]) for n in numbers]


@pytest.mark.parametrize("number", numbered((*range(60, 90), 191), {70, 191}))
def test_drafted_text_is_plain_text_in_float32(number: int) -> None:
    assert play(case(number, ["float32"]))["requests"] > 0


@pytest.mark.parametrize("number", numbered(range(40), {5, 12}))
def test_drafted_text_is_plain_text_in_every_form(number: int) -> None:
    assert play(case(number))["requests"] > 0


def test_cases_are_made_from_their_number() -> None:
    assert case(7) == case(7)
    assert str(case(7)) != str(case(8))


@pytest.mark.slow
def test_cases_reach_every_kind() -> None:
    """Of 300 cases: every model, form, way of rollback, drafter and policy, grammars, stops, turns, cancels, several rows."""
    made = [case(n) for n in range(300)]
    asks = [ask for c in made for turn in c.turns for ask in turn]
    assert len({c.form for c in made}) == 9
    assert len({c.rollback for c in made}) == 3
    assert len({name for c in made for name in c.spec.drafters}) == 10
    assert len({c.target for c in made}) == 2
    assert len({c.block for c in made if "dflash" in c.spec.drafters}) == 3
    assert {c.spec.policy for c in made} == {"auto", "fixed"}
    assert max(len(c.turns) for c in made) == 3
    assert max(len(c.turns[0]) for c in made) == 4
    for what in ("has_grammar", "stop", "bad_words", "logit_bias", "thinking_budget", "wants_logprobs"):
        assert sum(bool(getattr(a.params, what)) for a in asks) > 10, what
    assert any(a.is_cancelled for a in asks)
