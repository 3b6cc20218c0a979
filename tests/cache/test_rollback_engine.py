"""The engine says the same with every way of rollback: plain decoding's text, with each drafter, alone and in ragged batches."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from mlxspec.cache.rollback import Checkpoint, Rollback, Snapshots, by_tape
from mlxspec.cli import options
from mlxspec.engine.engine import Engine, Result
from tests.engine import equality
from tests.engine.equality import ALL, PLAIN, asked, prompts, same, spec

NUM_ROWS = 5
OPTIONS: dict[str, dict] = {
    "tape": {"rollback": "tape"},
    "snapshots": {"rollback": "snapshots"},
    "snapshots of 2": {"rollback": "snapshots", "num_states": 2},
    "checkpoint": {"rollback": "checkpoint"},
}
DRAFTERS = [("ngram-simple",), ("mtp",), ("eagle3",), ("draft-model",), ALL]


@cache
def engine(name: str) -> Engine:
    return equality.engine(**OPTIONS[name])


@cache
def batch(number: int) -> tuple:
    some, params = prompts(NUM_ROWS, number), asked(number * NUM_ROWS, NUM_ROWS)
    return (
        some,
        params,
        [engine("tape").generate(p, s, spec=PLAIN) for p, s in zip(some, params, strict=True)],
    )


def check(number: int, results: list[Result], what: str) -> None:
    for prompt, params, wanted, got in zip(*batch(number), results, strict=True):
        same(wanted, got, prompt, params, what)


@pytest.mark.parametrize("drafters", DRAFTERS, ids="+".join)
@pytest.mark.parametrize("name", OPTIONS)
def test_drafting_never_changes_the_text(name: str, drafters: tuple[str, ...]) -> None:
    some, params, _ = batch(1)
    results = engine(name).generate(some, params, spec=spec(*drafters))
    check(1, results, f"{name}, {drafters}, {NUM_ROWS} rows")
    alone = [
        engine(name).generate(p, s, spec=spec(*drafters)) for p, s in zip(some[:2], params, strict=False)
    ]
    for prompt, ask, wanted, got in zip(some, params, batch(1)[2], alone, strict=False):
        same(wanted, got, prompt, ask, f"{name}, {drafters}, alone")


@pytest.mark.parametrize("sure", [pytest.param(0.0, marks=pytest.mark.slow), 0.7, 1.0])
@pytest.mark.parametrize("name", OPTIONS)
def test_any_pattern_of_acceptance_gives_the_same_text(name: str, sure: float) -> None:
    some, params, plain = batch(0)
    oracle = equality.Oracle([[*p, *r.tokens] for p, r in zip(some, plain, strict=True)], sure=sure)
    drafting = equality.engine([oracle], **OPTIONS[name])
    results = drafting.generate(some, params, spec=spec("ngram-simple", ngram_m=10))
    check(0, results, f"{name}, oracle {sure}")
    longest = max(len(r.stats.drafters["ngram-simple"].by_position) for r in results)
    assert longest == (1 if name == "snapshots of 2" else min(10, longest))
    if sure == 1.0:
        assert all(r.stats.num_accepted == r.stats.num_drafted for r in results)


def test_drafts_are_no_longer_than_what_can_be_taken_back_and_that_is_said() -> None:
    prompt, params = batch(0)[0][0], batch(0)[1][0]
    whole = engine("snapshots").generate(prompt, params, spec=spec("mtp"))
    assert not whole.stats.notices  # as many states as the engine's own limits ask for
    cut = engine("snapshots of 2").generate(prompt, params, spec=spec("mtp", n_max=4))
    assert len(cut.stats.drafters["mtp"].by_position) == 1
    assert cut.stats.notices == ["drafts are cut to 1 token: rollback by snapshots keeps 2 states"]
    assert not engine("snapshots of 2").generate(prompt, params, spec=spec("mtp", n_max=1)).stats.notices
    assert not engine("snapshots of 2").generate(prompt, params, spec=PLAIN).stats.notices


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("tape", by_tape()),
        ("snapshots", Snapshots(17)),
        ("snapshots of 2", Snapshots(2)),
        ("checkpoint", Checkpoint()),
    ],
)
def test_the_option_reaches_the_rows(name: str, way: Rollback) -> None:
    drafting = equality.engine(**OPTIONS[name])
    drafting.submit(batch(0)[0][0], batch(0)[1][0])
    drafting.step()
    assert drafting._rows.cache is not None
    assert drafting._rows.cache.rollback == way


def test_the_command_line_has_it() -> None:
    assert options.parse(["generate", "-p", "x"]).rollback == "tape"
    assert options.parse(["demo", "--rollback", "checkpoint"]).rollback == "checkpoint"
    with pytest.raises(options.ConfigError, match="--rollback must be one of tape, snapshots, checkpoint"):
        options.parse(["chat", "--rollback", "rewind"])


@pytest.mark.slow
@pytest.mark.skipif(equality.EXACT, reason="this process computes with MLX's own BLAS already")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="MLX's own BLAS is a Linux matter")
def test_bit_for_bit_without_any_excuse_where_widths_do_not_matter() -> None:
    """Some of the above in a process whose BLAS gives every row the same bits whatever stands beside it."""
    names = [f"test_drafting_never_changes_the_text[{n}-{'+'.join(ALL)}]" for n in OPTIONS if n != "tape"]
    names += [f"test_any_pattern_of_acceptance_gives_the_same_text[{n}-0.7]" for n in OPTIONS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(f"{__file__}::{n}" for n in names)],
        env={**os.environ, "MLXSPEC_BLAS": "wheel"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "flips excused" not in done.stdout
