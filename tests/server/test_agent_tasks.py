"""Agents as people run them, from npm, to the end of a task of three calls, of which the first fails and the last has a union for its
argument; and a call that is cut, of which nothing runs. What was run is read from a file that the calls write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxspec.server.demo_agent import SENTENCE
from tests.server import union_tool
from tests.server.agent_task import CUT, FILE, SAID
from tests.server.serving import Served
from tests.server.test_agent_programs import (
    CLAUDE,
    CODEX,
    OPENCODE,
    claude_code_in,
    codex_in,
    opencode_in,
    run,
)
from tests.server.test_clients import install

pytestmark = [pytest.mark.slow, pytest.mark.node]
PLANT = "from tests.server.agent_task import plant\nplant()\n"


@pytest.fixture(scope="module")
def task_server() -> Iterator[Served]:
    with Served("--model", "demo-agent", "--max-rows", "4", plant=PLANT) as served:
        yield served
        assert not [line for line in served.lines if "Traceback" in line]


def qwen_code(served: Served, folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run qwen-code, which is told of a server by variables."""
    # a tool of a server waits else until the model searches for it
    told = {"mcpServers": {"notes": notes_in(folder)}, "permissions": {"deny": ["tool_search"]}}
    write(folder / "home/.qwen/settings.json", told)
    (folder / "work").mkdir()
    given = {
        "PATH": os.environ["PATH"], "HOME": str(folder / "home"), "TERM": "dumb", "CI": "1", "NO_COLOR": "1",
        "OPENAI_BASE_URL": served.base, "OPENAI_API_KEY": "none", "OPENAI_MODEL": "demo-agent",
    }  # fmt: skip
    command = [str(folder / "node_modules/.bin/qwen"), "--auth-type", "openai", "--yolo", "-p", text]
    return subprocess.run(
        command,
        cwd=folder / "work",
        env=given,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
    )


def notes_in(folder: Path) -> dict[str, Any]:
    """The server of the tool with a union, as most agents are told of one."""
    return {"command": sys.executable, "args": [str(union_tool.__file__), str(folder / "work" / FILE)]}


def write(file: Path, told: dict[str, Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(told))
    return file


def claude(served: Served, folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    notes = write(folder / "notes.json", {"mcpServers": {"notes": notes_in(folder)}})
    told = ("--mcp-config", str(notes), "--allowedTools", f"Bash,mcp__notes__{union_tool.NAME}")
    return run("claude", claude_code_in(folder), served, folder, *told, *CLAUDE, text)


def codex(served: Served, folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    told = [
        word
        for name, value in notes_in(folder).items()
        for word in ("-c", f"mcp_servers.notes.{name}={json.dumps(value)}")
    ]
    return run("codex", codex_in(folder), served, folder, *told, *CODEX, text)


def opencode(served: Served, folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    notes = notes_in(folder)
    local = {"type": "local", "command": [notes["command"], *notes["args"]]}
    write(folder / "work/opencode.json", {"mcp": {"notes": local}})
    return run("opencode", opencode_in(folder), served, folder, *OPENCODE, text)


Run = Callable[[Served, Path, str], subprocess.CompletedProcess[str]]
AGENTS: dict[str, tuple[str, Run]] = {
    "claude": ("@anthropic-ai/claude-code", claude),
    "codex": ("@openai/codex", codex),
    "opencode": ("opencode-ai", opencode),
    "qwen": ("@qwen-code/qwen-code", qwen_code),
}
each = pytest.mark.parametrize("agent", AGENTS)


def commands_run(folder: Path) -> list[str]:
    file = folder / "work" / FILE
    return file.read_text().split() if file.exists() else []


@each
def test_a_task_of_three_calls_is_done(task_server: Served, tmp_path: Path, agent: str) -> None:
    package, ask = AGENTS[agent]
    install(tmp_path, package)
    done = ask(task_server, tmp_path, "Say it.")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert commands_run(tmp_path) == ["one", "two", "three"]
    assert SENTENCE in done.stdout


@each
def test_nothing_of_a_cut_call_is_run(task_server: Served, tmp_path: Path, agent: str) -> None:
    """What an agent does with an answer that a limit ended is its own; it gets no call that could run."""
    package, ask = AGENTS[agent]
    install(tmp_path, package)
    before = len(task_server.lines)
    done = ask(task_server, tmp_path, CUT)
    assert "four" not in commands_run(tmp_path), done.stdout[-2000:]
    assert SAID in task_server.lines[before:]
