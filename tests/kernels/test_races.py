"""Ratios on record: what is written is read again where nothing changed, and anything else is as good as none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from planting import catches

import mlxspec
from mlxspec.kernels import (
    gdn_prefill,  # noqa: F401  (registers itself)
    gdn_round,  # noqa: F401
    launch,
    qmv_rows,  # noqa: F401
    races,
)
from mlxspec.models.qwen3_5_layers import GatedDeltaNet
from mlxspec.platform import device

RATIOS = {"qmv_rows": {"512 to 8, 2 rows": 1.25, "512 to 8, 3 rows": 0.5}, "gdn_prefill": {"64 tokens": 1.1}}


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file, written with RATIOS; `launch` has forgotten them."""
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))
    launch.forget()
    for name, by_width in RATIOS.items():
        for width, ratio in by_width.items():
            launch.set_speedup(name, width, ratio)
    file = races.save()
    launch.forget()
    yield file
    launch.forget()


def changed(file: Path, change: Any) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def test_what_was_measured_is_known_again(record):
    assert not launch.wins("qmv_rows", "512 to 8, 2 rows")
    races.restore()
    assert launch.speedups() == RATIOS
    assert launch.wins("qmv_rows", "512 to 8, 2 rows")
    assert not launch.wins("qmv_rows", "512 to 8, 3 rows")


def test_new_ratios_stand_beside_those_on_record(record):
    launch.set_speedup("qmv_rows", "512 to 8, 3 rows", 1.5)
    launch.set_speedup("qmv_rows", "512 to 8, 4 rows", 2.0)
    races.save()
    launch.forget()
    races.restore()
    assert launch.speedups()["qmv_rows"] == {
        "512 to 8, 2 rows": 1.25,
        "512 to 8, 3 rows": 1.5,
        "512 to 8, 4 rows": 2.0,
    }
    assert launch.speedups()["gdn_prefill"] == RATIOS["gdn_prefill"]
    assert [path.name for path in record.parent.iterdir()] == [record.name]


@pytest.mark.parametrize(
    ("where", "name"),
    [(mx, "__version__"), (races.platform, "release"), (races.platform, "machine")],
    ids=str,
)
def test_a_record_of_another_machine_does_not_count(record, monkeypatch, where, name):
    another = "another" if where is mx else lambda: "another"
    monkeypatch.setattr(races.platform, "mac_ver", lambda: ("", ("", "", ""), ""))
    monkeypatch.setattr(mx, "device_info", dict)
    races.restore()
    launch.forget()
    launch.set_speedup("qmv_rows", "512 to 8, 2 rows", 1.5)
    races.save()
    launch.forget()
    monkeypatch.setattr(where, name, another)
    races.restore()
    assert launch.speedups() == {}


def test_ratios_of_a_kernel_that_has_changed_are_left_out(record):
    changed(record, lambda data: data["qmv_rows"].update(text="0" * 16))
    races.restore()
    assert launch.speedups() == {"gdn_prefill": RATIOS["gdn_prefill"]}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"format": 2}', "[" * 100_000, "\x00", '{"format": NaN}', "9" * 5000]
)
def test_a_damaged_record_is_as_good_as_none(record, text):
    record.write_text(text)
    races.restore()
    assert launch.speedups() == {}
    launch.set_speedup("qmv_rows", "512 to 8, 2 rows", 1.5)
    races.save()
    launch.forget()
    races.restore()


@pytest.mark.parametrize("value", [True, "1.2", None, 0, -1.0, 1e9, float("nan"), float("inf"), [1.2]])
def test_what_is_no_ratio_is_not_believed(record, value):
    changed(record, lambda data: data["qmv_rows"]["speedups"].update({"512 to 8, 2 rows": value}))
    races.restore()
    assert launch.speedups() == {"gdn_prefill": RATIOS["gdn_prefill"]}


def test_no_record_is_none(record):
    record.unlink()
    races.restore()
    assert launch.speedups() == {}


