"""The fast tier is a slice of each file that fits its seconds; what was skipped is counted by reason."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import fast_tier
import pytest
from fast_tier import ALLOWANCE, UNTIMED, Case, chosen
from hypothesis import given
from hypothesis import strategies as st
from planting import catches

ROOT = Path(__file__).resolve().parent.parent
CASES = st.lists(
    st.builds(Case, st.sampled_from("ab"), st.sampled_from("fgh"), st.integers(0, 40).map(str)),
    unique=True,
    max_size=60,
)
SECONDS = st.dictionaries(
    st.sampled_from("ab"), st.dictionaries(st.sampled_from("fgh"), st.floats(UNTIMED, 2 * ALLOWANCE))
)


@catches("seconds are not counted", "fast_tier:chosen", lambda right: lambda cases, seconds: right(cases, {}))
@given(CASES, SECONDS)
def test_each_file_has_its_seconds_and_each_function_its_turn(
    cases: list[Case], seconds: dict[str, dict[str, float]]
) -> None:
    found = chosen(cases, seconds)
    assert found == chosen(cases[::-1], seconds)
    assert found <= set(cases)
    for file in {case.file for case in cases}:
        here, known = [case for case in found if case.file == file], seconds.get(file, {})
        taken = sum(known.get(case.function, UNTIMED) for case in here)
        assert len(here) == 1 or 0 < taken <= ALLOWANCE
        turns, whole = (
            Counter(case.function for case in here),
            Counter(c.function for c in cases if c.file == file),
        )
        cost = {name: (known.get(name, UNTIMED), name) for name in whole}
        for cheap in whole:
            for dear in whole:
                if cost[cheap] < cost[dear]:  # the dearer one's turn comes later
                    assert turns[cheap] >= min(turns[dear], whole[cheap])


@given(CASES, st.sampled_from("fgh"))
def test_a_new_case_moves_at_most_one_other(cases: list[Case], function: str) -> None:
    before, new = chosen(cases, {}), Case("a", function, "new")
    assert len(before - chosen([*cases, new], {})) <= 1


def test_the_option_runs_a_slice_and_a_report_times_it(tmp_path: Path) -> None:
    text = "import pytest\n@pytest.mark.parametrize('i', range(200))\ndef test_it(i): pass\n@pytest.mark.slow\ndef test_slow(): pass\n"
    text += "def test_a_skip(): pytest.skip('needs a moon')\n@pytest.mark.skip(reason='needs a moon')\ndef test_b_skip(): pass\n"
    (tmp_path / "test_a.py").write_text(text)
    report = tmp_path / "times.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "fast_tier",
        "-p",
        "skipped",
        "-c",
        str(ROOT / "pyproject.toml"),
        "-p",
        "no:cacheprovider",
    ]
    command += ["--rootdir", str(tmp_path), f"--junitxml={report}", "--fast", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    num = int(ALLOWANCE / UNTIMED + 1e-6) - 2
    assert f"{num} passed, 2 skipped, {201 - num} deselected" in done.stdout, done.stdout + done.stderr
    assert "2 skipped: needs a moon" in done.stdout


def test_reports_are_read_by_file_and_function(tmp_path: Path) -> None:
    tests = [("tests.test_fast_tier", "test_a[1]", 1.0), ("tests.test_fast_tier", "test_a[2]", 2.0)]
    tests += [
        ("tests.test_fast_tier.TestB", "test_c", 4.0),
        ("tests.test_fast_tier", "test_d", 0.01),
        ("gone", "test_e", 9.0),
    ]
    lines = [f'<testcase classname="{c}" name="{n}" time="{s}" />' for c, n, s in tests]
    (tmp_path / "times.xml").write_text(f"<testsuites>{''.join(lines)}</testsuites>")
    assert fast_tier.timed(tmp_path / "times.xml") == {
        "tests/test_fast_tier.py": {"test_a": 1.5, "TestB::test_c": 4.0}
    }


def test_what_is_timed_is_there_and_fits_nine_minutes(request: pytest.FixtureRequest) -> None:
    """By the kept times; on two cores, with a minute for what comes before the tests."""
    known = json.loads(fast_tier.SECONDS.read_text())
    assert [file for file in known if not (ROOT / file).is_file()] == []
    taken: dict[str, float] = defaultdict(float)
    for case in {fast_tier.case_of(item.nodeid) for item in request.session.items}:
        taken[case.file] += known.get(case.file, {}).get(case.function, UNTIMED)
    if request.config.getoption("--fast"):
        assert sum(taken.values()) < 2 * 8 * 60
