"""`bench mtp`: the ten tasks, and llama.cpp's columns."""

from __future__ import annotations

import json

import pytest

from mlxspec.bench import mtp
from mlxspec.bench.tasks import TASKS
from mlxspec.cli.bench_mtp import line
from mlxspec.cli.main import main

NAMES = [
    "code_python", "code_cpp", "explain_concept", "summarize", "qa_factual", "translation", "creative_short",
    "stepwise_math", "high_entropy", "long_code_review",
]  # fmt: skip


def test_the_tasks_are_the_ten() -> None:
    assert [t.name for t in TASKS] == NAMES
    assert len(TASKS[-1].prompt) > 1500


def test_in_process_on_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "mtp", "--max-tokens", "8", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [t["task"] for t in data["tasks"]] == NAMES
    assert all(0 < t["predicted"] <= 8 for t in data["tasks"])
    assert data["aggregate"]["total_draft"] > 0


def test_a_row_is_one_line_of_the_benchmark() -> None:
    row = mtp.Row(task="code_python", predicted=192, drafted=153, accepted=140, speed=103.21)
    assert line(row) == "  code_python        pred= 192 draft= 153 acc= 140 rate=0.915 tok/s=103.2"
