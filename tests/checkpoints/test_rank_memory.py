"""Ranks on one machine share its memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxspec.engine.memory import check_weights, default_budget
from mlxspec.errors import MemoryBudgetError
from mlxspec.platform.memory import machine_memory, ranks_here

pytestmark = pytest.mark.smoke

LOCAL = [["127.0.0.1:5000"], ["127.0.0.1:5001"]]


@pytest.mark.parametrize(
    ("hosts", "rank", "here"),
    [
        (LOCAL, "1", 2),
        ([["10.0.0.1:5000"], ["10.0.0.2:5000"]], "0", 1),
        ([["10.0.0.1:1", "10.1.0.1:1"], ["10.0.0.2:1"], ["10.1.0.1:2"], ["[::1]:2"]], "2", 2),
        ([["[::1]:1"], ["[::1]:2"], ["[::1]:3"]], "0", 3),
        (LOCAL, "2", 1),
        (LOCAL, "first", 1),
        ({"hosts": 2}, "0", 1),
        ([1, 2], "0", 1),
        ("[[", "0", 1),
        (None, "0", 1),
    ],
)
def test_ranks_here(
    hosts: Any, rank: str, here: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as the file of hosts tells; one that tells nothing changes nothing."""
    alone = machine_memory()
    path = tmp_path / "hosts.json"
    if hosts is not None:
        path.write_text(hosts if isinstance(hosts, str) else json.dumps(hosts))
    monkeypatch.setenv("MLX_HOSTFILE", str(path))
    monkeypatch.setenv("MLX_RANK", rank)
    assert ranks_here() == here
    assert machine_memory() == alone // here
    assert default_budget() == max(machine_memory(), 1 << 30)


def test_a_rank_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one process has room for, one of two on its machine may not have."""
    weights = default_budget() * 3 // 4
    check_weights(weights, None)
    (tmp_path / "hosts.json").write_text(json.dumps(LOCAL))
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts.json"))
    monkeypatch.setenv("MLX_RANK", "0")
    with pytest.raises(MemoryBudgetError, match="The weights take"):
        check_weights(weights, None)
