"""Agents as people run them against a server, from npm: Claude Code (Messages), Codex (Responses), opencode (Chat Completions). Each
calls one tool, gets its result and ends.

The model is `demo-agent`: the server has its first answer of a conversation call the agent's shell, and the answer behind the result say a
sentence. What the program sends and how it reads what comes back are its own. It talks to nobody but the server: every other address is a
proxy that nobody listens at. The prompts have 10,000 to 32,000 tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mlxspec.demo
from mlxspec.server.demo_agent import ECHO, SENTENCE
from tests.server.serving import Served
from tests.server.test_clients import install

pytestmark = [pytest.mark.slow, pytest.mark.node]
ROOT = Path(__file__).resolve().parents[2]
SAID = ECHO.removeprefix("echo ")


# How the demo's template writes calls, and how those of Qwen3.5 and later do.
TAGS = {
    """{"name": NAME, "arguments": OBJECT}\\n""": "<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n",
    "({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '\\n</tool_call>' }}": (
        "'<function=' + call.function.name + '>\\n' }}{% for key, value in call.function.arguments | items %}"
        "{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}{% endfor %}"
        "{{- '</function>\\n</tool_call>' }}"
    ),
}


@pytest.fixture(scope="module", params=["json", "tags"])
def agent_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """demo-agent, with calls in each of Qwen's two notations."""
    model, plant = "demo-agent", ""
    if request.param == "tags":
        made = tmp_path_factory.mktemp("models") / "demo-agent"
        shutil.copytree(Path(mlxspec.demo.__file__).parent / "draft", made)
        template = made / "chat_template.jinja"
        source = template.read_text()
        for written, tagged in TAGS.items():
            assert source.count(written) == 1
            source = source.replace(written, tagged)
        template.write_text(source)
        model = str(made)
        plant = f"from mlxspec.server import app, demo_agent\napp._SCRIPTS[{model!r}] = demo_agent.scripted_rules\n"
    with Served("--model", model, "--max-rows", "4", plant=plant) as served:
        yield served
        assert not [line for line in served.lines if "Traceback" in line]


# What a user may have configured: an address where nobody listens.
OWN_FILES = {
    ".claude/settings.json": '{"env": {"ANTHROPIC_BASE_URL": "http://127.0.0.1:9", "ANTHROPIC_MODEL": "other"}}',
    ".codex/config.toml": 'model = "other"\nmodel_provider = "other"\n'
    '[model_providers.other]\nname = "other"\nbase_url = "http://127.0.0.1:9/v1"\n',
    # opencode adds the schema itself where it is missing
    ".config/opencode/opencode.json": '{"$schema": "https://opencode.ai/config.json", "model": "other/none"}',
}


# How each is asked for one thing, and prints its events as JSON.
CLAUDE = ("--output-format", "stream-json", "--verbose", "--allowedTools", "Bash", "-p")
CODEX = ("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
OPENCODE = ("run", "--format", "json")


def claude_code_in(folder: Path) -> Path:
    (program,) = folder.glob("node_modules/@anthropic-ai/claude-code-*/claude")
    return program


def codex_in(folder: Path) -> Path:
    return (folder / "node_modules/.bin/codex").resolve()


def opencode_in(folder: Path) -> Path:
    """The package's own command needs a script that runs behind an installation."""
    return min(folder.glob("node_modules/opencode-linux-*/bin/opencode"), key=lambda p: len(str(p)))


def launch(agent: str, program: Path, served: Served, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """The events that an agent prints."""
    done = run(agent, program, served, folder, *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def run(
    agent: str, program: Path, served: Served, folder: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run an agent by `mlxspec launch` beside files of the user's own that say otherwise and stay so. It works in FOLDER/work."""
    home, work, programs = folder / "home", folder / "work", folder / "programs"
    for made in (work, programs):
        made.mkdir(exist_ok=True)
    for name, text in OWN_FILES.items():
        (home / name).parent.mkdir(parents=True)
        (home / name).write_text(text)
    (programs / agent).symlink_to(program)
    nowhere = "http://127.0.0.1:9"
    given = {
        "PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "TERM": "dumb", "CI": "1", "NO_COLOR": "1",
        "HTTPS_PROXY": nowhere, "HTTP_PROXY": nowhere, "PYTHONPATH": str(ROOT), "DISABLE_AUTOUPDATER": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "mlxspec", "launch", agent, "--port", str(served.port), "--", *arguments]
    done = subprocess.run(
        command, cwd=work, env=given, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500
    )
    assert {name: (home / name).read_text() for name in OWN_FILES} == OWN_FILES
    return done


def test_claude_code(agent_server: Served, tmp_path: Path) -> None:
    install(tmp_path, "@anthropic-ai/claude-code")
    program = claude_code_in(tmp_path)
    check_claude_code(launch("claude", program, agent_server, tmp_path, *CLAUDE, "Say it."))


def check_claude_code(events: list[dict[str, Any]]) -> None:
    """It ran the tool and sent the result back, and of its second prompt nearly all was cached, although its header had changed."""
    first, second = (e["message"] for e in events if e["type"] == "assistant")
    assert [b["name"] for b in first["content"]] == ["Bash"]
    (result,) = (b for e in events if e["type"] == "user" for b in e["message"]["content"])
    assert (result["content"], result["is_error"]) == (SAID, False)
    assert [b["text"] for b in second["content"]] == [SENTENCE]
    end = events[-1]
    assert (end["subtype"], end["is_error"], end["result"], end["num_turns"]) == (
        "success",
        False,
        SENTENCE,
        2,
    )
    usage = second["usage"]
    assert usage["cache_read_input_tokens"] > 0.95 * (
        usage["cache_read_input_tokens"] + usage["input_tokens"]
    )


def test_codex(agent_server: Served, tmp_path: Path) -> None:
    install(tmp_path, "@openai/codex")
    program = codex_in(tmp_path)
    events = launch("codex", program, agent_server, tmp_path, *CODEX, "Say it.")
    items = [e["item"] for e in events if e["type"] == "item.completed" and e["item"]["type"] != "error"]
    (call, answer), end = items, events[-1]
    assert (call["type"], call["exit_code"]) == ("command_execution", 0)
    assert call["aggregated_output"] == f"{SAID}\n"
    assert (answer["type"], answer["text"]) == ("agent_message", SENTENCE)
    assert end["type"] == "turn.completed"
    # Of two prompts nearly all of the second was cached, and the second is the longer one.
    assert end["usage"]["cached_input_tokens"] > 0.95 * end["usage"]["input_tokens"] / 2


def test_opencode(agent_server: Served, tmp_path: Path) -> None:
    install(tmp_path, "opencode-ai")
    program = opencode_in(tmp_path)
    events = launch("opencode", program, agent_server, tmp_path, *OPENCODE, "Say it.")
    (call,) = (e["part"] for e in events if e["type"] == "tool_use")
    assert (call["tool"], call["state"]["status"]) == ("bash", "completed")
    assert call["state"]["output"] == f"{SAID}\n"
    (text,) = (e["part"]["text"] for e in events if e["type"] == "text")
    assert text == SENTENCE
    _, last = (e["part"] for e in events if e["type"] == "step_finish")
    tokens = last["tokens"]
    assert last["reason"] == "stop"
    assert tokens["cache"]["read"] > 0.95 * (tokens["cache"]["read"] + tokens["input"])
