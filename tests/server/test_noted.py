"""What an operator sees of lost calls, loose grammars and ignored fields; and requests that nobody should answer."""

from __future__ import annotations

import json
import socket

from planting import catches

from mlxspec.server import noted
from mlxspec.server.http import log
from tests.server.serving import LONG, Served
from tests.server.test_calls_cut_short import CALLS, TOOLS


@catches(
    "a kind is written each time",
    "mlxspec.server.http.log:_NOTE_SECONDS",
    lambda right: 0.0,
)
def test_a_kind_is_written_once_a_minute(monkeypatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(log, "line", lines.append)
    monkeypatch.setattr(log, "_noted", {})
    for notices in (
        ["a call was cut at the limit of the answer and is left out; so far it was: rm -rf secret"],
        ["a call was cut at the limit of the answer and is left out; so far it was: rm -rf other"],
        [
            "What looks like a call of secret is text: a call names a tool.",
            "calls of secret may have any arguments: x",
        ],
        [
            "secret is no field of this request and was ignored",
            "tools.f.parameters.oneOf is not enforced: it",
        ],
        ["of no kind at all"],
    ):
        noted.note(notices)
    assert len(lines) == 5, lines
    assert not any("secret" in line for line in lines)


def test_a_lost_call_has_one_line_in_the_log() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS["chat"], "max_tokens": 30}
    body["lark"] = f"start: {json.dumps(CALLS['json'])}"
    with Served() as served:
        for _ in range(2):
            assert served.post("/v1/chat/completions", body)[0] == 200
        served.wait_for("A call was cut at the limit")
        served.post("/v1/chat/completions", {**body, "max_tokens": 1})
        lines = [line for line in served.lines if "A call was cut" in line]
        assert len(lines) == 1
        assert not any("rm -rf" in line for line in served.lines)


def test_a_context_that_is_asked_for_and_not_given_is_told(demo: Served) -> None:
    for num, is_told in ((32, True), (0, False), (2048, False), (1 << 20, True)):
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "stream": False,
            "options": {"num_ctx": num, "num_predict": 2},
        }
        _, answer = demo.post("/api/chat", body)
        assert any("num_ctx" in n for n in answer["mlxspec"]["notices"]) is is_told, answer


def test_a_request_with_two_lengths_is_refused_and_the_connection_ends(demo: Served) -> None:
    body = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    sent = head + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (
        len(body),
        body,
    )
    with socket.create_connection(("127.0.0.1", demo.port), timeout=LONG) as connection:
        connection.sendall(sent + b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        said = b""
        while piece := connection.recv(65536):
            said += piece
    assert said.startswith(b"HTTP/1.1 400 ")
    assert said.count(b"HTTP/1.1 ") == 1
    assert b"Content-Length or Transfer-Encoding" in said
