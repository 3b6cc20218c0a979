"""Other people's clients: litellm, and the `openai` package of JavaScript in node and in a browser."""

from __future__ import annotations

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


def install_openai(folder: Path) -> None:
    """The package from the npm registry, or the test is skipped."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm")
    (folder / "package.json").write_text('{"type": "module", "private": true}')
    done = subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "openai@>=5 <8"],
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode:
        pytest.skip("the npm registry cannot be reached")


@pytest.mark.slow
@pytest.mark.node
def test_javascript(demo: Served, tmp_path: Path) -> None:
    install_openai(tmp_path)
    shutil.copy(Path(__file__).with_name("client.mjs"), tmp_path / "client.mjs")
    ran = subprocess.run(
        ["node", "client.mjs", demo.base, json.dumps({"tools": TOOLS[:1], "schema": SCHEMA})],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout.strip().splitlines()[-1:]) == (0, ["all of it works"]), (
        ran.stdout + ran.stderr
    )


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
    install_openai(tmp_path)
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
