"""Other people's clients: litellm, and the `openai` package of JavaScript in node and in a browser."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import shutil
import subprocess
import threading
import warnings
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.server.serving import QUESTION, Served
from tests.server.test_sdk import SCHEMA, TOOLS

OPENAI = "openai@>=5 <8"
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
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "suffix"), [("anthropic/demo", ""), ("openai/responses/demo", "/v1"), ("ollama_chat/demo", "")]
)
def test_litellm_over_the_other_forms(demo: Served, model: str, suffix: str) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        litellm = pytest.importorskip("litellm", reason="litellm is not installed")
        pytest.importorskip("mcp", reason="litellm needs the mcp package for tools")
        base = demo.base.removesuffix("/v1") + suffix

        def ask(**more: Any) -> Any:
            given = {"max_tokens": 20, "messages": MESSAGES, **more}
            return litellm.completion(model=model, api_base=base, api_key="none", **given)

        whole = ask()
        assert whole.choices[0].message.content
        assert whole.usage.completion_tokens == 20
        text = "".join(c.choices[0].delta.content or "" for c in ask(stream=True) if c.choices)
        assert text == whole.choices[0].message.content
        if not model.startswith("ollama"):  # that API cannot ask for a call
            called = ask(tools=TOOLS[:1], tool_choice="required", max_tokens=150)
            assert json.loads(called.choices[0].message.tool_calls[0].function.arguments)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_agent_of_openai_agents_calls_its_tool(demo: Served) -> None:
    """Over Responses: the tool is run, and its result goes back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agents = pytest.importorskip("agents", reason="openai-agents is not installed")
        import openai

        asked: list[str] = []

        def look_up(name: str) -> str:
            """Look up a function."""
            asked.append(name)
            return "Joins paths."

        async def run() -> Any:
            async with openai.AsyncOpenAI(base_url=demo.base, api_key="none", max_retries=0) as client:
                agent = agents.Agent(
                    name="helper",
                    instructions="Answer shortly.",
                    model=agents.OpenAIResponsesModel(model="demo", openai_client=client),
                    model_settings=agents.ModelSettings(
                        max_tokens=120, tool_choice="required", parallel_tool_calls=False
                    ),
                    tools=[agents.function_tool(look_up)],
                )
                return await agents.Runner.run(agent, QUESTION, max_turns=4)

        agents.set_tracing_disabled(True)
        result = asyncio.run(run())
        assert len(asked) == 1
        kinds = [type(item).__name__ for item in result.new_items]
        assert kinds[:2] == ["ToolCallItem", "ToolCallOutputItem"]
        assert isinstance(result.final_output, str)


def install(folder: Path, *packages: str) -> None:
    """Packages from the npm registry, or the test is skipped."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm")
    (folder / "package.json").write_text('{"type": "module", "private": true}')
    done = subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", *packages],
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode:
        pytest.skip("the npm registry cannot be reached")


@pytest.mark.slow
@pytest.mark.node
def test_javascript(demo: Served, tmp_path: Path) -> None:
    install(tmp_path, OPENAI)
    shutil.copy(Path(__file__).with_name("client.mjs"), tmp_path / "client.mjs")
    ran = subprocess.run(
        ["node", "client.mjs", demo.base, json.dumps({"tools": TOOLS[:1], "schema": SCHEMA})],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout.strip().splitlines()[-1:]) == (0, ["all of it works"]), (
        ran.stdout + ran.stderr
    )


@pytest.mark.slow
@pytest.mark.node
def test_javascript_over_messages_and_responses(demo: Served, tmp_path: Path) -> None:
    install(tmp_path, OPENAI, "@anthropic-ai/sdk", "ai@>=5", "@ai-sdk/openai", "@ai-sdk/anthropic")
    shutil.copy(Path(__file__).with_name("client_forms.mjs"), tmp_path / "client_forms.mjs")
    ran = subprocess.run(
        ["node", "client_forms.mjs", demo.base, json.dumps({"schema": TOOLS[0]["function"]["parameters"]})],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == "all of it works"


PAGE = """<!doctype html><title>waiting</title><script type="module">
import OpenAI from "/node_modules/openai/index.mjs";
let said;
try {
  const client = new OpenAI({ baseURL: "%s", apiKey: "none", maxRetries: 0, dangerouslyAllowBrowser: true });
  const messages = [{ role: "user", content: "%s" }];
  const stream = await client.chat.completions.create({ model: "demo", messages, max_tokens: 8, stream: true }).withResponse();
  let text = "";
  for await (const chunk of stream.data) text += chunk.choices[0]?.delta?.content ?? "";
  said = JSON.stringify({ text, id: stream.response.headers.get("x-request-id") });
} catch (error) {
  said = JSON.stringify({ error: String(error) });
}
await fetch("/said", { method: "POST", body: said });
</script>"""


class Pages(SimpleHTTPRequestHandler):
    """A web page's own server: files of a folder, and what the page says in the end."""

    said: queue.Queue[dict[str, Any]]
    extensions_map: ClassVar[dict[str, str]] = {
        **SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
    }

    def do_POST(self) -> None:
        self.said.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.mark.slow
@pytest.mark.node
def test_a_page_in_a_browser(demo: Served, tmp_path: Path) -> None:
    """Preflights and all: a page of this machine may call, one of another origin may not."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium")
    install(tmp_path, OPENAI)
    (tmp_path / "index.html").write_text(PAGE % (demo.base, QUESTION))
    said: queue.Queue[dict[str, Any]] = queue.Queue()
    handler = type("Handler", (Pages,), {"said": said})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(tmp_path))) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        try:
            for host, may in (("localhost", True), ("page.example", False)):
                browser = subprocess.Popen(
                    [
                        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                        "--disable-background-networking", "--disable-component-update", "--disable-sync",
                        "--host-resolver-rules=MAP page.example 127.0.0.1", f"--user-data-dir={tmp_path / host}",
                        "--remote-debugging-port=0",
                        f"http://{host}:{pages.server_port}/index.html",
                    ],
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )  # fmt: skip
                try:
                    found = said.get(timeout=120)
                finally:
                    browser.kill()
                    browser.wait(30)
                if may:
                    assert found["text"] == demo.chat(max_tokens=8)["choices"][0]["message"]["content"]
                    assert found["id"].startswith("req_")
                else:
                    assert "Connection error" in found["error"]
        finally:
            pages.shutdown()
