"""`mlxspec generate --prompts`: results as JSON lines, and a run that was ended goes on where it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_runs import Run, refused

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("--max-tokens", "2")


def results(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_results_are_those_of_single_prompts(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("hello\n\nwho are you\n")
    ran = run("generate", "--model", model, "--prompts", tmp_path / "p.txt", *SHORT)
    assert ran.code == 0, ran.err
    found = sorted((json.loads(line) for line in ran.out.splitlines()), key=lambda r: r["line"])
    assert [(r["line"], r["prompt"], r["finish_reason"]) for r in found] == [
        (1, "hello", "length"),
        (2, "who are you", "length"),
    ]
    for r in found:
        assert r["text"] + "\n" == run("generate", r["prompt"], "--model", model, *SHORT).out


def test_a_run_goes_on(run: Run, model: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": f"number {i}"} for i in range(4)] + [{"messages": [{"role": "user", "content": "x"}]}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ("generate", "--model", model, "--prompts", prompts, "--output", out, *SHORT)
    assert run(*given).code == 0
    whole = out.read_text().splitlines(keepends=True)
    assert len(whole) == 5
    out.write_text("".join(whole[:3]) + whole[3][:20])  # as a kill leaves it
    ran = run(*given)
    assert (ran.code, ran.out) == (0, "")
    assert "3 of 5 prompts have their result already" in ran.err
    assert out.read_text().splitlines(keepends=True)[:3] == whole[:3]
    assert sorted(r["line"] for r in results(out)) == [1, 2, 3, 4, 5]  # type: ignore[type-var]
    assert {(r["line"], r["text"]) for r in results(out)} == {
        (r["line"], r["text"]) for r in map(json.loads, whole)
    }


def test_a_prompt_that_cannot_be_answered_ends_nothing(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a " * 5000 + "\nhello\n")
    ran = run("generate", "--model", model, "--prompts", tmp_path / "p.txt", *SHORT)
    first, second = sorted((json.loads(line) for line in ran.out.splitlines()), key=lambda r: r["line"])
    assert "context length" in first["error"]
    assert "error" not in second
    assert ran.code == 1
    assert "1 of 2 results are errors" in ran.err


def test_what_is_wrong_is_said_and_changes_nothing(run: Run, model: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.txt", tmp_path / "out"
    prompts.write_text("hello\n")
    given = ("generate", "--model", model, "--prompts", prompts)
    refused(run("generate", "x", "--output", out), "--output", "--prompts")
    refused(run(*given, "-p", "x"), "--prompts")
    refused(run(*given, "--output", tmp_path), "--output", "directory")
    refused(run(*given, "--output", tmp_path / "no" / "out"), "--output", "No such file")
    for text, word in (
        ('{"line": 1, "prompt": "other", "text": ""}\n', "'other'"),
        ("notes\n", "no result"),
        ('{"line": 7, "prompt": "hello"}\n', "prompt 7"),
    ):
        out.write_text(text)
        refused(run(*given, "--output", out), "--output", word)
        assert out.read_text() == text
    out.write_bytes(b"\xff\n")
    refused(run(*given, "--output", out), "no file of results")


@pytest.mark.slow
def test_two_thousand_lines_killed_twice(model: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"line {i}"}) + "\n" for i in range(2000)))
    given = ("--model", str(model), "--prompts", str(prompts), "--output", str(out), "--draft", "off", *SHORT)
    command = [sys.executable, "-m", "mlxspec", "generate", *given]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}

    def num_lines() -> int:
        return out.read_bytes().count(b"\n") if out.exists() else 0

    for least in (300, 900):
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
            until = time.monotonic() + 300
            while num_lines() < least and process.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        assert least <= num_lines() < 2000
    done = subprocess.run(command, env=environment, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    assert sorted(r["line"] for r in results(out)) == list(range(1, 2001))  # type: ignore[type-var]
    assert all(r["prompt"] == f"line {r['line'] - 1}" for r in results(out))  # type: ignore[operator]
