"""`bench mtp`: the ten tasks in process and against servers of three dialects, llama.cpp's columns, and servers that are none."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mlxspec.bench import mtp
from mlxspec.bench.tasks import TASKS
from mlxspec.cli.bench_mtp import line
from mlxspec.cli.main import main

NAMES = [
    "code_python", "code_cpp", "explain_concept", "summarize", "qa_factual", "translation", "creative_short",
    "stepwise_math", "high_entropy", "long_code_review",
]  # fmt: skip
LLAMA = {"timings": {"predicted_n": 12, "predicted_per_second": 50.0, "draft_n": 10, "draft_n_accepted": 7}}
OPENAI = {
    "usage": {
        "completion_tokens": 12,
        "completion_tokens_details": {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 3},
    }
}
PLAIN = {"usage": {"completion_tokens": 12}}


@contextmanager
def server(
    answer: Callable[[dict[str, Any]], tuple[int, bytes]],
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Answers chat completions; gives its address and the requests it got."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            got.append(body | {"path": self.path, "key": self.headers.get("Authorization")})
            self._send(*answer(body))

        def _send(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}", got
        finally:
            listening.shutdown()
            thread.join()


def test_the_tasks_are_the_ten() -> None:
    assert [t.name for t in TASKS] == NAMES
    assert len(TASKS[-1].prompt) > 1500


@pytest.mark.parametrize(
    ("dialect", "drafted"), [(LLAMA, True), (OPENAI, True), (PLAIN, False)], ids=["llama", "openai", "plain"]
)
def test_columns_against_a_server(
    dialect: dict, drafted: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with server(lambda body: (200, json.dumps(dialect).encode())) as (url, got):
        assert main(["bench", "mtp", "--url", url, "--max-tokens", "16"]) == 0
    out = capsys.readouterr().out
    columns = "draft=  10 acc=   7 rate=0.700" if drafted else "draft=   - acc=   - rate=    -"
    for name, row in zip(NAMES, out.splitlines(), strict=False):
        assert row.startswith(f"  {name:<17s}  pred=  12 {columns} tok/s=")
    total = json.loads(out[out.index("{") :])
    assert total["n_requests"] == 10
    assert total["total_predicted"] == 120
    assert total["aggregate_accept_rate"] == (0.7 if drafted else None)
    assert total["total_draft"] == (100 if drafted else None)
    assert len(got) == 10
    assert all(g["path"] == "/v1/chat/completions" and g["model"] == "first" for g in got)
    assert all(g["max_tokens"] == 16 and g["temperature"] == 0 and g["key"] == "Bearer secret" for g in got)


def test_in_process_on_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "mtp", "--max-tokens", "8", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [t["task"] for t in data["tasks"]] == NAMES
    assert all(0 < t["predicted"] <= 8 for t in data["tasks"])
    assert data["aggregate"]["total_draft"] > 0


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((500, b"broken inside"), "status 500: 'broken inside'"),
        ((200, b"not json"), "no JSON"),
        ((200, b"[]"), "no JSON object"),
        ((200, b"{}"), "usage"),
        ((200, b'{"usage": {"completion_tokens": "x"}}'), "usage"),
        ((200, b'{"timings": 5, "usage": 6}'), "usage"),
    ],
    ids=[str(i) for i in range(6)],
)
def test_servers_that_are_none(
    answer: tuple[int, bytes], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with server(lambda body: answer) as (url, _):
        assert main(["bench", "mtp", "--url", f"{url}/v1", "--model", "x"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.count("\n") == 1


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with server(lambda body: (200, b"")) as (url, _):
        pass
    assert main(["bench", "mtp", "--url", url]) == 2
    assert "is it running?" in capsys.readouterr().err


def test_a_row_is_one_line_of_the_benchmark() -> None:
    row = mtp.Row(task="code_python", predicted=192, drafted=153, accepted=140, speed=103.21)
    assert line(row) == "  code_python        pred= 192 draft= 153 acc= 140 rate=0.915 tok/s=103.2"
