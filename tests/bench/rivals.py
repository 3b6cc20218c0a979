"""Servers in the place of a rival: each answers OpenAI's chat API as told, some of them wrongly."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Write = Callable[[bytes], None]
Answer = Callable[[dict[str, Any], "Handler"], None]
STREAM = {"Content-Type": "text/event-stream"}


class Handler(BaseHTTPRequestHandler):
    answer: Answer
    listed: bytes
    asked: list[dict[str, Any]]

    def log_message(self, *_: Any) -> None:
        """Do nothing: tests print no log."""

    def do_GET(self) -> None:
        self.begin(200, {"Content-Type": "application/json"})
        self.wfile.write(self.listed)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append({**body, "key": self.headers.get("Authorization"), "path": self.path})
        type(self).answer(body, self)

    def begin(self, status: int, headers: dict[str, str]) -> None:
        """Send a status line and headers."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def event(self, value: dict[str, Any] | str) -> None:
        """Send an event of a stream."""
        data = value if isinstance(value, str) else json.dumps(value)
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def piece(self, text: str, **more: Any) -> None:
        """Send a piece of an answer."""
        self.event({"choices": [{"index": 0, "delta": {"content": text}, **more}]})


def saying(*pieces: str, tokens: int | None = None, seconds: float = 0.0) -> Answer:
    """Return an answer in these pieces. tokens: that it reports; seconds: before each piece."""

    def answer(body: dict[str, Any], reply: Handler) -> None:
        reply.begin(200, STREAM)
        reply.event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        for piece in pieces:
            time.sleep(seconds)
            reply.piece(piece)
        reply.piece("", finish_reason="stop")
        if tokens is not None:
            reply.event({"choices": [], "usage": {"completion_tokens": tokens}})
        reply.event("[DONE]")

    return answer


@contextmanager
def rival(answer: Answer, listed: bytes = b'{"data": [{"id": "other"}]}') -> Iterator[tuple[str, list[Any]]]:
    """Yield the address of a server that answers so, and the bodies that it got."""
    asked: list[dict[str, Any]] = []
    own = type("Own", (Handler,), {"answer": staticmethod(answer), "listed": listed, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), own)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
