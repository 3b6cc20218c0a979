"""Drafting never changes the text: every drafter, and all of them, against plain decoding; rows together against rows alone."""

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

NUM_BATCHES, NUM_ROWS = 8, 5  # 40 prompts
FAST_BATCHES = 4  # of these batches; the slow tier has all
DRAFTERS = [("ngram-simple",), ("mtp",), ("eagle3",), ("draft-model",), ALL]


def per_drafter() -> list:
    """In the fast tier all drafters together on every batch, and each alone on half of them."""
    return [
        pytest.param(
            drafters,
            number,
            id=f"{'+'.join(drafters)}-{number}",
            marks=[]
            if number < FAST_BATCHES and (drafters == ALL or number % 2 == i % 2)
            else [pytest.mark.slow],
        )
        for i, drafters in enumerate(DRAFTERS)
        for number in range(NUM_BATCHES)
    ]


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


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[] if n < FAST_BATCHES else [pytest.mark.slow]) for n in range(NUM_BATCHES)],
)
def test_rows_together_are_the_rows_alone(number: int) -> None:
    some, params, _ = batch(number)
    check(number, engine().generate(some, params, spec=PLAIN), "plain, 5 rows")


@pytest.mark.parametrize(("drafters", "number"), per_drafter())
def test_one_row_drafted_is_the_row_plain(drafters: tuple[str, ...], number: int) -> None:
    some, params, _ = batch(number)
    results = [engine().generate(p, s, spec=spec(*drafters)) for p, s in zip(some, params, strict=True)]
    check(number, results, f"{drafters}, 1 row")


@pytest.mark.parametrize(("drafters", "number"), per_drafter())
def test_ragged_rows_drafted_are_the_rows_plain(drafters: tuple[str, ...], number: int) -> None:
    some, params, _ = batch(number)
    check(number, engine().generate(some, params, spec=spec(*drafters)), f"{drafters}, 5 rows")


LIMITS: list[dict] = [
    {"n_max": 1},
    {"n_max": 9, "ngram_m": 10},
    {"n_max": 6, "p_min": 0.5},
    {"n_max": 6, "p_min": 0.9, "n_min": 2},
    {"n_max": 3, "n_min": 3},
    {"n_max": 0},
    {"n_max": 5, "p_min": 1.0},
]


@pytest.mark.parametrize(
    ("drafters", "limits"),
    [
        *(pytest.param(("mtp",), limits, id=f"mtp-{limits}") for limits in LIMITS),
        *(
            pytest.param(
                ("draft-model", "ngram-simple"),
                limits,
                id=f"draft-model+ngram-simple-{limits}",
                marks=[] if i in (1, 3, 5) else [pytest.mark.slow],
            )
            for i, limits in enumerate(LIMITS)
        ),
    ],
)
def test_limits_of_drafts_change_the_speed_only(drafters: tuple[str, ...], limits: dict) -> None:
    number = len(drafters)
    some, params, _ = batch(number)
    results = engine().generate(some, params, spec=spec(*drafters, **limits))
    check(number, results, f"{drafters}, {limits}")
    for result in results:
        for name, did in result.stats.drafters.items():
            longest = limits.get("ngram_m", 12) if name == "ngram-simple" else limits["n_max"]
            assert len(did.by_position) <= longest
            if name != "ngram-simple":
                assert did.num_drafted >= limits.get("n_min", 0) * did.num_rounds
    if limits["n_max"] == 0:
        assert all("mtp" not in r.stats.drafters and "draft-model" not in r.stats.drafters for r in results)


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


def test_every_drafter_was_of_some_use() -> None:
    """Equal texts prove little if every draft is thrown away: each kind has drafts that stand, and drafts that do not."""
    for drafters in DRAFTERS[:3]:
        did = [engine().generate(batch(n)[0], batch(n)[1], spec=spec(*drafters)) for n in (1, 2)]
        stats = [r.stats.drafters[drafters[0]] for results in did for r in results if r.stats.drafters]
        drafted, accepted = sum(s.num_drafted for s in stats), sum(s.num_accepted for s in stats)
        assert 0.05 * drafted < accepted < 0.95 * drafted, f"{drafters}: {accepted} of {drafted}"


def test_a_seed_decides_the_text_and_none_draws_one() -> None:
    some, params, plain = batch(1)
    again = engine().generate(some[0], params[1], spec=PLAIN)
    assert engine().generate(some[0], params[1], spec=spec(*ALL)).tokens == again.tokens
    assert plain[1].stats.seed == params[1].seed


@pytest.mark.slow
@pytest.mark.skipif(equality.EXACT, reason="this process computes with MLX's own BLAS already")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="MLX's own BLAS is a Linux matter")
def test_bit_for_bit_without_any_excuse_where_widths_do_not_matter() -> None:
    """Much of the above in a process whose BLAS gives every row the same bits whatever stands beside it."""
    names = [
        *(f"test_rows_together_are_the_rows_alone[{n}]" for n in (0, 1)),
        *(
            f"test_ragged_rows_drafted_are_the_rows_plain[{'+'.join(d)}-{i % 2}]"
            for i, d in enumerate(DRAFTERS)
        ),
        f"test_one_row_drafted_is_the_row_plain[{'+'.join(ALL)}-0]",
        "test_any_pattern_of_acceptance_gives_the_same_text[0.9]",
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *(f"{__file__}::{n}" for n in names),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "MLXSPEC_BLAS": "wheel"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "flips excused" not in done.stdout
