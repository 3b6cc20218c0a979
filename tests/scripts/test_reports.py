"""Reports that people send: what `try` and `versus` print is one, a broken one is named, and a planted contradiction is found."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import reports
from planting import catches

from mlxspec.bench import own, versus
from mlxspec.bench.rival import Rival, TimedAnswer, TimedPiece
from mlxspec.bench.turns import Score, TimedTurn
from mlxspec.config import SamplingParams


class Loaded:
    """An engine, as far as a report tells of it."""

    name = "mlx-community/Qwen3.6-27B-4bit"

    class spec:
        drafters = ("suffix", "mtp")


def tried(chip: str = "Apple M3 Max (metal)", plain: float = 22.0, drafted: float = 50.0) -> dict[str, Any]:
    """Return what `mlxspec try --json` prints of these speeds."""
    score = Score(name="auto", drafters=("mtp",), num_rounds=9, num_drafted_rounds=9)
    score.turns = [
        TimedTurn(num_decoded=100, seconds=100 / drafted, num_plain=100, plain_seconds=100 / plain)
    ] * 3
    kind = own.Kind(name="code", texts=("x",), params=SamplingParams())
    return own.as_data(Loaded(), chip, [kind], [score])  # type: ignore[arg-type]


def compared() -> dict[str, Any]:
    """Return what `mlxspec versus --json` prints."""
    answer = TimedAnswer(pieces=(TimedPiece(0.1, "a "), TimedPiece(0.2, "b "), TimedPiece(0.3, "c ")))
    contest = versus.Contest(name="chat", count=lambda text: len(text.split()))
    for _ in range(3):
        contest.add(versus.BothAnswers(answer, answer), is_measured=True)
    sides = [Rival(url="http://127.0.0.1:1", model=name) for name in ("other", "ours")]
    return versus.as_data(sides[0], sides[1], [contest], [None, 1 << 30], "Apple M4 Pro (metal)")


def folder_of(tmp_path: Path, *found: Any) -> Path:
    folder = tmp_path / "reports"
    folder.mkdir()
    shutil.copy(reports.FOLDER / "README.md", folder)
    for number, each in enumerate(found):
        (folder / f"{number}.json").write_text(each if isinstance(each, str) else json.dumps(each))
    return folder


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    script = Path(reports.__file__)
    return subprocess.run(
        [sys.executable, script, folder, *more], capture_output=True, text=True, check=False
    )


def test_what_commands_print_is_a_report(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, tried(), compared())
    found, faults = reports.read(folder)
    assert faults == []
    assert [(line.model, line.kind, round(line.drafted)) for line in found] == [
        (Loaded.name, "code", 50),
        ("ours", "chat, next to other", 10),
    ]
    assert reports.contradictions(found) == []


def test_the_page_shows_them_and_is_checked(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, tried())
    assert run(folder, "--check").returncode == 1
    assert run(folder).returncode == 0
    page = (folder / "README.md").read_text()
    assert f"| Apple M3 Max (metal) | {Loaded.name} | code | 22 | 50 | 2.27 (2.27 to 2.27) |" in page
    assert "none yet" not in page
    assert run(folder, "--check").returncode == 0


def test_the_page_in_the_repository_is_up_to_date() -> None:
    found, faults = reports.read(reports.FOLDER)
    page = (reports.FOLDER / "README.md").read_text(encoding="utf-8")
    assert faults == reports.contradictions(found) == []
    assert reports.filled(page, found) == page


@catches("speeds may be as far off as they like", "reports:FAR", lambda right: 100.0)
def test_a_contradiction_that_was_planted_is_found() -> None:
    slow, fast = (list(reports.lines(tried(**each)))[0] for each in ({"plain": 9.0}, {"drafted": 400.0}))  # noqa: RUF015
    assert [s.rpartition(": ")[2] for s in reports.contradictions([slow, fast])] == [
        "plain 9 tokens a second, simulated 22.",
        "drafted 400 tokens a second, simulated at most 142.",
    ]


def test_other_chips_and_models_contradict_nothing() -> None:
    other = list(reports.lines(tried(chip="Apple M2 (metal)", plain=1.0)))
    model = list(reports.lines({**tried(plain=1.0), "model": "mlx-community/Qwen3.5-4B-4bit"}))
    assert reports.contradictions([*other, *model]) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "is no report"),
        ({**tried(), "kinds": []}, "is no report"),
        ({k: v for k, v in tried().items() if k != "machine"}, "is no report"),
        ({**compared(), "own": {"model": "", "resident_bytes": -1}}, "is no report"),
    ],
)
def test_a_file_that_is_none_is_named(wrong: Any, said: str, tmp_path: Path) -> None:
    ran = run(folder_of(tmp_path, wrong))
    assert ran.returncode == 1
    assert f"0.json {said}" in ran.stdout
    assert "Traceback" not in ran.stderr
