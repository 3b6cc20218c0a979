"""A first hour on a pretended Mac, with stand-ins for macOS's programs and libraries: the commands of the README run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from cli_runs import Run, refused

from mlxspec.cli import checkup
from mlxspec.platform import macos
from tests.test_macos import Mac

INFO = {
    "device_name": "Apple M4", "architecture": "applegpu_g16g", "memory_size": 16 << 30, "max_buffer_length": 9 << 30,
    "max_recommended_working_set_size": 12 << 30, "resource_limit": 499000,
}  # fmt: skip
PROGRAMS = {
    ("pmset", "-g"): " lowpowermode         1\n",
    ("sysctl", "-n", "vm.swapusage"): "total = 2048.00M  used = 512.00M",
    ("sysctl", "-n", "iogpu.wired_limit_mb"): "0",
}


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mac:
    """The Mac. Its HOME is empty, no hub can be reached, and Xcode's tools are not there."""
    found = Mac()
    for module in (macos, checkup):
        monkeypatch.setattr(module, "sys", SimpleNamespace(**{**vars(sys), "platform": "darwin"}))
    monkeypatch.setattr(macos, "_library", lambda path: found)
    monkeypatch.setattr(macos, "told", lambda *command: PROGRAMS.get(command, ""))
    monkeypatch.setattr(checkup.platform, "mac_ver", lambda: ("26.4.1", ("", "", ""), "arm64"))
    monkeypatch.setattr(checkup.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(mx, "device_info", lambda *given: dict(INFO))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLXSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return found


@pytest.mark.slow
def test_the_commands_of_a_first_hour(mac: Mac, run: Run) -> None:
    mac.level = 2
    told = run("doctor")
    for part in (
        "low power mode",
        "memory pressure",
        "warn; swap total = 2048.00M",
        "mlx #3186",
        "macOS 26.4.1, arm64",
    ):
        assert part in told.out, part
    assert "could not be examined" not in told.out
    mac.level = 1
    shown = run("demo", "--repeat", 1, "--max-tokens", 8)
    assert shown.code == 0, shown.err
    assert mac.held == set()  # it may sleep again
    for command in ("run", "chat --model"):
        talked = run(*command.split(), "demo", "--max-tokens", 8, stdin=b"what does sorted do?\n")
        assert talked.code == 0, talked.err
        assert talked.out.strip()
    refused(run("pull", "mlx-community/Qwen3.5-4B-4bit"))
    refused(run("launch", "claude", "-m", "demo"))
    assert mac.held == set()
    assert mac.texts == 0
