"""Other people's clients: litellm and openai-agents, and packages of JavaScript in node and in a browser."""

from __future__ import annotations

import importlib.util
import json
import queue
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.server.serving import QUESTION, Served
from tests.server.test_sdk import SCHEMA, TOOLS

OPENAI = "openai@>=5 <8"
PACKAGES = ("litellm", "mcp", "openai-agents")  # litellm needs mcp for tools
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with litellm and openai-agents, by a virtual environment of their own unless they are installed here."""
    if all(importlib.util.find_spec(name) for name in ("litellm", "mcp", "agents")):
        return sys.executable
    folder = tmp_path_factory.mktemp("clients")
    found = str(folder / "bin" / "python")
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [found, "-m", "pip", "install", "--quiet", *PACKAGES],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            pytest.skip(f"{' '.join(PACKAGES)} cannot be installed: {done.stderr[-200:]}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("script", ["client_litellm.py", "client_agents.py"])
def test_python(demo: Served, python: str, script: str) -> None:
    given = json.dumps({"messages": MESSAGES, "tools": TOOLS[:1], "schema": SCHEMA})
    command = [python, str(Path(__file__).with_name(script)), demo.base, given]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout.splitlines()[-1:]) == (0, ["all of it works"]), ran.stdout + ran.stderr


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
