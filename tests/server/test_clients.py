"""Other people's clients: litellm and the `openai` package of JavaScript."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import QUESTION, Served
from tests.server.test_sdk import SCHEMA, TOOLS

MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_litellm(demo: Served) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        litellm = pytest.importorskip("litellm", reason="litellm is not installed")
        pytest.importorskip("mcp", reason="litellm needs the mcp package for tools")

        def ask(**more: Any) -> Any:
            given = {"max_tokens": 100, "messages": MESSAGES, **more}
            return litellm.completion(model="openai/demo", api_base=demo.base, api_key="none", **given)

        whole = ask(max_tokens=20)
        assert whole.choices[0].message.content
        assert whole.usage.completion_tokens == 20
        streamed = list(ask(max_tokens=20, stream=True, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].delta.content or "" for c in streamed if c.choices)
        assert text == whole.choices[0].message.content
        called = ask(tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False)
        (call,) = called.choices[0].message.tool_calls
        assert set(json.loads(call.function.arguments)) == {"name", "full", "kind"}
        form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
        assert set(json.loads(ask(response_format=form).choices[0].message.content)) == set(
            SCHEMA["properties"]
        )
        logprobs = ask(max_tokens=3, logprobs=True, top_logprobs=2).choices[0].logprobs
        assert len(logprobs["content"] if isinstance(logprobs, dict) else logprobs.content) == 3
        again = [{"role": "assistant", "content": "x", "reasoning_content": "because"}, MESSAGES[0]]
        assert ask(messages=[*MESSAGES, *again], max_tokens=2).choices[0].message.content


@pytest.mark.slow
@pytest.mark.node
def test_javascript(demo: Served, tmp_path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm")
    (tmp_path / "package.json").write_text('{"type": "module", "private": true}')
    done = subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "openai@>=5 <8"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode:
        pytest.skip("the npm registry cannot be reached")
    shutil.copy(Path(__file__).with_name("client.mjs"), tmp_path / "client.mjs")
    ran = subprocess.run(
        ["node", "client.mjs", demo.base, json.dumps({"tools": TOOLS[:1], "schema": SCHEMA})],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout.strip().splitlines()[-1:]) == (0, ["all of it works"]), (
        ran.stdout + ran.stderr
    )
