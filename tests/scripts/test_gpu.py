"""scripts/gpu: rehearsed without a GPU, so that it works the first time that somebody has one."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import measurements
import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Answers of a few tokens; the kernels' tests are other files'."""
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("gpu_command", SCRIPTS / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_command", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "WITHOUT_METAL", replace(module.WITHOUT_METAL, new_tokens=5, num_layers=4))
    monkeypatch.setattr(module.kernels, "kernel_tests", lambda here: here.tell("kernel tests: left out"))
    return module


@pytest.mark.slow
def test_the_whole_script_without_a_gpu(script, tmp_path, capsys):
    out = tmp_path / "deep" / "gpu.json"
    assert script.main(["--rehearse", "--out", str(out)]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "failed: nothing" in said
    found = json.loads(out.read_text(encoding="utf-8"))
    rows = found["tables"]["texts"]["rows"]
    assert {tuple(row[:3]) for row in rows} == {
        (model, dtype, way)
        for dtype in ("float32", "bfloat16")
        for model, ways in (("demo", ("mtp 3", "chain")), ("cut 0.8B shape", ("mtp 1", "mtp 3")))
        for way in ("off", *ways, "auto")
    }
    for _, dtype, _, equal, *speeds in rows:
        same, num = map(int, equal.split(" of "))
        assert num > 0
        assert same == num or dtype != "float32"
        assert all(float(speed) > 0 for speed in speeds)
    assert "mlx-lm" in said
    assert "not measured" in said
    assert found["tables"]["machine"]["rows"][0][0].endswith(f"({script.device.backend()})")


def test_without_a_gpu_it_says_so(script, monkeypatch, capsys):
    monkeypatch.setattr(script.device, "has_gpu", lambda: False)
    assert script.main([]) == 2
    assert "MLX finds no GPU here; --rehearse" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        script.main(["--rehearse", "--only", "nothing"])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--seconds", "nan"], "--seconds must be above 0"),
        (["--seconds", "-1"], "--seconds must be above 0"),
        (["--out", "."], "--out: . cannot be written: Is a directory"),
    ],
)
def test_a_mistake_in_the_options_is_said_before_the_work(script, monkeypatch, capsys, wrong, said):
    monkeypatch.setattr(script, "run", lambda here, chosen: pytest.fail("a section began"))
    with pytest.raises(SystemExit, match="2"):
        script.main(["--rehearse", "--only", "machine", *wrong])
    assert said in capsys.readouterr().err


def test_some_sections_alone_leave_the_figures_on_record(script, monkeypatch, tmp_path, capsys):
    record, other = tmp_path / "gpu.json", tmp_path / "other.json"
    monkeypatch.setattr(script, "FIGURES", record)
    monkeypatch.setattr(script.device, "has_gpu", lambda: True)
    monkeypatch.setattr(script, "run", lambda here, chosen: ("", []))
    assert script.main(["--only", "machine"]) == 0
    assert not record.exists()
    assert script.main(["--only", "machine", "--out", str(other)]) == 0
    assert script.main([]) == 0
    assert json.loads(record.read_text()).keys() == json.loads(other.read_text()).keys()


def test_a_float32_text_that_differs_fails(script, tmp_path):
    """bfloat16 is counted and told only."""
    texts, base = sys.modules["gpu_parts.texts"], sys.modules["gpu_parts.base"]
    here = base.Here(sizes=base.WITHOUT_METAL, has_metal=False, folder=tmp_path)
    stats = type("Stats", (), {"decode_speed": 2.0})

    def answer(spec):
        tokens = [1, 2, 3] if spec is texts.PLAIN else [1, 2, 4]
        return type("Result", (), {"tokens": tokens, "stats": stats})

    found = texts.Compared()
    found.add("edit", answer, {"auto": texts.AUTO}, rounds=1)
    assert found.equal == {"off": [2, 2], "auto": [0, 2]}
    assert found.different == ["edit, auto: token 2"] * 2
    assert found.over == {"auto": [1.0]}
    found.tell(here, "demo", "bfloat16")
    with pytest.raises(RuntimeError, match="differs from plain text in float32"):
        found.tell(here, "demo", "float32")
    assert ["demo", "float32", "auto", "0 of 2", "1.00", "1.00 of 1"] in here.tables["texts"]


def test_the_figures_on_record_have_what_the_page_shows():
    """The command writes the tables that docs/measurements.md has."""
    found = json.loads((measurements.DOCS / "measurements" / "gpu.json").read_text(encoding="utf-8"))
    for part in ("machine", "texts", "busy"):
        assert f"<!-- gpu {part} -->" in measurements.PAGE.read_text(encoding="utf-8")
        assert len(measurements.table("gpu", part).splitlines()) == 2 + len(found["tables"][part]["rows"])
