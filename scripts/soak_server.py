"""Twenty clients of mixed manners against one server: readers that compare their texts, floods, slow headers and bodies, clients that hang
up, requests that cost as much as they can, and one that has the model changed every five seconds.

Starts `mlxspec serve` with the demo model under two names. At the end no text may be wrong, no status may be 5xx but 503, and threads,
descriptors and memory must be what they were after the first minute, or after half of a shorter time: at most as many threads as in the
first half. Exits with 1 and a list otherwise.
Linux only: it reads /proc. Knows the server by HTTP only.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

QUESTIONS = (
    "what does os.path.join do?",
    "what does json.dumps do?",
    "what does sorted do?",
    "what does re.sub do?",
)
CHAT = "/v1/chat/completions"
MEMORY_SHARE = 1.1  # of what was resident after the first stretch
SWITCHES_EVERY = 5.0  # seconds
_LONG = 120.0


class State(NamedTuple):
    """Of the server's process."""

    threads: int
    descriptors: int
    resident: int  # bytes


class Soak:
    """One run. wrong: sentences about what should not have been."""

    def __init__(self, seconds: float, budget: str) -> None:
        command = [
            sys.executable,
            "-m",
            "mlxspec",
            "serve",
            "--port",
            "0",
            "--model",
            "a=demo",
            "--model",
            "b=demo",
        ]
        command += ["--memory-budget", budget, "--limit", "header_seconds=3", "--limit", "body_seconds=3"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log_bytes, self.port = 0, 0
        self._is_up = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        if not self._is_up.wait(_LONG):
            raise SystemExit("The server did not start.")
        self.end = time.monotonic() + seconds
        self.wrong: list[str] = []
        self.statuses: Counter[int] = Counter()
        self.texts = {q: self._text(q, "a") for q in QUESTIONS}

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self.log_bytes += len(line)
            if found := re.search(r"http://[^ ]*:(\d+)/v1", line):
                self.port = int(found[1])
                self._is_up.set()

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.end

    def state(self) -> State:
        root = Path(f"/proc/{self.process.pid}")
        status = (root / "status").read_text()
        resident = next(
            int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS")
        )
        return State(len(os.listdir(root / "task")), len(os.listdir(root / "fd")), resident)

    def ask(self, body: Any, raw: bytes | None = None) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_LONG)
        data = json.dumps(body).encode() if raw is None else raw
        try:
            connection.request("POST", CHAT, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        finally:
            connection.close()
        self.statuses[response.status] += 1
        if response.status >= 500 and response.status != 503:
            self.wrong.append(f"status {response.status}: {answer}")
        return response.status, answer

    def _text(self, question: str, model: str) -> str | None:
        body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 48}
        status, answer = self.ask(body)
        return answer["choices"][0]["message"]["content"] if status == 200 else None

    # --- manners

    def reader(self, rng: random.Random) -> None:
        question = rng.choice(QUESTIONS)
        text = self._text(question, "a")
        if text is not None and text != self.texts[question]:
            self.wrong.append(f"{question!r} was answered {text!r}, not {self.texts[question]!r}")

    def flood(self, rng: random.Random) -> None:
        question = rng.choice(QUESTIONS)
        self.ask(
            {"model": "a", "messages": [{"role": "user", "content": question}], "max_tokens": 24, "n": 16}
        )

    def slow_headers(self, rng: random.Random) -> None:
        self._trickle(b"GET /health HTTP/1.1\r\nX-Slow: ", rng)

    def slow_body(self, rng: random.Random) -> None:
        self._trickle(_head(10_000) + b"{", rng)

    def _trickle(self, sent: bytes, rng: random.Random) -> None:
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(sent)
            for _ in range(20):
                time.sleep(rng.random())
                connection.sendall(b"x")

    def hang_up(self, rng: random.Random) -> None:
        body = {
            "model": "a",
            "messages": [{"role": "user", "content": QUESTIONS[0] * rng.randint(1, 60_000)}],
        }
        raw = json.dumps({**body, "stream": True, "max_tokens": 500}).encode()
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(_head(len(raw)) + raw[: rng.choice([len(raw), len(raw) // 2])])
            time.sleep(rng.random())

    def bomb(self, rng: random.Random) -> None:
        ask = {"model": "a", "messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 60}
        kind = rng.randrange(6)
        if kind == 0:
            self.ask({**ask, "messages": [{"role": "user", "content": "os path " * (1 << 19)}]})
        elif kind == 1:
            self.ask({**ask, "bad_words": [f"a{i:03}" + "b" * 28 for i in range(1000)]})
        elif kind == 2:
            self.ask({**ask, "lark": 'start: start start | "a"', "max_tokens": 400})
        elif kind == 3:
            self.ask(None, b'{"messages":[' + b"[]," * (1 << 20) + b"1]}")
        elif kind == 4:
            self.ask({**ask, "json_schema": {"enum": [f"word{i}" for i in range(4000)]}})
        else:
            self.ask({**ask, "regex": "(a|b)*a(a|b){20}"})

    def switch(self, rng: random.Random) -> None:
        time.sleep(SWITCHES_EVERY)
        self._text(rng.choice(QUESTIONS), "b")

    # ---

    def client(self, manner: Callable[[random.Random], None], seed: int) -> None:
        rng = random.Random(seed)
        while not self.is_over:
            with suppress(
                OSError, http.client.HTTPException
            ):  # the server may close on us; that it lives is looked at below
                manner(rng)
            time.sleep(0.05)

    def run(self, seconds: float) -> None:
        manners = (
            [self.reader] * 6 + [self.flood] * 2 + [self.slow_headers] * 3 + [self.slow_body] * 2 + [self.hang_up] * 3 + [self.bomb] * 3
            + [self.switch]
        )  # fmt: skip
        clients = [threading.Thread(target=self.client, args=(m, i)) for i, m in enumerate(manners)]
        for client in clients:
            client.start()
        time.sleep(min(60.0, seconds / 2))
        early = self.state()
        most_threads = (
            early.threads
        )  # in the first half: pools start their last thread when all others are busy for the first time
        while not self.is_over:
            now, left = self.state(), self.end - time.monotonic()
            print(f"{left:5.0f} s left: {now}", flush=True)
            if left > seconds / 2:
                most_threads = max(most_threads, now.threads)
            time.sleep(max(0.0, min(60.0, left)))
        for client in clients:
            client.join()
        if self._text(QUESTIONS[0], "a") is None:
            self.wrong.append("the server does not answer at the end")
        time.sleep(5)  # clocks of connections run out
        late = self.state()
        if late.threads > most_threads:
            self.wrong.append(f"{late.threads} threads, {most_threads} before")
        if late.descriptors > early.descriptors:
            self.wrong.append(f"{late.descriptors} descriptors, {early.descriptors} before")
        if late.resident > early.resident * MEMORY_SHARE:
            self.wrong.append(f"{late.resident >> 20} MiB resident, {early.resident >> 20} before")
        if self.log_bytes > 500 * 1000 + seconds * 20 * 1000:
            self.wrong.append(f"{self.log_bytes} bytes of log")
        print(
            f"statuses {dict(self.statuses)}; log {self.log_bytes} bytes; after the beginning {early}; at the end {late}"
        )

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.wrong.append("the server did not end")


def _head(length: int) -> bytes:
    lines = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    return lines.encode()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="how long (default 600)")
    parser.add_argument("--memory-budget", default="800M", help="of the server (default 800M)")
    args = parser.parse_args()
    soak = Soak(args.seconds, args.memory_budget)
    try:
        soak.run(args.seconds)
    finally:
        soak.stop()
    for sentence in list(dict.fromkeys(soak.wrong))[:20]:
        print(sentence)
    return bool(soak.wrong)


if __name__ == "__main__":
    sys.exit(main())
