"""A server as users run it: `mlxspec serve` in a process of its own, found by what it prints, ended by a signal.

One BLAS thread: tests run beside one another, where threads that wait for each other cost most.
A `plant` is Python that runs in that process before the command: tests put faults and slow stages there.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.engine.rank_processes import free_ports

LONG = 180.0
QUESTION = "what does os.path.join do?"
_RUN = "import sys\nfrom mlxspec.__main__ import main\nsys.exit(main())\n"


class Served:
    """A running server. `lines`: what it has said; `port`; `headers` go with every request."""

    def __init__(
        self,
        *args: str,
        plant: str = "",
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        wait: bool = True,
        num_ranks: int = 1,
    ) -> None:
        """num_ranks: the model is divided among so many processes, of which the first one serves."""
        self.headers = dict(headers or {})
        self.lines: list[str] = []
        self._said = threading.Condition()
        self.port = 0
        command = [sys.executable, "-c", plant + "\n" + _RUN, "serve", "--port", "0", *args]
        common = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **(env or {})}
        self._hosts: Path | None = None
        if num_ranks > 1:
            self._hosts = hosts_file(num_ranks)
            common |= {"MLX_HOSTFILE": str(self._hosts), "MLX_RANK": "0"}
        self.others = [
            subprocess.Popen(command, stdin=subprocess.DEVNULL, env=common | {"MLX_RANK": str(rank)})
            for rank in range(1, num_ranks)
        ]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, errors="replace", env=common
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait:
            try:
                self.port = int(self.wait_for(r"http://[^ ]*:(\d+)/v1")[1])
            except BaseException:
                self.__exit__()
                raise

    def _read(self) -> None:
        for line in self.process.stderr or ():
            with self._said:
                self.lines.append(line.rstrip("\n"))
                self._said.notify_all()
        with self._said:
            self.lines.append("<end>")
            self._said.notify_all()

    def wait_for(self, pattern: str, *, seconds: float = LONG, after: int = 0) -> re.Match[str]:
        """The first line that holds the pattern, said or to be said. after: so many lines are passed over."""

        def found() -> re.Match[str] | None:
            lines = list(self.lines)[after:]
            return next((m for line in lines if (m := re.search(pattern, line))), None)

        with self._said:
            self._said.wait_for(lambda: found() or "<end>" in self.lines, seconds)
            match = found()
        assert match, f"the server never said {pattern!r}:\n" + "\n".join(self.lines)
        return match

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        raw: bytes | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG)
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        given = {
            **({"Content-Type": "application/json"} if data is not None else {}),
            **self.headers,
            **(headers or {}),
        }
        try:
            connection.request(method, path, data, {k: v for k, v in given.items() if v is not None})
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        status, _, data = self.ask("POST", path, body)
        return status, json.loads(data)

    def chat(self, content: str = QUESTION, **more: Any) -> dict[str, Any]:
        status, answer = self.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **more}
        )
        assert status == 200, answer
        return answer

    def stream(self, path: str, body: Any) -> tuple[list[dict[str, Any]], list[str], bool]:
        """(objects, comments, whether [DONE] came) of a streamed answer."""
        status, headers, data = self.ask("POST", path, {**body, "stream": True})
        assert status == 200, data
        assert headers["content-type"].startswith("text/event-stream")
        return events(data)

    def metrics(self) -> dict[str, float]:
        _, _, data = self.ask("GET", "/metrics")
        lines = [line for line in data.decode().splitlines() if line and not line.startswith("#")]
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    def settle(self) -> dict[str, float]:
        """Metrics once nothing runs any more."""
        until = time.monotonic() + LONG
        while True:
            found = self.metrics()
            busy = (
                found["mlxspec_rows_running"] + found["mlxspec_rows_waiting"] + found["mlxspec_open_requests"]
            )
            if (not busy and not found["mlxspec_state_bytes"]) or time.monotonic() > until:
                return found
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send the signal; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(LONG)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LONG)
        for other in self.others:
            try:
                other.wait(LONG)  # it ends by itself once the first one has
            finally:
                other.kill()
                other.wait()
        if self._hosts is not None:
            self._hosts.unlink()
        if self.process.stderr is not None:
            self._reader.join(LONG)
            self.process.stderr.close()


def hosts_file(num_ranks: int) -> Path:
    """A file that tells MLX's ring of so many ranks on this machine."""
    handle, name = tempfile.mkstemp(suffix=".json")
    with os.fdopen(handle, "w") as file:
        json.dump([[f"127.0.0.1:{port}"] for port in free_ports(num_ranks)], file)
    return Path(name)


def events(data: bytes) -> tuple[list[dict[str, Any]], list[str], bool]:
    objects, comments, done = [], [], False
    for block in data.decode().split("\n\n"):
        if block.startswith(": "):
            comments.append(block[2:])
        elif block == "data: [DONE]":
            done = True
        elif block:
            assert block.startswith("data: "), block
            objects.append(json.loads(block[6:]))
    return objects, comments, done


def content(objects: Sequence[Mapping[str, Any]], choice: int = 0) -> str:
    """Joined content deltas of one choice."""
    deltas = [c["delta"] for o in objects for c in o.get("choices", ()) if c["index"] == choice]
    return "".join(d.get("content") or "" for d in deltas)
