"""scripts/bench_rollback counts what the caches and the graph really hold, and prints a whole table."""

from __future__ import annotations

import json

import bench_rollback as script
import pytest

from mlxspec.cache.rollback import TAPE
from mlxspec.kernels import launch
from tests.cache.mixers import full_size
from tests.cache.test_rollback_rules import held


@pytest.mark.parametrize("width", [1, 4, 64])
def test_what_it_counts_at_27b_shapes(width: int) -> None:
    layer = script.Layer(48)
    lines = {way: script.counted(layer, way, width, num_layers=48) for way in script.WAYS}
    state = 4 * 48 * 128 * 128
    for name, line in lines.items():
        assert line["held_layer"] == held(script.rollback(name, width), (width,)), name
        assert line["held_model"] == 48 * line["held_layer"]
    assert lines["tape"]["moved"] <= 1.15 * lines["tape"]["least"] or width == 64
    assert lines["snapshots"]["moved"] - lines["snapshots"]["least"] == (max(2, width) - 1) * state
    assert lines["checkpoint"]["moved"] >= lines["checkpoint"]["least"] + 2 * state
    assert lines["tape"]["launches"] == lines["snapshots"]["launches"] == 2
    assert lines["checkpoint"]["launches"] >= 3
    assert all(r.reason != "a stub" for r in launch.reports())  # what was pretended is forgotten


def test_a_whole_table(monkeypatch, capsys, tmp_path) -> None:
    file = tmp_path / "figures.json"
    arguments = ["--models", "0.8B", "--widths", "1", "2", "--rounds", "1", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["bench_rollback", *arguments])
    script.main()
    shown = capsys.readouterr().out.splitlines()
    lines = json.loads(file.read_text())["lines"]
    assert len(lines) == 6
    assert [line.count("|") for line in shown] == [12] * 8
    assert all(line["cpu_ms"] > 0 for line in lines)


def test_its_layers_are_those_of_the_cache() -> None:
    """Heads and window as the model's own layer has them."""
    fresh = script.Layer(48).fresh()
    cache = full_size(48).make_cache(1, TAPE)
    current = cache.recurrent(0).current
    assert (fresh.state.shape, fresh.window.shape) == (current.state.shape, current.window.shape)
