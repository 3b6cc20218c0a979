"""scripts/mac_check: every section runs, with the emulator in the GPU's place where it needs one. It must work the first time that somebody
runs it on a Mac."""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_parts.base import run as run_sections
from gpu_parts.base import run_section

from mlxspec.kernels import launch, races

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
KERNEL_SECTIONS = {
    *("machine", "self-checks", "qmv", "recurrence", "exactness"),
}
MODEL_SECTIONS = ("decode", "prompts", "verify", "drafting", "sampled", "pitfalls", "ahead", "buffers")


@pytest.fixture
def script(monkeypatch, tmp_path):
    """The script; races are short, and kept in a folder of the test's own."""
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(launch, "_ROUNDS", 1)
    monkeypatch.setattr(launch, "_REPEAT", 1)
    monkeypatch.setattr(launch, "_FEW_ROUNDS", 1)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("mac_check", SCRIPTS / "mac_check.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mac_check", module)
    spec.loader.exec_module(module)
    launch.forget()
    yield module
    launch.forget()


def here(script, tmp_path, *, has_metal=True, **changes):
    small = {
        "layers": {"tiny": 2},
        "key_heads": 1,
        "widths": (1, 2),
        "matmuls": ((16, 512),),
        "tokens": (17,),
        "context": 40,
        "rounds": 1,
        "repeat": 1,
        "verify_widths": (1, 2, 5),
        "contexts": (32, 64),
        "new_tokens": 6,
    }
    sizes = replace(script.WITHOUT_METAL, **small | changes)
    return script.Here(sizes=sizes, has_metal=has_metal, folder=tmp_path)


@pytest.mark.slow
def test_every_section_about_kernels_runs(emulated, script, monkeypatch, tmp_path):
    monkeypatch.setattr(script.kernels.products, "RACED_ROWS", (1, 5))
    run = here(script, tmp_path)
    with emulated():
        for name, (_, section) in script.sections(run, long=True).items():
            if name in KERNEL_SECTIONS:
                text, failed = run_section(section)
                assert not failed, text
                assert text.strip()
                assert "skipped" not in text
    assert all(report.in_use for report in launch.reports())
    raced = launch.speedups()
    assert set(raced) == {"gdn_prefill", "qmv_rows", "qmv_rows_fp", "qmm_few", "qmm_few_fp"}
    said = "\n".join(run.summary)
    assert "gdn_round ok" in said
    assert "rows at which races were won: qmv_rows 512 -> 16 at 4 bits: " in said
    launch.forget()
    races.restore()
    assert launch.speedups() == raced


def test_pitfalls_are_checked_without_metal(script, tmp_path):
    """Each check says yes, NO or why it cannot tell, and what it found."""
    run = here(script, tmp_path, has_metal=False)
    text, failed = run_section(script.sections(run)["pitfalls"][1])
    assert not failed, text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("|")][2:]
    assert len(rows) == 11
    assert {row[1] for row in rows} <= {"yes", "NO", "-"}
    assert rows[0][:2] == ["| float32 products keep float32", "yes"]
    assert run.summary[0].startswith("known pitfalls: ")


@pytest.mark.slow
def test_prompts_of_large_models_are_timed_by_some_of_their_layers(script, tmp_path):
    """All sections of them, in narrow models."""
    run = here(script, tmp_path)
    for name, (size, period) in script.LARGE.items():
        text, failed = run_section(script.sections(run)[name][1])
        assert not failed, text
        assert f"{size}, prompt of 17 tokens, {period} of " in run.summary[-1]
        assert "mlx-lm" in run.summary[-1]


@pytest.mark.slow
def test_the_whole_report_without_metal(script, tmp_path, capsys):
    """As a person runs it, at the sizes of machines without Metal: within the limit of time, nothing fails, and the report is short."""
    file = tmp_path / "deep" / "report.md"
    began = time.perf_counter()
    assert script.main(["--quick", "--backend", script.device.backend(), "--out", str(file)]) == 0
    assert time.perf_counter() - began < 300
    printed = capsys.readouterr().out
    report = printed[printed.index("### Report to paste") :]
    assert file.read_text(encoding="utf-8").startswith(report.strip())
    assert len(report.splitlines()) < 40
    for said in (
        "backend",
        "mlx-lm",
        "plain decoding",
        "verify of w",
        "policy auto",
        "known pitfalls",
        "command buffers",
    ):
        assert said in report, said
    assert "failed: nothing" in report


def test_another_backend_is_refused(script, capsys):
    other = "metal" if script.device.backend() != "metal" else "cpu"
    assert script.main(["--backend", other]) == 1
    assert f"--backend {other} was asked for" in capsys.readouterr().err


def test_single_sections_and_their_names(script, capsys):
    assert script.main(["--only", "machine"]) == 0
    assert "### Machine" in (printed := capsys.readouterr().out)
    assert "### Self-checks" not in printed
    with pytest.raises(SystemExit, match="2"):
        script.main(["--only", "machin"])
    assert "there is no section machin" in capsys.readouterr().err


def test_no_section_begins_when_the_time_is_over(script, tmp_path):
    run, ran = here(script, tmp_path), []
    run.ends = time.perf_counter() + 60

    def over() -> None:
        ran.append("first")
        run.ends = 0.0

    text, failed = run_sections(run, {"a": ("First", over), "b": ("Second", lambda: ran.append("second"))})
    assert ran == ["first"]
    assert not failed
    assert "skipped: the time was over; run it alone with --only b" in text
    assert run.summary == ["Second: skipped, the time was over (--only b)"]


def test_a_section_that_fails_does_not_stop_the_others(script, tmp_path):
    text, failed = run_section(lambda: print("so far") or 1 / 0)
    assert failed
    assert text.startswith("so far\nFAILED")
    assert "ZeroDivisionError" in text
    run, ran = here(script, tmp_path), []
    _, names = run_sections(run, {"a": ("A", lambda: 1 / 0), "b": ("B", lambda: ran.append(1))})
    assert (names, ran) == (["a"], [1])


@pytest.mark.parametrize(
    ("costs", "rate", "best"),
    [
        ({1: 1.0, 3: 1.0}, 0.5, 3),  # drafts for free: the longest
        ({1: 2.1, 3: 4.1}, 0.95, 0),  # more than they can give: none
        ({1: 1.3, 3: 2.2, 6: 4.5}, 0.7, 1),
        ({1: 1.3, 3: 1.6, 6: 2.5}, 0.85, 3),
    ],
)
def test_the_depth_that_pays_most(script, costs, rate, best):
    depth, gain = sys.modules["gpu_parts.model"].best_depth(costs, rate)
    assert depth == best
    assert gain >= 1.0


def test_a_kernel_that_fails_its_check_is_switched_off_and_reported(emulated, script, monkeypatch, tmp_path):
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
    run = here(script, tmp_path)
    with emulated():
        text, failed = run_section(script.sections(run)["self-checks"][1])
    assert not failed
    lines = {line.split(":")[0]: line for line in text.splitlines()}
    assert "NOT in use, differs from plain MLX operations" in lines["- conv_qkv"]
    assert "NOT in use, did not run on this device" in lines["- gdn_round"]
    assert "in use, agrees" in lines["- gdn_prefill"]
    assert "conv_qkv FAILED" in run.summary[0]
