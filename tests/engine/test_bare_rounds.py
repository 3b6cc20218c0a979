"""Bare rounds do what an engine's rounds do: the text that they decode is the engine's."""

from __future__ import annotations

from functools import cache

import pytest

from mlxspec.config import EngineConfig, SamplingParams
from mlxspec.engine import measure
from mlxspec.engine.engine import Engine
from mlxspec.engine.measure import PROMPT, WIDTHS, BareRounds
from tests import tiny_models

ROUNDS = 12


@cache
def text() -> tuple[int, ...]:
    """The prompt of a bare row and what an engine says to it."""
    prompt = [1, 2]
    assert len(prompt) == PROMPT
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    return (*prompt, *Engine(tiny_models.target()).generate(prompt, params).tokens)


def differs() -> bool:
    """Whether a row that verifies all widths in turn ever has another token than the engine at the same place."""
    rounds = BareRounds(tiny_models.target(), EngineConfig(), drafts=True)
    for i in range(ROUNDS):
        rounds.run(WIDTHS[i % len(WIDTHS)])
        if int(rounds._newest.item()) != text()[rounds._length]:
            return True
    assert rounds._length >= PROMPT + ROUNDS
    return False


def test_rounds_with_drafts_say_what_the_engine_says() -> None:
    assert not differs()


def test_plain_rounds_that_run_ahead_say_what_the_engine_says() -> None:
    rounds = BareRounds(tiny_models.target(), EngineConfig(), drafts=False)
    for i in range(ROUNDS):
        rounds.run(1)
        assert int(rounds._newest.item()) == text()[PROMPT + 1 + i]


def test_a_rejected_draft_that_is_committed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above sees a row whose state holds a token that it did not accept."""
    match = measure.match
    monkeypatch.setattr(
        measure, "match", lambda drafted, sampled: min(match(drafted, sampled) + 1, len(drafted))
    )
    assert differs()


def test_a_row_ends_before_the_models_context_does() -> None:
    target = tiny_models.target()
    rounds = BareRounds(target, EngineConfig(), drafts=True)
    assert not rounds.is_over
    rounds._length = target.max_context - WIDTHS[-1] - 1
    assert rounds.is_over
