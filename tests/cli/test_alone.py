"""`mlxspec` without a command: at a terminal the page with the best model of this disk, in three lines; in a pipe the first examples."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import sys
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_runs import Run
from planting import catches

from mlxspec.cli import alone, serve, terminal
from mlxspec.loading import lm_studio

ROOT = Path(__file__).resolve().parents[2]
STUDIO = "lmstudio-community/tiny-4bit"
URL = "http://127.0.0.1:1234/v1"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without models, at a terminal."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))
    for module in ("repositories", "hub"):
        monkeypatch.setattr(f"mlxspec.loading.{module}.cache_folder", lambda: tmp_path / "hub")
    monkeypatch.setattr(lm_studio, "PLACES", ("~/.lmstudio/models",))
    monkeypatch.setattr(alone, "is_wanted", lambda: True)
    return tmp_path


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """Options of each server that is started; it says that it serves and ends."""
    found = []

    def run(args: argparse.Namespace, tell: Callable[[str, Any], None]) -> int:
        found.append(args)
        tell(URL, SimpleNamespace())
        return 0

    monkeypatch.setattr(serve, "run", run)
    return found


@catches("a model on the disk is not looked for", "mlxspec.cli.here:best", lambda right: lambda: None)
def test_the_best_model_of_the_disk_is_served(
    run: Run, home: Path, model: Path, served: list[argparse.Namespace]
) -> None:
    shutil.copytree(model, home / ".lmstudio" / "models" / STUDIO)
    said = run().err.splitlines()
    assert served[0].model == [STUDIO]
    assert re.fullmatch(rf"{STUDIO}, [\d.]+ [kMG]B\.", said[0])
    assert said[1] == f"Open http://127.0.0.1:1234/ to chat; programs use {URL}."
    assert len(said) == 3


def test_without_a_model_the_toy_is_served_and_the_choice_named(
    run: Run, home: Path, served: list[argparse.Namespace]
) -> None:
    said = run().err.splitlines()
    assert served[0].model == ["demo"]
    assert re.match(r"demo, a toy: .*`mlxspec pull \S+` fetches one \([\d.]+ [MG]B\), .* Models\.$", said[0])
    assert len(said) == 3


@catches("the port is not looked at", "mlxspec.cli.alone:_is_free", lambda right: lambda port: True)
def test_a_taken_port_is_left(
    run: Run, home: Path, served: list[argparse.Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the page keeps belongs to its address, so the usual port is taken where it is free."""
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        taken = other.getsockname()[1]
        monkeypatch.setattr(alone, "ServerConfig", lambda: SimpleNamespace(host="127.0.0.1", port=taken))
        assert run().code == 0
        other.listen()
        assert f"Port {taken} is taken: conversations of the page there are not shown here." in run().err
    assert [args.port for args in served] == [None, 0]


def test_the_config_file_counts(
    run: Run, home: Path, served: list[argparse.Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = home / "config.toml"
    file.write_text('[serve]\nmodel = "demo-gemma"\nport = 9999\n')
    monkeypatch.setenv("MLXSPEC_CONFIG", str(file))
    assert run().err.startswith("demo-gemma, as the config file names it.")
    assert served[0].port == 9999


@pytest.mark.parametrize("piped", ["stdin", "stdout", "stderr"])
def test_a_pipe_gets_the_examples(
    run: Run, served: list[argparse.Namespace], monkeypatch: pytest.MonkeyPatch, piped: str
) -> None:
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: stream is not getattr(sys, piped))
    assert run().out.startswith("mlxspec: speculative decoding")
    assert not served


@pytest.mark.slow
@pytest.mark.terminal
def test_at_a_real_terminal(tmp_path: Path) -> None:
    """Three lines, a page that answers, and an end by Ctrl-C."""
    recorder = pytest.importorskip("recorder", reason="needs POSIX terminals and pyte")
    settings = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "MLXSPEC_CACHE": str(tmp_path / "cache")}
    settings |= {"HF_HOME": str(tmp_path / "hub"), "TERM": "xterm-256color", "MLX_DISABLE_COMPILE": "1"}
    settings["COLUMNS"] = "160"  # xdist tells its workers another width
    command = [sys.executable, "-m", "mlxspec"]
    with recorder.Recorder(command, environment={**os.environ, **settings}, columns=160) as person:
        text = person.wait_for("Ctrl-C ends it")
        assert len(text.splitlines()) == 3, text
        address = re.search(r"Open (\S+) to chat", text)
        assert address is not None
        with urllib.request.urlopen(address[1], timeout=60) as page:
            assert b"<title>" in page.read()
        person.interrupt()
        assert person.wait() == 0
