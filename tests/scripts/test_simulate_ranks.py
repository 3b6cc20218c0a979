"""The tables of ranks: what is computed is what models/traffic.py computes, and what is simulated follows from its parts."""

from __future__ import annotations

import sys

import pytest
import simulate_ranks
from simulate_ranks import MACS, RDMA, RING, Link, Model, fitted, rate, seconds, table_of_sent, table_of_speed

from mlxspec.models.traffic import of_round

SMALL = "Qwen3.5-0.8B"


def test_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_ranks, "MODELS", (SMALL,))
    assert list(table_of_sent())[2:] == [
        f"| {SMALL} | 2 | 0.500 | 50, 50, 2 | 349, 349 | 1,395, 1,395 | 250, 250 |",
        f"| {SMALL} | 4 | 0.252 | 50, 50, 2 | 523, 674 | 2,092, 2,694 | 376, 379 |",
    ]


def test_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without latency and with endless bandwidth two Macs are twice one; messages cost what they cost; drafts make them rarer."""
    monkeypatch.setattr(simulate_ranks, "MODELS", (SMALL,))
    model, mac, how = Model(SMALL), MACS[0], {"acceptance": 0.8, "share": 0.8}
    free = Link(name="free", latency=0.0, bandwidth=float("inf"), topology="ring", source="nowhere")
    alone = rate(model, mac, 1, None, 0, **how)
    assert rate(model, mac, 2, free, 0, **how) == pytest.approx(2 * alone)
    plain = rate(model, mac, 2, RING, 0, **how)
    assert 1 / plain == pytest.approx(1 / (2 * alone) + seconds(of_round(model.config, 2), RING))
    assert seconds(of_round(model.config, 2, 3), RING) < 1.3 * seconds(of_round(model.config, 2), RING)
    assert rate(model, mac, 2, RING, 3, **how) / plain > rate(model, mac, 1, None, 3, **how) / alone
    assert len(list(table_of_speed(**how))) == 2 + 2 * 3


@pytest.mark.slow
def test_latency_as_reported() -> None:
    """It gives the rate that was reported, and lies between the two others."""
    told = fitted(0.8)
    assert RDMA.latency < told.latency < RING.latency
    found = rate(Model("Qwen3.5-27B"), MACS[0], 2, told, 0, acceptance=0.8, share=0.8)
    assert found == pytest.approx(simulate_ranks.REPORTED[0])


@pytest.mark.parametrize("words", [("--acceptance", "0"), ("--bandwidth", "1.5")])
def test_bad_options(
    words: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate_ranks.py", *words])
    with pytest.raises(SystemExit) as stopped:
        simulate_ranks.main()
    assert stopped.value.code == 2
    assert words[0] in capsys.readouterr().err.splitlines()[-1]
