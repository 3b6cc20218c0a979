"""What measuring at load may take: a number of rounds, whatever a round takes."""

from __future__ import annotations

import time

import pytest

from mlxspec.config import EngineConfig
from mlxspec.engine import calibrate
from mlxspec.engine.engine import Engine
from tests import tiny_models


@pytest.mark.parametrize(("seconds", "most"), [(10.0, 4 * 3 + 4), (0.001, 10 * 8)], ids=["slow", "fast"])
def test_a_slow_machine_is_measured_at_few_widths(
    seconds: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, rounds, step = [0.0], [0], Engine.step

    def slow_step(self: Engine) -> list:
        now[0] += seconds
        rounds[0] += 1
        return step(self)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(Engine, "step", slow_step)
    found = calibrate._rounds(tiny_models.target(), EngineConfig())
    assert {1, 2, 5, 17} <= set(found)
    assert rounds[0] <= most + 2  # two read the prompts
    assert (len(found) == 10) == (seconds < 1)
    assert all(s == pytest.approx(seconds) for s in found.values())
