"""`mlxspec launch` with a stand-in for the agent: what it is told, which server it meets, and that nothing is left when it has ended.

The agents themselves, from npm, are in tests/server/test_agent_programs.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from cli_runs import Run, refused
from planting import catches, rewritten

import mlxspec.demo
from mlxspec.cli import chat, launch, pull
from mlxspec.cli.agents import AGENTS, ServedModel
from tests.server.serving import Served

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120.0
# Asks the server one thing, tells in a file what it was given, and ends with 7; with WAIT it never ends.
AGENT = """#!PYTHON
import json, os, sys, time, urllib.request
root, model = os.environ["ANTHROPIC_BASE_URL"], os.environ["ANTHROPIC_MODEL"]
body = {"model": model, "max_tokens": 3, "messages": [{"role": "user", "content": "what is a list?"}]}
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["ANTHROPIC_AUTH_TOKEN"]}
asked = urllib.request.Request(root + "/v1/messages", json.dumps(body).encode(), headers)
said = {"answer": json.load(urllib.request.urlopen(asked)), "root": root, "arguments": sys.argv[1:], "pid": os.getpid()}
with open("said.part", "w") as file:
    json.dump(said, file)
os.replace("said.part", "said")
while "WAIT" in sys.argv:
    time.sleep(1)
sys.exit(7)
"""


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with room for the prompts of agents."""
    made = tmp_path_factory.mktemp("models") / "roomy"
    shutil.copytree(Path(mlxspec.demo.__file__).parent / "target", made)
    config = json.loads((made / "config.json").read_text())
    config.get("text_config", config)["max_position_embeddings"] = 65_536
    (made / "config.json").write_text(json.dumps(config))
    return made


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the stand-in, first on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "claude").write_text(AGENT.replace("PYTHON", sys.executable))
    (folder / "claude").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


