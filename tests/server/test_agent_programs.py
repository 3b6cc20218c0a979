"""An agent as people run it against a server: Claude Code, from npm. It calls one tool, gets its result and ends.

The demo model was never taught to call tools, so a grammar in the server's process makes its first answer of a conversation the call and
every other answer a word. What the program sends and how it reads what comes back are its own. It talks to nobody but the server: every
other address is a proxy that nobody listens at. Its prompt has 32,000 tokens, which the demo model reads in a minute or more.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mlxspec.demo
from tests.server.serving import Served
from tests.server.test_clients import install

pytestmark = [pytest.mark.slow, pytest.mark.node]
COMMAND = "echo the-tool-was-run"
# The call by name of the tool.
CALLS: dict[str, dict[str, Any]] = {"Bash": {"command": COMMAND, "description": "Say it."}}
PLANT = f"""
from dataclasses import replace
from mlxspec.server import request_parsing
from mlxspec.server.chat_request import ToolChoice

CALLS = {CALLS!r}
original = request_parsing._grammar

def _grammar(request, form, tools, choice, engine):
    found = [t for t in tools if t["function"]["name"] in CALLS]
    if not found or any(m["role"] == "tool" for m in request.messages):
        return {{"regex": "Done[.]"}}
    name = found[0]["function"]["name"]
    properties = {{k: {{"const": v}} for k, v in CALLS[name].items()}}
    parameters = {{"type": "object", "properties": properties, "required": list(properties)}}
    tool = {{"type": "function", "function": {{"name": name, "parameters": parameters}}}}
    must = ToolChoice(kind="required", named=name)
    return original(replace(request, wanted=None, several_calls=False), form, [tool], must, engine)

request_parsing._grammar = _grammar
"""


@pytest.fixture(scope="module")
def agent_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo model with room for the prompts of agents."""
    made = tmp_path_factory.mktemp("models") / "demo"
    shutil.copytree(Path(mlxspec.demo.__file__).parent / "target", made)
    config = json.loads((made / "config.json").read_text())
    inner = config.get("text_config", config)
    inner["max_position_embeddings"] = 65_536
    (made / "config.json").write_text(json.dumps(config))
    with Served("--model", str(made), "--max-rows", "4", plant=PLANT) as served:
        yield served
        assert not [line for line in served.lines if "Traceback" in line]


def run(command: list[str], folder: Path, **env: str) -> str:
    """What a program says on its standard output."""
    home = folder / "home"
    home.mkdir()
    nowhere = "http://127.0.0.1:9"
    given = {
        "PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", "CI": "1", "NO_COLOR": "1",
        "HTTPS_PROXY": nowhere, "HTTP_PROXY": nowhere, "NO_PROXY": "127.0.0.1,localhost", **env,
    }  # fmt: skip
    work = folder / "work"
    work.mkdir()
    done = subprocess.run(
        command, cwd=work, env=given, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_claude_code(agent_server: Served, tmp_path: Path) -> None:
    install(tmp_path, "@anthropic-ai/claude-code")
    (program,) = tmp_path.glob("node_modules/@anthropic-ai/claude-code-*/claude")
    said = run(
        [
            str(program),
            "-p",
            "Say it.",
            "--output-format",
            "stream-json",
            "--verbose",
            "--allowedTools",
            "Bash",
        ],
        tmp_path,
        ANTHROPIC_BASE_URL=agent_server.base.removesuffix("/v1"),
        ANTHROPIC_API_KEY="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
    )
    check_claude_code([json.loads(line) for line in said.splitlines()])


def check_claude_code(events: list[dict[str, Any]]) -> None:
    """It ran the tool and sent the result back, and of its second prompt nearly all was cached, although its header had changed."""
    first, second = (e["message"] for e in events if e["type"] == "assistant")
    assert [b["name"] for b in first["content"]] == ["Bash"]
    (result,) = (b for e in events if e["type"] == "user" for b in e["message"]["content"])
    assert (result["content"], result["is_error"]) == ("the-tool-was-run", False)
    assert [b["text"] for b in second["content"]] == ["Done."]
    end = events[-1]
    assert (end["subtype"], end["is_error"], end["result"], end["num_turns"]) == (
        "success",
        False,
        "Done.",
        2,
    )
    usage = second["usage"]
    assert usage["cache_read_input_tokens"] > 0.95 * (
        usage["cache_read_input_tokens"] + usage["input_tokens"]
    )
