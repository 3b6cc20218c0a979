"""Any pattern of acceptance gives the text of plain decoding; without any excuse where widths do not change bits."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from mlxspec.engine.engine import Engine, Result
from tests.engine import equality
from tests.engine.equality import ALL, PLAIN, asked, prompts, same, spec

NUM_ROWS = 5


@cache
def engine() -> Engine:
    return equality.engine()


@cache
def batch(number: int) -> tuple:
    """Prompts, parameters, and what plain decoding says to each alone."""
    some, params = prompts(NUM_ROWS, number), asked(number * NUM_ROWS, NUM_ROWS)
    return some, params, [engine().generate(p, s, spec=PLAIN) for p, s in zip(some, params, strict=True)]


def check(number: int, results: list[Result], what: str) -> None:
    for prompt, params, wanted, got in zip(*batch(number), results, strict=True):
        same(wanted, got, prompt, params, what)
        assert not got.stats.notices, got.stats.notices


@pytest.mark.parametrize("sure", [0.0, 0.5, 0.9, 1.0])
def test_any_pattern_of_acceptance_gives_the_same_text(sure: float) -> None:
    """Drafts of up to 40 tokens that are right with some probability each: kept counts from none to all, per row."""
    for number in (0, 3):
        some, params, plain = batch(number)
        texts = [[*p, *r.tokens] for p, r in zip(some, plain, strict=True)]
        oracle = equality.Oracle(texts, sure=sure, seed=number)
        results = equality.engine([oracle], ngram_m=40).generate(
            some, params, spec=spec("ngram-simple", ngram_m=40)
        )
        check(number, results, f"oracle {sure}")
        if sure == 1.0 and not equality.excused:
            assert all(r.stats.num_rounds == 1 for r in results)
            assert all(r.stats.num_accepted == r.stats.num_drafted for r in results)
        if sure == 0.0:
            assert all(r.stats.num_accepted == 0 for r in results)
        assert not oracle.told


def test_a_seed_decides_the_text_and_none_draws_one() -> None:
    some, params, plain = batch(1)
    again = engine().generate(some[0], params[1], spec=PLAIN)
    assert engine().generate(some[0], params[1], spec=spec(*ALL)).tokens == again.tokens
    assert plain[1].stats.seed == params[1].seed


@pytest.mark.slow
@pytest.mark.skipif(equality.EXACT, reason="this process computes with MLX's own BLAS already")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="MLX's own BLAS is a Linux matter")
def test_bit_for_bit_without_any_excuse_where_widths_do_not_matter() -> None:
    """Random requests, and the above, in a process whose BLAS gives every row the same bits whatever stands beside it."""
    root = Path(__file__).parents[2]
    files = [
        "engine/test_random_rows.py",
        "drafters/test_random_drafters.py",
        "sampling/test_random_samplers.py",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    done = subprocess.run(
        [*command, __file__, *(f"tests/{file}" for file in files)],
        env={**os.environ, "MLXSPEC_BLAS": "wheel"},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "flips excused" not in done.stdout
