"""Each guard is shown to fail: tests that name a fault (planting.py) are red while that fault is planted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from planting import unfindable

ROOT = Path(__file__).resolve().parent.parent


def plant(*arguments: str, timeout: int = 3000) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(ROOT / "tests")
    command = [sys.executable, "-m", "pytest", "--plant", "-n", "0", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_a_fault_that_no_test_sees_is_red_and_one_that_is_seen_is_green(tmp_path: Path) -> None:
    path = tmp_path / "test_match.py"
    path.write_text(
        "from planting import catches, rewritten\n"
        "from mlxspec.sampling.acceptance import match\n"
        "ONE_MORE = 'mlxspec.sampling.acceptance:match', lambda right: lambda d, s: right(d, s) + 1\n"
        "@catches('seen', *ONE_MORE)\n"
        "def test_seen(): assert match([1, 2], [1, 3, 4]) == 1\n"
        "@catches('seen in the text', ONE_MORE[0], rewritten('return i\\n', 'return 9\\n'))\n"
        "def test_rewritten(): assert match([1, 2], [1, 3, 4]) == 1\n"
        "@catches('not seen', *ONE_MORE)\n"
        "def test_not_seen(): match([1, 2], [1, 3, 4])\n"
        "@catches('an error of its own', 'mlxspec.sampling.acceptance:match', lambda right: None)\n"
        "def test_error(): match([1, 2], [1, 3, 4])\n"
    )
    done = plant("-p", "planting", "-c", str(ROOT / "pyproject.toml"), "-rA", str(path))
    found = {test: how for how, test in re.findall(r"^(PASSED|FAILED) \S*::(test_\w+)", done.stdout, re.M)}
    assert found == {
        "test_seen": "PASSED",
        "test_rewritten": "PASSED",
        "test_not_seen": "FAILED",
        "test_error": "FAILED",
    }, done.stdout


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        ("'no case', *ONE_MORE, case='[9'", "no case (test_match.py): no case holds '[9'"),
        (
            "'other signature', ONE_MORE[0], lambda right: lambda d: 0",
            "other signature: its stand-in cannot be called",
        ),
        (
            "'other text', ONE_MORE[0], rewritten('of long ago', '')",
            "other text: match holds 'of long ago' 0 times, not once",
        ),
    ],
)
def test_a_fault_that_never_runs_or_cannot_be_called_ends_collection(
    mark: str, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "test_match.py"
    path.write_text(
        "import pytest\nfrom planting import catches, rewritten\nfrom mlxspec.sampling.acceptance import match\n"
        "ONE_MORE = 'mlxspec.sampling.acceptance:match', lambda right: lambda d, s: right(d, s) + 1\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        f"@catches({mark})\n"
        "def test_seen(n): assert match([1, 2], [1, 3, 4]) == 1\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "@catches('one case', *ONE_MORE, case='[2')\n"
        "def test_one(n): assert match([1, 2], [1, 3, 4]) == 1\n"
    )
    done = plant("-p", "planting", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}", str(path))
    assert done.returncode != 0
    assert says in done.stdout + done.stderr
    assert "one case" not in done.stdout + done.stderr


def test_every_fault_has_a_place_a_case_and_a_stand_in_that_fits(pytestconfig: pytest.Config) -> None:
    """Code or tests that were renamed leave no fault behind that plants nothing. A run of chosen cases alone says nothing of the others."""
    known = pytestconfig.pluginmanager.get_plugin("faults")
    assert unfindable(known.pairs) == []


@pytest.mark.slow
def test_every_planted_fault_is_found() -> None:
    """Each fault that is collected is run: none is deselected or skipped."""
    collected = re.search(
        r"(\d+) (?:tests? collected|/\d+ tests collected)", plant("--collect-only", "-q", "tests").stdout
    )
    done = plant("tests")
    passed, skipped = (re.search(rf"(\d+) {how}", done.stdout) for how in ("passed", "skipped"))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert passed is not None
    assert collected is not None
    assert int(passed[1]) + (int(skipped[1]) if skipped else 0) == int(collected[1])
