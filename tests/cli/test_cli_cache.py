"""What is kept on disk of earlier texts: later runs continue from it, `doctor` says where it is, and removing the folder clears it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_runs import Run, refused

PROMPT = "what does os.path.join do?"


def findings(run: Run) -> dict[str, str]:
    """What doctor says, by name."""
    return {f["name"]: f["found"] for f in json.loads(run("doctor", "--json").out)["findings"]}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prefix-dir", "x"], "--prefix-dir needs --prefix-disk"),
        (["--prefix-disk", "lots"], "--prefix-disk must be bytes"),
    ],
)
def test_options_that_make_no_sense(run: Run, options: list[str], words: str) -> None:
    refused(run("chat", "-p", PROMPT, *options), words)


def test_doctor_says_place_and_size(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    assert "nothing on disk" in findings(run)["prefix cache"]
    args = ("chat", "-p", PROMPT, "--max-tokens", "40", "--prefix-disk", "1G", "--past-texts-disk", "1M")
    first = run(*args)
    assert first.code == 0, first
    found = findings(run)
    for name, folder in {"prefix cache": "prefix", "earlier texts": "texts"}.items():
        assert str(tmp_path / folder) in found[name]
        assert " 0 files" not in found[name]
        assert "removing the folder clears it" in found[name]
        shutil.rmtree(tmp_path / folder)
    assert run(*args).out == first.out


def test_a_folder_of_other_things_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    ran = run("chat", "-p", PROMPT, "--prefix-disk", "1G", "--prefix-dir", tmp_path)
    refused(ran, "holds other files")
