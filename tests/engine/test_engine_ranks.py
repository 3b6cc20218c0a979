"""Engines over ranks answer as one process does: every drafter and policy, ragged rows, joins, cancels, grammars and prefix hits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from planting import catches

from mlxspec.engine import ranks
from mlxspec.engine.ranks import RanksEnd
from mlxspec.errors import RankError
from tests.engine import rank_processes, ranks_side

SECONDS = 500


class OnlyRank:
    """A group of MLX's, as far as a rank asks it without a message."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2


@catches(
    "an order to end is taken for a failure",
    "mlxspec.engine.ranks:Ranks.fail",
    lambda right: lambda self, error: right(self, ValueError(str(error))),
)
def test_an_order_to_end_is_no_failure() -> None:
    told: list[RankError] = []
    found = ranks.Ranks(OnlyRank())  # type: ignore[arg-type]
    found.on_fault = told.append
    with suppress(RankError):
        found.fail(RanksEnd())
    assert (told, found.has_ended) == ([], False)
    with pytest.raises(RankError, match=r"Rank 1 cannot go on: broken\."):
        found.fail(ValueError("broken"))
    assert len(told) == 1
    assert found.has_ended


def test_random_requests_over_two_ranks(tmp_path: Path) -> None:
    """A few; the others are slow."""
    assert _random_requests(2, tmp_path, first=23, num=3)["requests"] >= 3


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_more_random_requests(num_ranks: int, tmp_path: Path) -> None:
    counts = _random_requests(num_ranks, tmp_path, first=0, num=160 if num_ranks == 2 else 24)
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
    heads are filled up to four."""
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
        ([["x"], ["x", "--draft-max", "3"]], "Rank 1 has another set of options than rank 0"),
        ([["x"], ["x", "--draft", "ngram-simple"]], "Rank 1 has another set of options"),
        ([["x"], ["x", "--model", "demo-gemma"]], "Rank 1 has another file"),
        ([[], []], "Among ranks a prompt is given on the command line"),
    ],
)
def test_ranks_that_cannot_begin(own: list[list[str]], sentence: str, tmp_path: Path) -> None:
    """Both end, each with a sentence."""
    ended = rank_processes.run([["-m", "mlxspec", "generate", *o] for o in own], tmp_path, SECONDS)
    assert [e.code for e in ended] == [2, 2], [e.err for e in ended]
    said = [[line for line in each.err.splitlines() if line.startswith("mlxspec: error: ")] for each in ended]
    assert [len(sentences) for sentences in said] == [1, 1]
    assert sentence in said[0][0]


@pytest.mark.slow
def test_mlx_launch_runs_the_ranks() -> None:
    (port,) = rank_processes.free_ports(1)
    launch = [
        str(Path(sys.executable).with_name("mlx.launch")),
        "-n",
        "2",
        "--backend",
        "ring",
        "-p",
        str(port),
        "--",
    ]
    process = subprocess.Popen(
        [*launch, sys.executable, "-m", "mlxspec", "generate", "def add(a, b):", "--max-tokens", "12"],
        cwd=rank_processes.ROOT,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,  # mlx.launch looks again and again for an input that has ended
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for line in process.stdout or ():
            if "With a single iterable" in line:
                break
        else:
            pytest.fail("mlx.launch ended without an answer")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_others(rank: int, tmp_path: Path) -> None:
    """One answers, the other is killed by its number: MLX's sums fail, and the one that is left says so."""
    command = ["-m", "mlxspec", "generate", "def add(a, b):", "--max-tokens", "1500", "--min-tokens", "1500"]
    processes = rank_processes.start([command] * 2, tmp_path)
    try:
        assert processes[0].stdout is not None
        assert processes[0].stdout.read(1)  # the answer has begun
        processes[rank].kill()
        _, said = processes[1 - rank].communicate(timeout=60)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert processes[1 - rank].returncode == 2, said
    sentences = [line for line in said.splitlines() if line.startswith("mlxspec: error: ")]
    assert sentences == [
        f"mlxspec: error: Rank {1 - rank} cannot go on: [ring] connection to a peer was lost."
    ]


@pytest.mark.slow
def test_a_rank_that_starts_late_is_waited_for(tmp_path: Path) -> None:
    command = ["-m", "mlxspec", "generate", "def add(a, b):", "--max-tokens", "8"]
    late = ["-c", "import sys, time; time.sleep(12); from mlxspec.__main__ import main; sys.exit(main())"]
    ended = rank_processes.run([command, [*late, *command[2:]]], tmp_path, SECONDS)
    assert [e.code for e in ended] == [0, 0], [e.err for e in ended]
    assert ended[0].out
