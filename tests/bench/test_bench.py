"""`bench`: recorded prompts and the ten tasks, with drafting and without."""

from __future__ import annotations

import json

import pytest

from mlxspec.bench.bench import WorkloadOutcome
from mlxspec.bench.tasks import TASKS
from mlxspec.cli.bench import line
from mlxspec.cli.main import main

NAMES = [
    "code_python", "code_cpp", "explain_concept", "summarize", "qa_factual", "translation", "creative_short",
    "stepwise_math", "high_entropy", "long_code_review",
]  # fmt: skip


def test_the_tasks_are_the_ten() -> None:
    assert [t.name for t in TASKS] == NAMES
    assert len(TASKS[-1].prompt) > 1500


def test_the_ten_tasks_behind_recorded_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "--workloads",
        "ask,mtp",
        "--items",
        "1",
        "--repeat",
        "1",
        "--max-tokens",
        "8",
        "--policy",
        "fixed",
    ]
    assert main(["bench", *given, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    told = data["workloads"]
    assert [w["workload"] for w in told] == ["ask", *NAMES]
    assert all(w["num_prompts"] == 1 and w["num_different"] == 0 and w["speedup"] > 0 for w in told)
    assert all(num_drafted > 0 for w in told for num_drafted, _ in [w["drafted"]["mtp"]])
    assert data["spec"]["policy"] == "fixed"


def test_a_workload_is_one_line() -> None:
    same = {
        "workload": "long_code_review", "num_prompts": 1, "num_rows": 1, "pairs": (1.2, 2.5, 1.9), "plain_speed": 40.0,
        "decode_speed": 76.2, "tokens_per_round": 2.5, "drafted": {"mtp": (153, 140), "suffix": (0, 0)},
    }  # fmt: skip
    assert line(WorkloadOutcome(num_different=0, **same)) == (
        "long_code_review 1.90x plain (1.20x to 2.50x)  40 -> 76 tok/s, 2.50 tokens a round, mtp 140/153"
    )
    assert "2 texts differ" in line(WorkloadOutcome(num_different=2, **same))
