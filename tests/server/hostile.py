"""A server among hostile clients, for so many minutes: `python -m tests.server.hostile --minutes 10`. Prints what came of it as JSON.

Honest clients ask for texts, tool calls and images whose answers are known, and compare. Beside them others read slowly or not at all, hang
up, knock for WebSockets, send long prompts, broken images, junk, half requests, and ask for what costs most. On this machine each
connection is a client of its own.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import socket
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tests.engine.sighted_demo import picture
from tests.server.serving import LONG, QUESTION, Served, content
from tests.server.stack_samples import during

BUDGET = 700 << 20
OPTIONS = (
    "--model",
    "demo-vision",
    "--memory-budget",
    str(BUDGET),
    "--max-rows",
    "4",
    "--prefill-chunk",
    "256",
)
PATH = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "maxLength": 12},
                "depth": {"type": "integer", "maximum": 9},
            },
            "required": ["path", "depth"],
            "additionalProperties": False,
        },
    },
}


def chat(text: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 24, **more}


def image(data: bytes, kind: str = "png") -> list[dict[str, Any]]:
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]


ASKED = [
    chat(QUESTION),
    chat("what does sorted do?", draft="off"),
    chat("what does json.dumps do?", logprobs=True, top_logprobs=2),
    chat("what does shutil.copy do?", seed=4, temperature=0.9),
    chat("look at it", tools=[TOOL], tool_choice="required", max_tokens=80),
    chat(image(picture()), max_tokens=8, ignore_eos=True),
]


def answer_of(body: dict[str, Any]) -> Any:
    message = body["choices"][0]["message"]
    calls = [c["function"] for c in message.get("tool_calls") or ()]
    return message.get("content"), calls


class Soak:
    """One run. statuses: of all answers; wrong: what should not have been."""

    def __init__(self, served: Served, samples: Path, seconds: float, seed: int = 0) -> None:
        self.served, self.samples, self.seconds, self.seed = served, samples, seconds, seed
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []
        self.waits: dict[str, list[float]] = {"quiet": [], "among them": []}
        self.gaps: dict[str, list[float]] = {"quiet": [], "among them": []}
        self.longest = {"quiet": (0.0, 0.0), "among them": (0.0, 0.0)}  # begin and end of the longest gap
        self.known: list[Any] = []
        self._ends = 0.0
        self._rng = threading.local()

    @property
    def rng(self) -> random.Random:
        if not hasattr(self._rng, "own"):
            self._rng.own = random.Random(f"{self.seed} {threading.current_thread().name}")
        return self._rng.own  # type: ignore[no-any-return]

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._ends

    def run(self) -> dict[str, Any]:
        self.known = [answer_of(self.served.post(PATH, asked)[1]) for asked in ASKED]
        self.known = [answer_of(self.served.post(PATH, asked)[1]) for asked in ASKED]
        self._ends = time.monotonic() + 5
        while not self.is_over:
            self._stream("quiet")
        self.served.settle()
        before, samples = usage(self.served), []
        self._began = time.monotonic()
        self._ends = time.monotonic() + self.seconds
        threads = [
            threading.Thread(target=self._until_over, args=(work,), name=f"{work.__name__} {i}", daemon=True)
            for work, num in ((self.honest, 2), (self._among, 1), *((attack, 1) for attack in self.attacks()))
            for i in range(num)
        ]
        for thread in threads:
            thread.start()
        while any(t.is_alive() for t in threads) and time.monotonic() < self._ends + LONG:
            samples.append(usage(self.served))
            time.sleep(0.5)
        self.wrong += [f"{t.name} has not ended" for t in threads if t.is_alive()]
        left = self.served.settle()
        time.sleep(1)
        busy = {
            k: left[f"mlxspec_{k}"]
            for k in ("rows_running", "rows_waiting", "open_requests")
            if left[f"mlxspec_{k}"]
        }
        peak = max(s["bytes"] for s in samples)
        return {
            "statuses": dict(sorted(self.statuses.items())),
            "wrong": self.wrong,
            "still busy": busy,
            "MiB before, at most, after": [
                n >> 20 for n in (before["bytes"], peak, usage(self.served)["bytes"])
            ],
            "MiB in stores": int(left["mlxspec_prefix_bytes"]) >> 20,
            "threads": [before["threads"], usage(self.served)["threads"]],
            "descriptors": [before["descriptors"], usage(self.served)["descriptors"]],
            "first token, longest wait": {k: round(max(v, default=0.0), 2) for k, v in self.waits.items()},
            "longest gap": {k: round(max(v, default=0.0), 2) for k, v in self.gaps.items()},
            "seconds of the longest gap": [round(t - self._began, 2) for t in self.longest["among them"]],
            "in the longest gap": during(self.samples, *self.longest["among them"]),
            "said": [line for line in self.served.lines if "Traceback" in line][:5],
        }

    def pairs(self) -> dict[str, Any]:
        """The timed stream alone, and beside each of the others in turn: longest wait for a first token and longest gap, in seconds."""
        self._ends = time.monotonic() + self.seconds
        while not self.is_over:
            self._stream("quiet")
        found = {"quiet": [max(self.waits["quiet"]), max(self.gaps["quiet"])]}
        for attack in self.attacks():
            self.waits["among them"], self.gaps["among them"] = [], []
            self._ends = time.monotonic() + self.seconds
            threads = [
                threading.Thread(target=self._until_over, args=(work,)) for work in (self._among, attack)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.served.settle()
            found[attack.__name__] = [
                max(self.waits["among them"], default=0),
                max(self.gaps["among them"], default=0),
            ]
        return {"wrong": self.wrong, "wait, gap": {k: [round(s, 2) for s in v] for k, v in found.items()}}

    def _until_over(self, work: Callable[[], None]) -> None:
        while not self.is_over:
            try:
                work()
            except (OSError, HTTPException):  # a connection that made room for another
                time.sleep(0.05)
            except Exception as error:
                self.wrong.append(f"{work.__name__}: {error!r}"[:300])
                return

    def ask(self, body: Any, path: str = PATH, raw: bytes | None = None) -> tuple[int, bytes]:
        status, _, data = self.served.ask("POST", path, None if raw is not None else body, raw=raw)
        self._note(status, data)
        return status, data

    def _note(self, status: int, data: bytes) -> None:
        self.statuses[status] += 1
        if status >= 500 and status != 503:
            self.wrong.append(f"{status}: {data[:200]!r}")

    # --- honest clients

    def honest(self) -> None:
        number = self.rng.randrange(len(ASKED))
        asked = ASKED[number]
        if number == 0 and self.rng.random() < 0.5:
            status, _, data = self.served.ask("POST", PATH, {**asked, "stream": True})
            self._note(status, data)
            if status == 200:
                objects = [json.loads(b[6:]) for b in data.decode().split("\n\n") if b.startswith("data: {")]
                if content(objects) != self.known[number][0]:
                    self.wrong.append(f"text of stream: {content(objects)!r}")
            return
        status, data = self.ask(asked)
        if status == 200 and answer_of(json.loads(data)) != self.known[number]:
            self.wrong.append(f"text {number}: {answer_of(json.loads(data))!r}")
        elif status not in (200, 503):
            self.wrong.append(f"{status} for an honest request: {data[:200]!r}")

    def _among(self) -> None:
        self._stream("among them")

    def _stream(self, which: str) -> None:
        """A stream whose events are timed."""
        started, last = time.monotonic(), None
        with self._sent(chat(QUESTION, max_tokens=60, ignore_eos=True, stream=True)) as stream:
            data = b""
            while b"[DONE]" not in data and (piece := stream.recv(1 << 16)):
                now, data = time.monotonic(), data[-300:] + piece
                if b" 503 " in data[:200]:
                    return
                if b'"content"' not in piece:
                    continue
                if last is None:
                    self.waits[which].append(now - started)
                else:
                    self.gaps[which].append(now - last)
                    if now - last > self.longest[which][1] - self.longest[which][0]:
                        self.longest[which] = last, now
                last = now

    def _sent(self, body: dict[str, Any], buffer: int = 0) -> socket.socket:
        data = json.dumps(body).encode()
        return self._connected(_head(len(data)) + data, buffer)

    def _connected(self, data: bytes, buffer: int = 0) -> socket.socket:
        made = socket.socket()
        made.settimeout(LONG)
        if buffer:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        made.connect(("127.0.0.1", self.served.port))
        made.sendall(data)
        return made

    # --- the others

    def attacks(self) -> tuple[Callable[[], None], ...]:
        return (
            self.read_slowly,
            self.read_nothing,
            self.hang_up,
            self.knock,
            self.long_prompts,
            self.images,
            self.junk,
            self.half_requests,
            self.what_costs_most,
            self.connect,
        )

    def read_slowly(self) -> None:
        with self._sent(
            chat(QUESTION, max_tokens=2000, ignore_eos=True, stream=True, logprobs=True, top_logprobs=5), 4096
        ) as stream:
            for _ in range(40):
                if self.is_over or not stream.recv(300):
                    return
                time.sleep(0.1)

    def read_nothing(self) -> None:
        """Several at once, with answers that no buffer of a socket holds."""
        body = chat(QUESTION, max_tokens=4000, ignore_eos=True, stream=True, logprobs=True, top_logprobs=20)
        held = [self._sent(body, 2048) for _ in range(4)]
        until = time.monotonic() + self.rng.choice([2, 15])
        while not self.is_over and time.monotonic() < until:
            time.sleep(0.1)
        for each in held:
            each.close()

    def hang_up(self) -> None:
        asked = chat(QUESTION + " word" * self.rng.choice([0, 300]), max_tokens=500, stream=True)
        with self._sent(asked) as stream:
            left = self.rng.choice([0, 1, 300, 2000])
            while left > 0 and (piece := stream.recv(min(left, 512))):
                left -= len(piece)

    def knock(self) -> None:
        head = (
            "GET {} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        ).format(self.rng.choice(["/", PATH, "/ws", "/health"]))
        with self._connected(head.encode()) as knocking:
            if b" 101 " in knocking.recv(200):
                self.wrong.append("a WebSocket was opened")
        time.sleep(0.02)

    def long_prompts(self) -> None:
        words = "os path join list dict file open read write str int float json time sys re".split()
        prompts = [" ".join(self.rng.choices(words, k=self.rng.choice([200, 600]))) for _ in range(8)]
        self.ask({"prompt": prompts, "max_tokens": 2}, "/v1/completions")

    def images(self) -> None:
        whole = picture(seed=self.rng.randrange(50))
        cut = whole[: self.rng.randrange(len(whole))]
        bomb = (
            b"\x89PNG\r\n\x1a\n"
            + _chunk(b"IHDR", (60000).to_bytes(4) * 2 + b"\x08\x02\0\0\0")
            + _chunk(b"IDAT", b"x")
        )
        given = self.rng.choice([whole, cut, bomb, b"", b"GIF89a"])
        self.ask(chat(image(given), max_tokens=4))
        self.ask(chat([*image(whole), *image(picture(seed=1))] * 2, max_tokens=2))

    def junk(self) -> None:
        raw = self.rng.choice(
            [
                b"{",
                b"[" * 100_000,
                b'{"messages":[' + b"[]," * 10_000 + b"1]}",
                b"\xff" * 100,
                b"null",
                b'{"prompt":' + b"9" * 10_000 + b"}",
            ]
        )
        self.ask(None, self.rng.choice([PATH, "/v1/messages", "/v1/responses", "/api/chat"]), raw)
        for method, path in (
            ("GET", f"/x{self.rng.random()}"),
            ("DELETE", "/v1/responses/none"),
            ("PUT", "/"),
        ):
            status, _, data = self.served.ask(method, path)
            self._note(status, data)

    def half_requests(self) -> None:
        held = [
            self._connected(self.rng.choice([b"", b"GET /hea", _head(90) + b"{", b"\x16\x03\x01"]))
            for _ in range(8)
        ]
        time.sleep(0.3)
        for each in held:
            each.close()

    def what_costs_most(self) -> None:
        self.ask(
            self.rng.choice(
                [
                    chat(QUESTION, n=16, max_tokens=40, ignore_eos=True),
                    chat(QUESTION, lark='start: start start | "a"', max_tokens=100),
                    chat(
                        QUESTION,
                        json_schema={"type": "object", "properties": {f"p{i}": {} for i in range(1000)}},
                    ),
                    chat(QUESTION, bad_words=[f"a{i:03}" + "b" * 20 for i in range(800)]),
                    chat("a" * 200_000),
                    {"prompt": [5] * 100_000, "max_tokens": 4},
                ]
            ),
        )

    def connect(self) -> None:
        held = []
        with suppress(OSError):
            for _ in range(100):
                held.append(self._connected(b""))
        time.sleep(0.5)
        for each in held:
            each.close()


def _head(length: int) -> bytes:
    return (
        f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def _chunk(name: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4) + name + data + zlib.crc32(name + data).to_bytes(4)


def usage(served: Served) -> dict[str, int]:
    """Of the server's process, as Linux has it."""
    root = Path(f"/proc/{served.process.pid}")
    status = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines())
    return {
        "bytes": int(status["VmRSS"].split()[0]) << 10,
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir(root / "fd")),
    }