def test_only_a_kernel_that_won_something_is_checked_at_load(record, monkeypatch):
    """Without a win on record nothing of a kernel that needs one is compiled; a failed check says so and is visible."""
    asked = []

    def fails() -> launch.Check:
        asked.append("qmv_rows")
        return launch.Check(error=1.0, limit=0.5)

    good = launch.Check(error=0.0, limit=1.0)
    checks = {
        "qmv_rows": fails,
        "gdn_round": lambda: good,
    }
    monkeypatch.setattr(launch, "_checks", checks)
    monkeypatch.setattr(launch, "_of_models", set())
    with launch.using(lambda **_: None):
        found = {r.name: r for r in launch.needed()}
        assert not asked
        assert found["gdn_round"].in_use
        assert "won no race" in found["qmv_rows"].reason
        assert not found["qmv_rows"].failed
        launch.set_speedup("qmv_rows", "512 to 8, 2 rows", 1.2)
        found = {r.name: r for r in launch.needed()}
    assert asked == ["qmv_rows"]
    assert found["qmv_rows"].failed
    assert not found["qmv_rows"].in_use
    assert found["qmv_rows"].speedups == {"512 to 8, 2 rows": 1.2}


@pytest.mark.skipif(device.backend() != "cpu", reason="without a GPU")
def test_without_a_gpu_loading_reads_no_record(record, monkeypatch):
    monkeypatch.setattr(races, "restore", lambda: pytest.fail("read"))
    assert all("no GPU" in r.reason and not r.failed for r in races.prepare())


def test_prompts_go_by_the_kernel_unless_it_has_lost(record, monkeypatch):
    """Plain operations are a hundred launches and more a layer: nobody should have to run a race first."""
    good = launch.Check(error=0.0, limit=1.0)
    monkeypatch.setattr(launch, "_checks", {"gdn_prefill": lambda: good})
    monkeypatch.setattr(launch, "_of_models", set())
    monkeypatch.setattr(launch, "_speedups", {})
    with launch.using(lambda **_: None):
        (report,) = launch.needed()
        assert report.in_use
        assert launch.wins("gdn_prefill", "64 tokens")
        launch.set_speedup("gdn_prefill", "64 tokens", 0.9)
        assert not launch.wins("gdn_prefill", "64 tokens")
        assert launch.wins("gdn_prefill", "512 tokens")


def test_kernels_of_models_are_checked_with_what_models_use_them_for(record, monkeypatch):
    """Once for each use, never for an example; one failure is enough."""
    asked = []

    def check(*used_for) -> launch.Check:
        asked.append(used_for)
        return launch.Check(error=float("wrong" in used_for), limit=0.5)

    monkeypatch.setattr(launch, "_checks", {"gdn_round": check})
    monkeypatch.setattr(launch, "_of_models", {"gdn_round"})
    with launch.using(lambda **_: None):
        assert "no model that was loaded" in launch.needed()[0].reason
        launch.check_for("shape")
        launch.check_for("shape")
        assert launch.in_use("gdn_round")
        assert launch.needed()[0].in_use
        launch.check_for("wrong")
        launch.check_for("another shape")
        (report,) = launch.needed()
    assert asked == [("shape",), ("wrong",)]
    assert report.failed


@catches("loading checks examples only", "mlxspec.models.tune:check_kernels", lambda right: lambda _: None)
def test_loading_checks_kernels_with_the_models_shapes(monkeypatch):
    asked = []
    monkeypatch.setattr(launch, "check_for", lambda *used_for: asked.append(used_for))
    with mlxspec.load("demo", draft="off") as engine:
        (mixer,) = {m._shape for _, m in engine.model.named_modules() if isinstance(m, GatedDeltaNet)}
        assert asked == [(mixer, engine.model.dtype)]


def test_a_race_between_different_results_is_lost(record):
    ours, theirs = mx.ones((2, 8)), mx.ones((2, 8)).at[1, 7].add(0.2)
    assert launch.race("qmv_rows", "512 to 8, 2 rows", lambda: ours, lambda: theirs) == launch.LOST
    (report,) = (r for r in launch._all_reports() if r.name == "qmv_rows")
    assert not launch.wins("qmv_rows", "512 to 8, 2 rows")
    assert "differs from MLX's own operation (512 to 8, 2 rows)" in report.notice
    races.save()
    launch.forget()
    races.restore()
    assert not launch.wins("qmv_rows", "512 to 8, 2 rows")
