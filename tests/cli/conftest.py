"""Folders and a runner that the tests of the command line share."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

import pytest
from cli_checkpoints import write_checkpoint
from cli_runs import Ran, Run

from mlxspec.cli.main import main


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with an MTP head. Not to be changed; see `copied`."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="session")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model with the same vocabulary and no MTP head."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "draft", hidden=32, mtp=False, seed=3)


@pytest.fixture(scope="session")
def foreign_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose ids mean something else."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "foreign", hidden=32, mtp=False, first="b")


@pytest.fixture
def copied(model: Path, tmp_path: Path) -> Path:
    """A copy of `model` that a test may damage."""
    return Path(shutil.copytree(model, tmp_path / "copied"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in this process. stdin: what a pipe brings."""

    def command(*arguments: str | Path, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        code = main([str(a) for a in arguments])
        return Ran(code, *capsys.readouterr())

    return command
