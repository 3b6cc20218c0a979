"""Every test is in one shard, and shards take about equally long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import shards
from hypothesis import given
from hypothesis import strategies as st
from planting import catches

ROOT = Path(__file__).resolve().parent.parent


@catches(
    "the last part is lost",
    "shards:parts",
    lambda right: lambda files, num, seconds: right(files, num + 1, seconds),
    errors=(IndexError,),
)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.none() | st.floats(0, 900)), min_size=1, max_size=20),
    st.integers(1, 9),
)
def test_parts_are_stretches_of_equal_seconds(given_: list[tuple[int, float | None]], num: int) -> None:
    files = [f"test_{i}.py" for i, (tests, _) in enumerate(given_) for _ in range(tests)]
    seconds = {f"test_{i}.py": s for i, (_, s) in enumerate(given_) if s is not None}
    of = shards.parts(files, num, seconds)
    assert of == sorted(of)
    assert set(of) <= set(range(num))
    tests = Counter(files)
    weight = {f: max(seconds.get(f, shards.NEW * n) / n, 1e-3) for f, n in tests.items()}
    total, dearest = sum(weight[f] for f in files), max(weight.values())
    taken = [0.0] * num
    for file, part in zip(files, of, strict=True):
        taken[part] += weight[file]
    assert max(taken) <= total / num + dearest + 1e-6


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    command = [sys.executable, "-m", "pytest", "-p", "shards", "-c", str(ROOT / "pyproject.toml"), *options]
    command += ["--rootdir", str(folder), "-p", "no:cacheprovider", "-rA", str(folder)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def test_shards_run_every_test_once_with_workers_too(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"test_{name}.py").write_text(
            "import pytest\n@pytest.mark.parametrize('i', range(5))\ndef test_it(i): pass\n"
        )
    found: Counter[str] = Counter()
    for number in (1, 2, 3):
        workers = ("-n", "2") if number == 2 else ()
        done = run(tmp_path, "--shard", f"{number}/3", "--time-into", str(tmp_path / "times.json"), *workers)
        assert done.returncode == 0, done.stdout + done.stderr
        found.update(line.split()[-1] for line in done.stdout.splitlines() if line.startswith("PASSED"))
    assert len(found) == 10
    assert set(found.values()) == {1}
    assert len(json.loads((tmp_path / "times.json").read_text())) == 2


@pytest.mark.parametrize("wrong", ["3", "0/2", "3/2", "1/0", "a/b", "-1/2"])
def test_what_is_no_shard_is_refused(wrong: str, tmp_path: Path) -> None:
    done = run(tmp_path, f"--shard={wrong}")
    assert done.returncode == 4
    assert "--shard takes a number and how many there are" in done.stderr


def test_timed_files_are_there() -> None:
    known = json.loads(shards.SECONDS.read_text())
    assert [f for f in known if not (ROOT / f).is_file()] == []
    assert all(seconds >= 0 for seconds in known.values())
