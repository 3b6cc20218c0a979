"""Engines over ranks answer as one process does: every drafter and policy, ragged rows, joins, cancels, grammars and prefix hits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine import rank_processes, ranks_side

SECONDS = 500


def test_random_requests_over_two_ranks(tmp_path: Path) -> None:
    """A few; the others are slow."""
    assert _random_requests(2, tmp_path, first=23, num=3)["requests"] >= 3


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_more_random_requests(num_ranks: int, tmp_path: Path) -> None:
    counts = _random_requests(num_ranks, tmp_path, first=0, num=60 if num_ranks == 2 else 24)
    assert counts["accepted"] > 0
    assert counts["cached"] > 0


def _random_requests(num_ranks: int, folder: Path, *, first: int, num: int) -> dict[str, Any]:
    out = folder / "found.json"
    command = ["-m", "tests.engine.rank_requests", str(out), "--first", str(first), "--requests", str(num)]
    if num_ranks > 2:  # a quarter of a tiny expert is less than a group of quantized weights
        command += ["--forms", "float32"]
    ended = rank_processes.run([command] * num_ranks, folder, SECONDS)
    assert [e.code for e in ended] == [0] * num_ranks, "\n".join(e.err for e in ended)
    found = json.loads(out.read_text())
    assert found["failures"] == []
    counts: dict[str, Any] = found["counts"]
    return counts


@pytest.mark.slow
def test_demo_over_two_ranks(tmp_path: Path) -> None:
    """Greedy and seeded, plain and with each kind of drafter, both policies: the tokens of plain decoding in one process. The demo's three
    heads are divided unevenly."""
    ended = rank_processes.run([["-m", "tests.engine.ranks_side", str(tmp_path)]] * 2, tmp_path, SECONDS)
    assert [e.code for e in ended] == [0, 0], "\n".join(e.err for e in ended)
    plain = ranks_side.cases(ranks_side.engine())[f"fixed {ranks_side.PLAIN}"]
    found = json.loads((tmp_path / "0.json").read_text())
    assert len(found) == 2 * len(ranks_side.DRAFTERS)
    for names, tokens in found.items():
        assert tokens == plain, names


@pytest.mark.slow
def test_generate_over_two_ranks(tmp_path: Path) -> None:
    """The command prints what it prints in a process alone, once; the other rank prints nothing."""
    command = ["-m", "mlxspec", "generate", "def add(a, b):", "--max-tokens", "24"]
    ended = rank_processes.run([command] * 2, tmp_path, SECONDS)
    (tmp_path / "none").write_text("\n")  # what mlx.launch -n 1 writes
    alone = rank_processes.run([command], tmp_path, SECONDS, {"MLX_HOSTFILE": str(tmp_path / "none")})
    assert [e.code for e in (*ended, *alone)] == [0, 0, 0], [e.err for e in (*ended, *alone)]
    assert ended[0].out == alone[0].out
    assert (ended[1].out, ended[1].err) == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        ([["x"], ["x", "--draft-max", "3"]], "Rank 1 has another plan than rank 0: options is"),
        ([["x"], ["x", "--draft", "off"]], "Rank 1 has another"),
        ([[], []], "Among ranks a prompt is given on the command line"),
        ([["x", "--model", "nowhere/"], ["x"]], "nowhere"),
        ([["x"], ["x", "--model", "nowhere/"]], "nowhere"),
    ],
)
def test_ranks_that_cannot_begin(own: list[list[str]], sentence: str, tmp_path: Path) -> None:
    """Both end, with one sentence between them or the same one."""
    ended = rank_processes.run([["-m", "mlxspec", "generate", *o] for o in own], tmp_path, SECONDS)
    assert [e.code for e in ended] == [2, 2], [e.err for e in ended]
    said = [e.err.strip() for e in ended if e.err.strip()]
    assert said
    for each in said:
        assert sentence in each
        assert each.startswith("mlxspec: error: ")
        assert "\n" not in each
