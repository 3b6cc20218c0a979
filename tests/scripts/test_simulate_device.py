"""Rounds of an engine against a device of published times: the replay's own arithmetic, and how often the engine's rounds wait."""

from __future__ import annotations

import sys

import pytest
import simulate_device
from planting import catches
from simulate_device import Build, End, Machine, Shape, Wait, record, replay

WARM = simulate_device.WARM
# the host takes a second a node, the device one a kernel, and nothing else takes time
SECONDS = Machine(1.0, launch=1e6, node=1e6, encode=0.0, wake=0.0, round=0.0)


def rounds(*of_a_round) -> list:
    """Twice as many as are left out at the beginning."""
    out, given = [], 0
    for _ in range(2 * WARM):
        for event in of_a_round:
            given += isinstance(event, Build)
            out.append(Wait(given + event) if isinstance(event, int) else event)
    return out


def test_a_device_is_idle_while_the_host_builds_what_it_waits_for() -> None:
    found = replay(rounds(Build(3, 1), 0, End(2)), SECONDS)
    assert (found.seconds, found.idle, found.waits, found.drafted) == (4.0, 0.75, 1.0, 2.0)


def test_a_device_is_busy_while_the_host_reads_the_round_before() -> None:
    found = replay(rounds(Build(1, 3), -1, End(0)), SECONDS)
    assert (found.seconds, found.idle, found.waits) == (3.0, 0.0, 0.0)


def test_weights_take_their_bytes() -> None:
    slow = SECONDS._replace(bandwidth=1.0, share=0.5)
    assert replay(rounds(Build(1, 1, {1: 1e9}), 0, End(0)), slow).seconds == 1.0 + 1.0 + 2.0


def test_rows_take_what_was_published_or_what_their_instructions_take() -> None:
    machine = Machine(8.0, share=0.5, lanes=1000, clock=0.001, rows={1: 1.0, 4: 2.0, 8: 3.0})
    assert [machine.row_cost("mlx", n) for n in (1, 2, 6, 40)] == [1.0, pytest.approx(4 / 3), 2.5, 3.0]
    assert machine.row_cost("bytes", 8) == 1.0
    # 4 GB/s of 4.5 bits a weight, and 1 G instructions a second
    for kind, rows, instructions in (("qmv_rows", 8, 20.7), ("qmm_few", 5, 13.1), ("qmm_few", 9, 21.7)):
        assert machine.row_cost(kind, rows) == pytest.approx(instructions * 4 / (4.5 / 8))
        assert machine._replace(clock=100.0).row_cost(kind, rows) == 1.0
    # rows that a kernel does not take go to MLX's
    assert machine.row_cost("qmv_rows", 9) == machine.row_cost("qmm_few", 40) == 3.0
    assert machine.row_cost("best", 5) == 2.25
    assert machine._replace(clock=100.0).row_cost("best", 12) == 1.0
    assert machine._replace(clock=100.0, alike=12).row_cost("best", 12) == 3.0
    found = replay(
        rounds(Build(1, 1, {1: 1e9, 8: 1e9}), 0, End(0)), SECONDS._replace(rows={1: 1.0, 8: 3.0}), "mlx"
    )
    assert found.seconds == pytest.approx(1.0 + 1.0 + 4.0 / 0.82)


@pytest.mark.slow
@catches(
    "every round of a model's drafts waits for the one before it",
    "mlxspec.drafters.drafts:Drafts.propose",
    lambda right: lambda self, rooms, unread=None: right(self, rooms) if unread is None else None,
    case="auto-mtp",
)
@pytest.mark.parametrize("drafts", ["plain", "mtp", "dflash", "dflash2"])
@pytest.mark.parametrize("policy", ["fixed", "auto"])
def test_rounds_of_models_never_wait(policy: str, drafts: str) -> None:
    events = record(Shape("qwen3.5-0.8b", 4), drafts, "greedy", depth=3, policy=policy)
    found = replay(events, Machine(400.0))
    assert found.waits == 0
    assert found.drafted == (0 if drafts == "plain" else 3)


@pytest.mark.parametrize(
    "words",
    [
        ("--models", "1B"),
        ("--machines", "M9"),
        ("--sampling", "hot"),
        ("--depth", "9"),
        ("--products", "all"),
    ],
)
def test_bad_options(
    words: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate_device.py", *words])
    with pytest.raises(SystemExit) as stopped:
        simulate_device.main()
    assert stopped.value.code == 2
    assert words[0] in capsys.readouterr().err.splitlines()[-1]
