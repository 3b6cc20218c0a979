"""The Gemma member on the command line: what takes a model takes `demo-gemma`, and its draft model comes with it."""

from __future__ import annotations

import json

import pytest
from cli_runs import Run

from mlxspec import demo
from mlxspec.bench import demo_prompts, demo_runs

pytestmark = pytest.mark.skipif(
    not (demo.GEMMA / "config.json").is_file(), reason="the Gemma member is not in this checkout"
)


def test_generate(run: Run) -> None:
    words = ("generate", "--model", "demo-gemma", "-p", "what does len do?", "--max-tokens", "24")
    drafted, plain = run(*words, "--draft", "auto"), run(*words, "--draft", "off")
    assert (drafted.code, plain.code) == (0, 0), drafted.err + plain.err
    assert drafted.out == plain.out
    assert drafted.out.strip()


def test_demo(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_runs, "_MOST_TURNS", 1)
    monkeypatch.setattr(demo_prompts, "PROMPTS", (demo_prompts.PROMPTS[0],))
    ran = run("demo", "--model", "demo-gemma", "--max-tokens", "8", "--repeat", "1")
    assert ran.code == 0, ran.err
    assert "Same text in 1 of 1." in ran.out
    assert "tiny" in ran.out


def test_bench(run: Run) -> None:
    ran = run(
        "bench",
        "--model",
        "demo-gemma",
        "--workloads",
        "ask",
        "--items",
        "2",
        "--max-tokens",
        "6",
        "--repeat",
        "1",
        "--json",
    )
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["model"] == "demo-gemma"


def test_inspect(run: Run) -> None:
    ran = run("inspect", "demo-gemma", "--json")
    assert ran.code == 0, ran.err
    assert "gemma3" in ran.out.lower()
