"""The clock that is fitted to timings: it finds the parts that made them, and says where a clock lacks one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from simulation.clock import Clock, Timed, compare, fit, read, write
from simulation.engine_clock import Round

TRUE = Clock(
    plain=0.0013,
    widths={1: 1.0, 2: 1.2, 4: 1.45, 8: 1.68, 17: 2.5},
    wait=0.3,
    call=0.2,
    step=0.28,
    queued=0.05,
    compiling=6.0,
    start=0.5,
)


def answered(rng: np.random.Generator, setting: str) -> list[Round]:
    """An answer of 96 tokens: which rounds a setting has."""
    rounds: list[Round] = []
    place, queued, is_behind = 0, 1, False
    while place < 96:
        is_lookup = setting in ("lookup", "auto") and rng.random() < 0.3
        depth = 0 if is_lookup or setting in ("off", "lookup") else int(rng.choice([1, 3]))
        depth = depth if setting != "auto" or rng.random() < 0.6 else 0
        width = int(rng.choice([2, 4, 8, 17])) if is_lookup else 1 + depth
        if setting == "auto" and depth and rng.random() < 0.1:
            width = 1  # a probe
        is_ahead = width == 1 and not depth and not is_behind
        drafts = ((depth, queued),) if depth else ()
        rounds.append(Round(width, drafts, 0.0, is_ahead, rng.random() > 0.01))
        accepted = int(rng.integers(0, width))
        place, is_behind = place + 1 + accepted, width > 1 or depth > 0
        queued = 1 + accepted if depth else queued + 1 + accepted
    return rounds


def timings() -> list[Timed]:
    """Of TRUE: of five turns one is held up."""
    rng = np.random.default_rng(3)
    found = []
    for prompt in range(15):
        for setting in ("off", "mtp 3", "lookup", "auto"):
            rounds = answered(rng, setting)
            seconds = TRUE.seconds(rounds) * np.exp(rng.normal(0.0, 0.01, 5)) * [1.0, 2.0, 1.0, 1.0, 1.0]
            found.append(
                Timed(
                    setting=setting, prompt=prompt, seconds=tuple(map(float, seconds)), rounds=tuple(rounds)
                )
            )
    return found


def test_the_parts_of_a_clock_are_found_in_timings() -> None:
    timed = timings()
    found = fit(timed)
    assert found.plain == pytest.approx(TRUE.plain, rel=0.03)
    for width, taken in TRUE.widths.items():
        assert found.widths[width] == pytest.approx(taken, abs=0.15)
    for name in ("wait", "call", "step", "queued"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), abs=0.15)
    assert found.compiling == pytest.approx(TRUE.compiling, rel=0.15)
    assert all(off.is_close for off in compare(timed, found))


@pytest.mark.parametrize(
    "wrong",
    [
        {"widths": {**TRUE.widths, 8: 2.5, 17: 3.25}},
        {"widths": dict.fromkeys(TRUE.widths, 1.0)},
        {"step": 0.0},
        {"compiling": 0.0},
    ],
    ids=["wide rounds too dear", "wide rounds free", "drafts free", "nothing compiles"],
)
def test_a_clock_that_lacks_a_part_is_found_out(wrong: dict[str, object]) -> None:
    offs = compare(timings(), replace(TRUE, **wrong))  # type: ignore[arg-type]
    assert not all(off.is_close for off in offs)


def test_timings_survive_their_file(tmp_path: Path) -> None:
    timed = timings()[:4]
    write(tmp_path / "timings.json", timed, {"device": "a machine"})
    assert read(tmp_path / "timings.json") == timed
