"""`bench`: recorded prompts and the ten tasks, with drafting and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mlxspec
from mlxspec.bench import plots
from mlxspec.bench.answer_rounds import time_rounds
from mlxspec.bench.tasks import TASKS
from mlxspec.bench.turns import Contestant, Score, TimedTurn, compare
from mlxspec.bench.workloads import read_workloads
from mlxspec.cli.bench import line
from mlxspec.cli.main import main
from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.engine.engine import Engine
from mlxspec.engine.stats import DrafterStats

NAMES = [
    "code_python", "code_cpp", "explain_concept", "summarize", "qa_factual", "translation", "creative_short",
    "stepwise_math", "high_entropy", "long_code_review",
]  # fmt: skip


@pytest.fixture(scope="module")
def demo() -> Engine:
    return mlxspec.load("demo")


def test_the_tasks_are_the_ten() -> None:
    assert [t.name for t in TASKS] == NAMES
    assert len(TASKS[-1].prompt) > 1500


@pytest.mark.slow
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
    assert [w["name"] for w in told] == ["ask", *NAMES]
    assert all(w["num_answers"] == 1 and w["num_different"] == 0 and w["ratio"]["most"] > 0 for w in told)
    assert all(num_drafted > 0 for w in told for num_drafted, _ in [w["drafted"]["mtp"]])
    assert data["spec"]["policy"] == "fixed"


def test_each_row_of_a_group_has_a_seed_of_its_own(demo: Engine) -> None:
    """The same one with drafting and without, in every turn."""
    group, params = [list(range(5, 20))] * 2, SamplingParams(max_tokens=4, temperature=1.0, seed=7)
    drafted = Contestant(name="mtp", spec=SpecConfig(drafters=("mtp",), policy="fixed"))
    plain, (score,) = compare(demo, [group], [drafted], params, repeat=1)
    for each in (plain, score):
        assert [a.stats.seed for a in each.newest] == [7, 8]


def test_a_workload_is_one_line() -> None:
    score = Score(
        name="long_code_review", drafters=("mtp",), num_rounds=4, num_drafted_rounds=4, num_decoded=10
    )
    score.turns = [
        TimedTurn(num_decoded=10, seconds=s, num_plain=10, plain_seconds=0.25) for s in (0.1, 0.12, 0.125)
    ]
    score.works = {"mtp": DrafterStats(num_drafted=153, num_accepted=140), "suffix": DrafterStats()}
    assert line(score) == (
        "long_code_review 2.08x (2.00x to 2.50x)  40 -> 83 tok/s, 2.50 tokens a round, mtp 140/153"
    )
    score.num_different = 2
    assert "2 texts differ" in line(score)


def test_the_rounds_of_an_answer_add_up(demo: Engine) -> None:
    prompt = demo.chat_prompt([{"role": "user", "content": "what does os.path.join do?"}])
    spec = SpecConfig(drafters=("mtp",), policy="fixed")
    rounds = time_rounds(demo, prompt, spec, 24)
    result = demo.generate(prompt, SamplingParams(max_tokens=24), spec=spec)
    assert sum(r.num_drafted for r in rounds) == result.stats.num_drafted > 0
    assert sum(r.num_accepted for r in rounds) == result.stats.num_accepted > 0
    assert all(0 <= r.num_accepted <= r.num_drafted and r.seconds > 0 for r in rounds)
    assert not any(r.num_drafted for r in time_rounds(demo, prompt, SpecConfig(), 8))


@pytest.mark.parametrize("has_answers", [True, False])
def test_a_figure_of_a_bench_is_drawn(demo: Engine, tmp_path: Path, has_answers: bool) -> None:
    pytest.importorskip("matplotlib")
    (ask,) = read_workloads(demo, ["ask"])
    spec = SpecConfig(drafters=("mtp",), policy="fixed")
    mtp = Contestant(name="ask", spec=spec)
    _, (score,) = compare(demo, [ask.prompts[:1]], [mtp], SamplingParams(max_tokens=8), repeat=1)
    assert score.works["mtp"].by_position[0][0] > 0
    path = tmp_path / "bench.svg"
    plots.draw_bench(
        path, "a model", [score] * has_answers, time_rounds(demo, ask.prompts[0], spec, 8) * has_answers
    )
    told = path.read_text()
    assert all(
        f"<!-- {words} -->" in told
        for words in ("Speed by kind of prompt", "Acceptance by position", "One answer, round by round")
    )
