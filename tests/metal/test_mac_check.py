"""scripts/mac_check, every section of it, with the emulator in the GPU's place: it must work the first time somebody runs it."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path

import pytest

from mlxspec.kernels import launch, races

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "mac_check.py"


@pytest.fixture
def script(monkeypatch, tmp_path):
    """The script at tiny sizes; races are short, and kept in a folder of the test's own."""
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(launch, "race", functools.partial(launch.race, num_rounds=1, repeat=1))
    spec = importlib.util.spec_from_file_location("mac_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mac_check", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HAS_METAL", True)
    small = {
        "layers": {"tiny": 2},
        "key_heads": 1,
        "widths": (1, 2),
        "matmuls": ((16, 512),),
        "tokens": (17,),
        "context": 40,
    }
    monkeypatch.setattr(module, "sizes", module.Sizes(rounds=1, repeat=1, **small))
    monkeypatch.setattr(module.qmv_rows, "MAX_ROWS", 2)
    launch.forget()
    yield module
    launch.forget()


def test_every_section_about_kernels_runs(emulated, script):
    with emulated():
        for section in (
            *(script.machine, script.self_checks, script.exactness, script.verify_curve, script.qmv_race),
            *(script.attention_by_width, script.rollback, script.convolution, script.prefill),
        ):
            text, failed = script.run_section(section)
            assert not failed, text
            assert text.strip()
            assert "skipped" not in text
    assert all(report.in_use for report in launch.reports())
    raced = launch.speedups()
    assert set(raced) == {"gdn_prefill", "qmv_rows"}
    launch.forget()
    assert races.restore() is None
    assert launch.speedups() == raced


def test_a_section_that_fails_does_not_stop_the_others(script):
    text, failed = script.run_section(lambda: print("so far") or 1 / 0)
    assert failed
    assert text.startswith("so far\nFAILED")
    assert "ZeroDivisionError" in text


def test_a_kernel_that_fails_its_check_is_switched_off_and_reported(emulated, script, monkeypatch):
    right = launch.metal_source

    faults = {
        "conv_qkv": ("simd_sum(squares)", "squares"),
        "gdn_round": ("simd_shuffle_xor", "no_such_function"),
    }

    def wrong(name: str) -> str:
        return right(name).replace(*faults.get(name, ("", "")))

    monkeypatch.setattr(launch, "metal_source", wrong)
    for module in ("conv_qkv", "gdn_round"):
        monkeypatch.setattr(sys.modules[f"mlxspec.kernels.{module}"]._kernel, "_built", {})
    with emulated():
        text, failed = script.run_section(script.self_checks)
    assert not failed
    lines = {line.split(":")[0]: line for line in text.splitlines()}
    assert "NOT in use, differs from plain MLX operations" in lines["- conv_qkv"]
    assert "NOT in use, did not run on this device" in lines["- gdn_round"]
    assert "in use, agrees" in lines["- gdn_prefill"]