def faults(found: dict[str, Any]) -> Iterator[str]:
    """What a run shows that should not be."""
    yield from found["wrong"]
    yield from (f"it is still busy: {found['still busy']}" for _ in [0] if found["still busy"])
    yield from (f"it said {line}" for line in found["said"])
    _, peak, _ = found["MiB before, at most, after"]
    if peak << 20 > BUDGET * 1.1:
        yield f"{peak} MiB were taken"
    for what, spare in (("threads", 4), ("descriptors", 4)):
        before, after = found[what]
        if after > before + spare:
            yield f"{after} {what} were left, {before} were there before"


@contextmanager
def sampled() -> Iterator[tuple[Served, Path]]:
    """A server, and the file with the stacks of its threads."""
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder) / "stacks.jsonl"
        plant = f"from tests.server.stack_samples import start\nstart({str(samples)!r})"
        with Served(*OPTIONS, plant=plant) as served:
            yield served, samples


def soak(minutes: float, seed: int = 0) -> dict[str, Any]:
    with sampled() as (served, samples):
        return Soak(served, samples, 60 * minutes, seed).run()


def pairs(seconds: float) -> dict[str, Any]:
    with sampled() as (served, samples):
        made = Soak(served, samples, seconds)
        for attack in (*made.attacks(), lambda: made._stream("quiet")):  # what they need is compiled by then
            attack()
        made.waits["quiet"], made.gaps["quiet"] = [], []
        return made.pairs()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--pairs", type=float, metavar="SECONDS", help="each of them alone beside a stream, for so long"
    )
    options = parser.parse_args()
    if options.pairs:
        print(json.dumps(pairs(options.pairs), indent=1))
        raise SystemExit(0)
    result = soak(options.minutes, options.seed)
    print(json.dumps(result, indent=1))
    raise SystemExit("\n".join(faults(result)) or 0)
