"""`mlxspec doctor`: a sound machine is called sound, and each thing that is made wrong is found, with what to do."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cli_runs import Run, refused
from planting import catches

from mlxspec.cli import checkup
from mlxspec.kernels import launch
from mlxspec.platform import device

Usage = namedtuple("Usage", "total used free")
NAMES = {"system", "mlxspec", "packages", "device", "memory", "cache folder", "models", "free disk"}
NAMES |= {
    "exactness",
    "same text",
    "kernel gdn_round",
    "kernel conv_qkv",
    "kernel gdn_prefill",
    "kernel qmv_rows",
    "kernel qmv_rows_fp",
    "kernel qmm_few",
    "kernel qmm_few_fp",
}


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def found(run: Run, *arguments: str) -> tuple[int, dict[str, dict]]:
    ran = run("doctor", "--json", *arguments)
    data = json.loads(ran.out)
    assert data["ok"] == (ran.code == 0)
    for finding in data["findings"]:
        if finding["status"] != "ok":
            assert finding["advice"].endswith((".", "?"))
    return ran.code, {f["name"]: f for f in data["findings"]}


def test_a_sound_machine_is_called_sound(run: Run) -> None:
    code, findings = found(run)
    assert code == 0
    assert findings.keys() >= NAMES
    assert "the same with drafting (suffix, ngram-simple, mtp)" in findings["same text"]["found"]
    assert str(Path("cache")) in findings["cache folder"]["found"]
    ran = run("doctor")
    assert ran.code == 0
    assert ran.out.rstrip().splitlines()[-1].startswith("Nothing is wrong.")
    assert ran.err == ""


@pytest.mark.parametrize(("generation", "is_told"), [(13, True), (14, True), (15, False), (None, False)])
@catches(
    "every GPU is taken for an M1's",
    "mlxspec.platform.device:emulates_bfloat16",
    lambda right: lambda: True,
    case="15",
)
@catches("no GPU is", "mlxspec.platform.device:emulates_bfloat16", lambda right: lambda: False, case="13")
def test_the_type_that_an_m1_computes_in_is_told(
    generation: int | None, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "gpu_generation", lambda: generation)
    told = [f.found for f in checkup._backend() if f.name == "bfloat16"]
    assert len(told) == is_told
    assert all(f"generation {generation}" in text and "computed in float16" in text for text in told)


def test_what_is_wrong_is_found(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All faults at once: each stands in the report, and the exit code is 1."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(10, 9, 1))
    monkeypatch.setattr(checkup, "PACKAGES", ("mlx", "no-such-package-at-all"))
    launch.forget()

    def liar(**settings):
        def call(*, output_shapes, output_dtypes, **given):
            return [mx.full(s, 7, dtype=d) for s, d in zip(output_shapes, output_dtypes, strict=True)]

        return call

    try:
        with launch.using(liar):
            code, findings = found(run)
    finally:
        launch.forget()
    assert code == 1
    for name in ("cache folder", "packages", "kernel gdn_round"):
        assert findings[name]["status"] == "wrong", findings[name]
    assert "no-such-package-at-all" in findings["packages"]["found"]
    assert findings["free disk"]["status"] == "note"
    assert findings["same text"]["status"] == "ok"  # a kernel that failed its check is not used


def test_a_folder_of_another_user_is_no_accident(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody but root may look into it, so what a folder of it holds cannot be asked."""
    right = os.stat

    def stat(path: Any, *rest: Any, **named: Any) -> os.stat_result:
        if str(path).startswith(str(tmp_path / "theirs")):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return right(path, *rest, **named)

    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "theirs"))
    monkeypatch.setattr(os, "stat", stat)
    found = {each.name: each for each in checkup._earlier_texts()}
    assert found["prefix cache"].found.startswith("nothing on disk")


def test_drafting_that_changes_the_text_is_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxspec.engine import round as rounds

    monkeypatch.setattr(rounds, "match", lambda drafts, chosen: len(drafts))  # every draft stands
    code, findings = found(run)
    assert code == 1
    assert findings["same text"]["status"] == "wrong"


def test_a_model_that_is_not_here_is_not_fetched(run: Run) -> None:
    code, findings = found(run, "--model", "nobody/nothing")
    assert code == 1
    assert findings["model"]["status"] == "wrong"
    refused(run("doctor", "--nonsense"), "--nonsense")


def test_findings_are_told_as_they_come(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values stand below one another, and the first is there before the second is looked for."""
    told = []

    def examine(model: str) -> Any:
        for name in ("system", "kernel gdn_prefill"):
            yield checkup.Finding(name=name, found="sound")
            told.append(capsys.readouterr().out)

    monkeypatch.setattr("mlxspec.cli.doctor.examine", examine)
    assert run("doctor").out == "\nNothing is wrong.\n"
    assert told == ["system              sound\n", "kernel gdn_prefill  sound\n"]
