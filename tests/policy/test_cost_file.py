"""What rounds have taught a process is where the next one begins."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxspec.errors import ConfigError
from mlxspec.policy.cost_file import CostFile, write_followed
from mlxspec.policy.costs import CostModel, DraftCall, DraftCost
from tests.known_costs import known_costs


@pytest.fixture
def file(tmp_path: Path) -> CostFile:
    """Measured in a bad moment: a verify of four at six times what it really takes."""
    found = CostFile(tmp_path / "costs.json", "model")
    found.write(known_costs({1: 1.0, 4: 9.0}, {"mtp": DraftCost(step=0.4)}))
    return found


def loaded(file: CostFile) -> CostModel:
    costs = CostModel()
    costs.learn_from(file.data())
    return costs


def lived(costs: CostModel, num_rounds: int) -> None:
    for _ in range(num_rounds // 2):
        costs.curve(0).refine(1, 1.0)
        costs.curve(0).refine(4, 1.5)
        curve = costs.curve(0)
        costs.drafted(curve, 1, [DraftCall("mtp", "greedy", 1, 1, 1)], curve.plain + 0.1)


def test_processes_put_right_what_was_measured_in_a_bad_moment(file: CostFile) -> None:
    far = 9.0
    for _ in range(4):
        costs = loaded(file)
        file.follow(costs)
        lived(costs, 100)
        write_followed()
        assert loaded(file).curve(0).seconds(4) == pytest.approx(costs.curve(0).seconds(4))
        assert costs.curve(0).seconds(4) < far
        far = costs.curve(0).seconds(4)
    assert far == pytest.approx(1.5, rel=0.1)
    assert loaded(file).draft("mtp", "greedy", 1.0).step == pytest.approx(0.1, rel=0.1)
    assert [p.name for p in file.path.parent.iterdir()] == ["costs.json"]


def test_what_no_round_has_taught_is_not_written(file: CostFile) -> None:
    before = file.path.read_bytes()
    file.follow(CostModel())
    write_followed()
    assert file.path.read_bytes() == before


def test_guesses_are_not_kept(file: CostFile) -> None:
    costs = loaded(file)
    file.follow(costs)
    costs.guesses["draft-model"] = DraftCost(step=0.2)  # it has never drafted
    lived(costs, 100)
    write_followed()
    assert [name for name, _ in loaded(file).drafts] == ["mtp"]


def test_what_was_measured_anew_takes_the_place_of_what_was_followed(file: CostFile) -> None:
    costs, anew = loaded(file), known_costs({1: 1.0, 4: 1.25})
    file.follow(costs)
    lived(costs, 100)
    file.write(anew)
    file.follow(anew)
    write_followed()
    assert loaded(file).curve(0).seconds(4) == 1.25


def _deep(levels: int) -> list:
    found: list = []
    for _ in range(levels):
        found = [found]
    return found


def key_of(wrong: Any) -> str:
    return wrong if isinstance(wrong, str) else "9" * 400


def _spoiled(data: Any, wrong: Any) -> Iterator[Any]:
    """With `wrong` in the place of one part after the other, small and large, and of one key."""
    yield wrong
    if isinstance(data, dict):
        for key, value in data.items():
            for found in _spoiled(value, wrong):
                yield {**data, key: found}
            yield {**{k: v for k, v in data.items() if k != key}, key_of(wrong): value}
    elif isinstance(data, list):
        for i, value in enumerate(data[:3]):
            for found in _spoiled(value, wrong):
                yield [*data[:i], found, *data[i + 1 :]]


@pytest.mark.parametrize(
    "wrong",
    [10**400, -(10**4000), 1e300, 1e-300, float("inf"), _deep(5000), "9" * 5000, None, {}],
    ids=["huge", "huge and negative", "large", "small", "infinite", "deep", "long", "null", "object"],
)
def test_whatever_a_file_holds_stops_no_start(wrong: Any) -> None:
    known = known_costs({1: 1.0, 4: 9.0}, {"mtp": DraftCost(step=0.4)})
    known.accepted("text", "mtp")
    known.lengths["text"], known.bank = 50.0, 3.0
    good = json.loads(json.dumps(known.as_data()))
    CostModel().learn_from(good)
    for spoiled in _spoiled(good, wrong):
        found = CostModel()
        try:
            found.learn_from(spoiled)
        except ConfigError:
            assert found.as_data() == CostModel().as_data()  # nothing has changed
            continue
        assert found.curve(0, 2).seconds(5) > 0
        found.curve(0).refine(4, 0.1)
        found.drafted(found.curve(0), 4, [DraftCall("mtp", "greedy", 8, 1, 1)], 0.2)
        json.dumps(found.as_data())


def test_what_cannot_be_read_is_as_good_as_none(file: CostFile) -> None:
    for text in (f'{{"format": {"[" * 100_000}', f'{{"format": {"9" * 10_000}}}', '{"format"', "\udcff"):
        file.path.write_text(text, errors="surrogateescape")
        assert file.data() is None
    file.path.unlink()
    os.mkfifo(file.path)  # opening one waits for ever
    assert file.data() is None


def test_a_forked_child_writes_nothing(file: CostFile) -> None:
    """Its parent goes on learning, and writes at its own end."""
    before, costs = file.path.read_bytes(), loaded(file)
    file.follow(costs)
    lived(costs, 100)
    child = os.getpid() + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: child)
        write_followed()
    assert file.path.read_bytes() == before
