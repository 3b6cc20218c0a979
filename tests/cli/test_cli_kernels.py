"""What a person and a program are told about Metal kernels: those in use and those that failed, nothing where there is no Metal."""

from __future__ import annotations

import json

import pytest

from mlxspec.cli import stats_line
from mlxspec.kernels import launch


@pytest.fixture
def reports(monkeypatch):
    def told(*found: launch.KernelReport) -> None:
        monkeypatch.setattr(launch, "needed", lambda: found)

    return told


def test_a_failed_kernel_is_a_notice_and_one_in_use_a_word(reports):
    used = launch.KernelReport(name="gdn_round", in_use=True, reason="agrees", speedups={"a": 1.5})
    failed = launch.KernelReport(name="conv_qkv", in_use=False, failed=True, reason="did not run here: why")
    reports(used, failed)
    assert stats_line.machine().endswith(" · kernels gdn_round")
    assert stats_line.notices([])[-1] == "The kernel conv_qkv is switched off: it did not run here: why."
    first, second = json.loads(json.dumps(stats_line.device_data()))["kernels"]
    assert first["in_use"]
    assert first["speedups"] == {"a": 1.5}
    assert second["failed"]


def test_a_kernel_that_won_races_but_rounds_otherwise_is_a_notice(reports):
    """It is left out of rounds, which nobody asked for, so it is said; one that won nothing would not be used anyway."""
    other = {"in_use": True, "reason": "agrees", "matches_mlx": False}
    idle = launch.KernelReport(name="qmv_rows_fp", speedups={"2 rows": 0.9}, **other)
    reports(launch.KernelReport(name="qmv_rows", speedups={"2 rows": 0.9, "4 rows": 1.3}, **other), idle)
    (notice,) = (n for n in stats_line.notices([]) if "kernel" in n)
    assert notice.startswith("The kernel qmv_rows is faster here, but is used with --exact only")
    assert "qmv_rows," not in stats_line.machine()
    assert stats_line.device_data()["kernels"][0]["matches_mlx"] is False


def test_kernels_that_have_no_place_here_are_not_mentioned(reports):
    reports(launch.KernelReport(name="gdn_round", in_use=False, reason="there is no GPU here"))
    assert "kernel" not in stats_line.machine()
    assert not any("kernel " in notice for notice in stats_line.notices([]))
