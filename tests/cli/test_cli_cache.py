"""`mlxspec cache`: what the prefix store on disk holds is listed by model, and is cleared after a question."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import Run, refused

from mlxspec.cli import checkup

PROMPT = "what does os.path.join do?"


@pytest.fixture
def filled(run: Run, tmp_path: Path) -> Path:
    """A folder that a chat has written to."""
    folder = tmp_path / "prefix"
    ran = run("chat", "-p", PROMPT, "--max-tokens", "40", "--prefix-disk", "1G", "--prefix-dir", folder)
    assert ran.code == 0, ran
    assert list(folder.glob("*.safetensors"))
    return folder


def test_a_later_chat_continues_and_the_command_lists_and_clears(run: Run, filled: Path) -> None:
    again = run("chat", "-p", PROMPT, "--max-tokens", "40", "--prefix-disk", "1G", "--prefix-dir", filled)
    assert again.code == 0, again
    listed = run("cache", "--prefix-dir", filled)
    assert listed.code == 0
    assert listed.out.split("\n")[1].startswith("demo ")
    data = json.loads(run("cache", "--prefix-dir", filled, "--json").out)
    files = list(filled.glob("*.safetensors"))
    assert data["bytes"] == sum(p.stat().st_size for p in files)
    (model,) = data["models"]
    assert (model["model"], model["bytes"]) == ("demo", data["bytes"])
    assert model["states"] >= 1
    refused(run("cache", "--prefix-dir", filled, "--clear"), "--yes")
    assert list(filled.glob("*.safetensors")) == files
    cleared = run("cache", "--prefix-dir", filled, "--clear", "--yes")
    assert f"Removed {len(files)} files" in cleared.out
    assert not list(filled.glob("*.safetensors"))
    assert "is empty" in run("cache", "--prefix-dir", filled).out


def test_an_absent_folder_is_not_made(run: Run, tmp_path: Path) -> None:
    ran = run("cache", "--prefix-dir", tmp_path / "none")
    assert ran.code == 0
    assert "There is no prefix store" in ran.out
    assert not (tmp_path / "none").exists()
    assert json.loads(run("cache", "--prefix-dir", tmp_path / "none", "--json").out)["bytes"] == 0


def test_a_folder_of_other_things_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    refused(
        run("cache", "--prefix-dir", tmp_path, "--clear", "--yes"), "holds other files", "earlier version"
    )
    refused(run("cache", "--prefix-dir", ""), "--prefix-dir")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prefix-dir", "x"], "--prefix-dir needs --prefix-disk"),
        (["--prefix-disk", "lots"], "--prefix-disk must be bytes"),
    ],
)
def test_options_that_make_no_sense(run: Run, options: list[str], words: str) -> None:
    refused(run("chat", "-p", PROMPT, *options), words)


def test_doctor_says_place_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    (nothing,) = checkup._prefix_store()
    assert "nothing on disk" in nothing.found
    ran = run("chat", "-p", PROMPT, "--max-tokens", "40", "--prefix-disk", "1G")
    assert ran.code == 0, ran
    (found,) = checkup._prefix_store()
    assert str(tmp_path / "prefix") in found.found
    assert found.status == "ok"
    assert " 0 files" not in found.found


def test_texts_are_listed_and_cleared_too(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path))
    args = ("chat", "-p", PROMPT, "--max-tokens", "30", "--past-texts-disk", "1M")
    first, again = run(*args), run(*args)
    assert first.code == again.code == 0, (first, again)
    (file,) = (tmp_path / "texts").glob("*.safetensors")
    assert json.loads(run("cache", "--json").out)["texts"] == file.stat().st_size
    refused(run("cache", "--clear"), "--yes")
    assert "Removed 1 files" in run("cache", "--clear", "--yes").out
    assert not file.exists()
    assert json.loads(run("cache", "--json").out)["texts"] == 0
