"""Shards: `pytest --shard 2/6` runs the second of six parts of the tests, which take about equally long.

A part is a stretch of the collected order, cut by the seconds that each file took when it was timed last (seconds.json). The tests of a
file count alike; one of a file that has not been timed counts NEW. So parts are the same on every machine and in every worker, and each
test is in one of them. `--time-into PATH` adds what files take to PATH: remove it, then run all shards.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

SECONDS = Path(__file__).with_name("seconds.json")
NEW = 1.0  # seconds


def parts(files: Sequence[str], num: int, seconds: dict[str, float]) -> list[int]:
    """For each test of these files, in the collected order, in which part it is, from 0 on. seconds: by file."""
    tests = Counter(files)
    weights = [max(seconds.get(f, NEW * tests[f]) / tests[f], 1e-3) for f in files]
    total, done, found = sum(weights), 0.0, []
    for weight in weights:
        found.append(min(int(num * (done + weight / 2) / total), num - 1))
        done += weight
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/N", help="run the I-th of N parts of the tests")
    parser.addoption(
        "--time-into", type=Path, metavar="PATH", help="add each file's seconds to those in PATH"
    )


def pytest_configure(config: pytest.Config) -> None:
    wanted, path = config.getoption("--shard"), config.getoption("--time-into")
    if wanted is not None:
        number, _, num = wanted.partition("/")
        if not (number.isdecimal() and num.isdecimal() and 1 <= int(number) <= int(num)):
            raise pytest.UsageError(f"--shard takes a number and how many there are, as 2/6, not {wanted!r}.")
        config.pluginmanager.register(Shard(int(number) - 1, int(num)), "shard")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Timing(path), "timing")


class Shard:
    """What --shard does."""

    def __init__(self, number: int, num: int) -> None:
        self._number, self._num = number, num

    @pytest.hookimpl(trylast=True)  # once tests are sorted, and others are deselected
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        files = [item.nodeid.partition("::")[0] for item in items]
        of = parts(files, self._num, json.loads(SECONDS.read_text(encoding="utf-8")))
        others = [item for item, part in zip(items, of, strict=True) if part != self._number]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item, part in zip(items, of, strict=True) if part == self._number]


class Timing:
    """What --time-into does."""

    def __init__(self, path: Path) -> None:
        self._path, self._seconds = path, Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        for file, seconds in self._seconds.items():
            known[file] = round(known.get(file, 0.0) + seconds, 1)
        self._path.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n", encoding="utf-8")
