"""The comparison of `auto` with `off`: its prompts, what it prints, and that it gives no ratio for texts that differ."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import bench_policy
import policy_host
import pytest
from bench_policy import Cell, report

from mlxspec.demo import WORKLOADS, workload

SOME = [
    Cell(kind="code", prompt=0, temperature=0.0, tokens=96, accepted=2.0, ratios=[1.5, 1.7, 0.9]),
    Cell(kind="list", prompt=1, temperature=0.0, tokens=96, accepted=0.1, ratios=[0.97, 0.98, 0.99]),
]


def test_prompts_are_as_many_of_each_kind_and_none_is_shipped() -> None:
    prompts = json.loads(bench_policy.PROMPTS.read_text(encoding="utf-8"))
    assert set(Counter(p["kind"] for p in prompts["demo"]).values()) == {6}
    assert set(Counter(p["kind"] for p in prompts["text"]).values()) == {4}
    assert (len(prompts["demo"]), len(prompts["text"])) == (30, 24)
    texts = [p["text"] for kind in prompts.values() for p in kind]
    assert len(set(texts)) == len(texts)
    shipped = "\n".join(workload(name).read_text(encoding="utf-8") for name in WORKLOADS)
    assert not [t for t in texts if json.dumps(t)[1:-1] in shipped]


def test_a_report_has_the_median_the_worst_prompt_and_where_drafting_does_not_pay() -> None:
    said = report(SOME)
    assert "| code 0 | 0 | 0 | 2.00 | 1.500 | 0.900 |" in said
    assert "median 1.240\nworst prompt 0.980 (list 1)" in said
    assert "equal texts: 2 of 2" in said
    assert "1 prompts with fewer than 0.25 accepted tokens a round: median 0.980, worst 0.980" in said


def test_texts_that_differ_have_no_ratio() -> None:
    other = Cell(kind="code", prompt=2, temperature=0.0, tokens=96, ratios=[9.0], same=False)
    said = report([*SOME, other])
    assert "| code 2 | 0 | 0 | 0.00 | text differs | - |" in said
    assert "equal texts: 2 of 3" in said
    assert "9.0" not in said
    assert "median 1.240" in said


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    arguments = [
        "--limit",
        "2",
        "--pairs",
        "1",
        "--tokens",
        "8",
        "--temperatures",
        "0,0.8",
        "--json",
        str(file),
    ]
    assert bench_policy.main(arguments) == 0
    assert capsys.readouterr().out.startswith("first answers of the process: auto ")
    found = json.loads(file.read_text())
    assert [(c["temperature"], c["prompt"]) for c in found["cells"]] == [
        (0.0, 0),
        (0.0, 1),
        (0.8, 0),
        (0.8, 1),
    ]
    assert all(len(c["ratios"]) == 1 and c["same"] for c in found["cells"])


def test_choosing_a_drafted_token_is_timed_beside_a_plain_step() -> None:
    found = policy_host.shares_of_a_step(1)
    assert list(found) == [*policy_host.SAMPLING]
    assert all(share > 0.0 for share in found.values())
