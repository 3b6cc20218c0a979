"""The fast tier: `pytest --fast` runs, of each file, what fits ALLOWANCE seconds. Tests with the mark `slow` are not in it.

First comes one case of each function, the cheapest function first, then a second case of each, and so on, until the file's seconds are
used up. Which cases of a function come first is decided by a hash of their names: functions with the same parameters run different ones,
and a new case moves no other. Of each file at least one test runs.

fast_tier.json has the seconds of a case by file and function; what is not in it counts UNTIMED. To time all tests anew on a quiet machine:

    pytest -m "not slow" -n 2 --junitxml times.xml; python tests/fast_tier.py times.xml
"""

from __future__ import annotations

import json
import sys
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECONDS = Path(__file__).with_name("fast_tier.json")
ALLOWANCE = 5.61  # seconds of a file
UNTIMED = 0.05  # seconds of a case

Seconds = Mapping[str, Mapping[str, float]]  # of a case, by file and function


class Case(NamedTuple):
    """A test: its file, its function with its class, and its parameters as pytest writes them, "" without any."""

    file: str
    function: str
    parameters: str


def case_of(node: str) -> Case:
    """The test with this node id, as in "tests/test_a.py::TestB::test_c[1-x]"."""
    name, _, parameters = node.partition("[")
    file, _, function = name.partition("::")
    return Case(file, function, parameters)


def chosen(cases: Sequence[Case], seconds: Seconds) -> set[Case]:
    """Those of the fast tier."""
    functions: dict[str, dict[str, list[Case]]] = defaultdict(lambda: defaultdict(list))
    for case in sorted(cases, key=lambda case: (zlib.crc32(repr(case).encode()), case)):
        functions[case.file][case.function].append(case)
    found = set[Case]()
    for file, of in functions.items():
        cost = {name: seconds.get(file, {}).get(name, UNTIMED) for name in of}
        cheapest = sorted(of, key=lambda name: (cost[name], name))
        turns = [(turn, name) for turn in range(max(map(len, of.values()))) for name in cheapest]
        left = ALLOWANCE
        for turn, name in turns:
            left -= cost[name] if turn < len(of[name]) else 0.0
            if left < 0 and (turn, name) != turns[0]:
                break
            found.update(of[name][turn : turn + 1])
    return found


def timed(report: Path) -> dict[str, dict[str, float]]:
    """Seconds of a case by file and function, out of a report that pytest wrote with --junitxml. What takes UNTIMED or less is left out."""
    taken: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for test in ElementTree.parse(report).getroot().iter("testcase"):
        parts = test.attrib["classname"].split(".")
        length = next(
            (n for n in range(len(parts), 0, -1) if ROOT.joinpath(*parts[:n]).with_suffix(".py").is_file()), 0
        )
        if length:
            name = test.attrib["name"].partition("[")[0]
            file = "/".join(parts[:length]) + ".py"
            taken[file]["::".join([*parts[length:], name])].append(float(test.attrib["time"]))
    means = {file: {f: round(sum(t) / len(t), 2) for f, t in of.items()} for file, of in taken.items()}
    return {
        file: kept for file, of in means.items() if (kept := {f: s for f, s in of.items() if s > UNTIMED})
    }


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="run of each file what fits a few seconds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--fast"):
        return
    cases = {item.nodeid: case_of(item.nodeid) for item in items if item.get_closest_marker("slow") is None}
    fast = chosen(list(cases.values()), json.loads(SECONDS.read_text(encoding="utf-8")))
    others = [item for item in items if cases.get(item.nodeid) not in fast]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if cases.get(item.nodeid) in fast]


if __name__ == "__main__":
    SECONDS.write_text(
        json.dumps(timed(Path(sys.argv[1])), indent=0, sort_keys=True) + "\n", encoding="utf-8"
    )
