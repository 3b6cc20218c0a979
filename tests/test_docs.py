"""What README and docs tell people to type: every command is one, those that need no network run on the demo model, and every Python
block runs."""

from __future__ import annotations

import io
import re
import shlex
import sys
import warnings
from pathlib import Path

import pytest

from mlxspec.cli import options
from mlxspec.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MEASURING = ("demo", "bench", "tune", "doctor")  # commands that take their time
ELSEWHERE = ("serve", "pull", "rm", "convert")  # need a network, a repository, or never end
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    (mlxspec .*)$", re.MULTILINE)


def commands(page: Path) -> list[str]:
    """What is to be typed after `mlxspec`, from shell fences and indented lines."""
    text = page.read_text(encoding="utf-8")
    fences = [body for kind, body in FENCE.findall(text) if kind in ("sh", "bash", "console", "shell")]
    lines = [line for body in fences for line in body.replace("\\\n", " ").splitlines()]
    found = [*lines, *INDENTED.findall(FENCE.sub("", text))]
    found = [line.split("  # ")[0].strip().removeprefix("$ ") for line in found]
    return [line.removeprefix("mlxspec").strip() for line in found if re.match(r"mlxspec\b", line)]


def blocks(page: Path) -> list[str]:
    return [body for kind, body in FENCE.findall(page.read_text(encoding="utf-8")) if kind == "python"]


COMMANDS = list(dict.fromkeys(c for page in PAGES for c in commands(page)))


def words(command: str) -> list[str]:
    return shlex.split(command, comments=True)


def is_local(command: str) -> bool:
    """Whether it can run here: no model but the demo, and nothing that never ends."""
    given = words(command)
    is_plain = not any(re.fullmatch(r"[\w.-]+/[\w.-]+|https?:.*|[~/<|>].*", w.split("=")[-1]) for w in given)
    return bool(given) and given[0] not in ELSEWHERE and is_plain


def takes_long(command: str) -> bool:
    given = words(command)
    return given[0] in MEASURING or "auto" in given


LOCAL = [c for c in COMMANDS if is_local(c)]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one(command: str) -> None:
    given = words(command)
    if any(w in ("-h", "--help", "--version") for w in given):
        with pytest.raises(SystemExit):
            options.parse(given)
    elif given and "|" not in given and ">" not in given:
        options.parse(given)


def run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b""), encoding="utf-8"))
    code = main([*words(command), *_fewer(words(command))])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert captured.out or words(command)[0] == "chat"


def _fewer(given: list[str]) -> list[str]:
    """Makes a benchmark of every recorded prompt one of a few."""
    if given[0] != "bench" or "mtp" in given or "--items" in given:
        return []
    return ["--items", "1", "--repeat", "1"]


@pytest.mark.parametrize("command", [c for c in LOCAL if not takes_long(c)])
def test_commands_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(command, tmp_path, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in LOCAL if takes_long(c)])
def test_commands_that_measure_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(command, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page one after the other, in one namespace."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))
    space: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page), 1):
        code = compile(block, f"{page.name}, block {number}", "exec")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other packages' words on being imported
            exec(code, space)


def test_the_extraction_finds_what_there_is() -> None:
    """A page whose commands nobody finds is a page nobody checks."""
    assert len(commands(ROOT / "docs" / "commands.md")) >= 15
    assert len(blocks(ROOT / "docs" / "python.md")) >= 5
    assert any(c.startswith("generate") for c in commands(ROOT / "README.md"))
    assert {words(c)[0] for c in LOCAL} >= {
        "generate",
        "chat",
        "demo",
        "bench",
        "tune",
        "doctor",
        "inspect",
        "list",
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_pictures_are_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} points to {target}"