def started(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mlxspec", "launch", "claude", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(is_so: object, what: str) -> None:
    end = time.monotonic() + SECONDS
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_server_is_started_and_ends_with_the_agent(bin_folder: Path, roomy: Path, tmp_path: Path) -> None:
    given = ("-m", str(roomy), "--max-context", "30000", "--port", str(free_port()), "--", "-m", "-n", "4")
    with started(tmp_path, *given) as process:
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (7, ""), err
    assert "Traceback" not in err
    assert "100,000 tokens at the earliest; roomy has 30,000 here" in " ".join(err.split())
    told = re.search(
        r"The first prompt of Claude Code, about 19,000 tokens, takes about (\d+) s here",
        " ".join(err.split()),
    )
    assert told, err
    assert 0 < int(told[1]) < 1000
    said = json.loads((tmp_path / "said").read_text())
    assert said["answer"]["model"] == "roomy"
    assert said["arguments"][0] == "--settings"
    assert said["arguments"][2:] == ["-m", "-n", "4"]  # as they stand, not as our own flags
    assert not listens(int(said["root"].rpartition(":")[2]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_when_launch_is_ended(
    bin_folder: Path, roomy: Path, tmp_path: Path, number: int
) -> None:
    with started(tmp_path, "-m", str(roomy), "--port", str(free_port()), "--", "WAIT") as process:
        until((tmp_path / "said").exists, "the agent never asked")
        said = json.loads((tmp_path / "said").read_text())
        port, pid = int(said["root"].rpartition(":")[2]), said["pid"]
        assert listens(port)
        process.send_signal(number)
        process.wait(SECONDS)
        until(lambda: not listens(port), "the server stays")
        if number == signal.SIGKILL:  # nobody is there to end the agent, which has its terminal
            os.kill(pid, signal.SIGKILL)
        else:
            assert process.returncode == 128 + number
            assert not is_alive(pid)


@catches(
    "a signal is taken away from 128",
    "mlxspec.cli.launch:_run",
    rewritten("128 - code", "128 + code"),
    case="-",
)
@pytest.mark.parametrize("code", [0, 7, -signal.SIGTERM, -signal.SIGKILL])
def test_an_agents_end_is_told_as_a_shell_tells_it(tmp_path: Path, code: int) -> None:
    """Its exit code as it is, and 128 and the number of the signal that ended it."""
    program = tmp_path / "agent"
    how = f"exit {code}" if code >= 0 else f"kill -{-code} $$"
    program.write_text(f"#!/bin/sh\n{how}\n")
    program.chmod(0o755)
    at = ServedModel(root="http://127.0.0.1:1", key="none", model="demo", context=None)
    assert launch._run(AGENTS["claude"], str(program), at, []) == (code if code >= 0 else 128 + -code)


def test_a_server_that_runs_is_used_and_stays(bin_folder: Path, roomy: Path, tmp_path: Path) -> None:
    with Served("--model", f"own={roomy}") as served:
        with started(tmp_path, "--port", str(served.port)) as process:
            _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 7, err
        said = json.loads((tmp_path / "said").read_text())
        assert (said["root"], said["answer"]["model"]) == (f"http://127.0.0.1:{served.port}", "own")
        assert f"own of the server at http://127.0.0.1:{served.port}, as that was started" in err
        assert served.ask("GET", "/health")[0] == 200


def test_a_server_that_does_not_start_says_why(
    run: Run, bin_folder: Path, roomy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = str(free_port())
    (roomy.parent / "broken").mkdir()
    (roomy.parent / "broken" / "config.json").write_text("{")
    refused(run("launch", "claude", "-m", roomy.parent / "broken", "--port", port), "config.json")


def test_what_is_not_there(
    run: Run, bin_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = ServedModel(root="http://127.0.0.1:9", key="none", model="demo", context=2048)
    monkeypatch.setattr(launch, "_running", lambda port, wanted: small)
    refused(run("launch", "claude"), "demo has 2,048 tokens", "19,000", "docs/agents.md")
    refused(run("launch", "cluade"), "did you mean claude?")
    refused(run("launch"), "AGENT")
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(run("launch", "codex"), "no command codex", "npm install -g @openai/codex")


@pytest.mark.parametrize("name", ["owner/model", 'a "b" \\ c', "ä = [x]"])
def test_each_agent_is_told_the_address_and_any_name(name: str) -> None:
    at = ServedModel(root="http://127.0.0.1:9", key="k", model=name, context=65_536)
    claude, codex, opencode = (agent.tell(at) for agent in AGENTS.values())
    assert json.loads(claude.arguments[1])["env"] == claude.environment
    assert {v for k, v in claude.environment.items() if k.endswith("_MODEL")} == {name}
    said = tomllib.loads("\n".join(codex.arguments[1::2]))
    assert set(codex.arguments[::2]) == {"-c"}
    assert (said["model"], said["model_context_window"]) == (name, 65_536)
    provider = said["model_providers"][said["model_provider"]]
    assert provider["base_url"] == "http://127.0.0.1:9/v1"
    assert codex.environment == {provider["env_key"]: "k"}
    config = json.loads(opencode.environment["OPENCODE_CONFIG_CONTENT"])
    provider_name, _, model = config["model"].partition("/")
    provider = config["provider"][provider_name]
    assert provider["options"] == {"baseURL": "http://127.0.0.1:9/v1", "apiKey": "k"}
    assert (model, provider["models"][model]["limit"]["context"]) == (name, 65_536)


def test_run_fetches_what_is_not_here_and_chats(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    monkeypatch.setattr(pull, "run", lambda args: fetched.append(args.repo))
    short = ("--max-tokens", 4)
    assert run("run", model, "hello", *short).out == run("chat", "hello", "--model", model, *short).out
    assert fetched == []
    monkeypatch.setattr(chat, "run", lambda args: 0 if args.model == "nobody/nothing" else 1)
    assert run("run", "nobody/nothing").code == 0
    assert fetched == ["nobody/nothing"]
