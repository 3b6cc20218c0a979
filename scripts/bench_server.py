"""What a server gives several clients: throughput side by side against one after another, and a short request beside a long prompt.

Starts `mlxspec serve` with the demo model, asks it the same questions in both ways, alternating, and prints medians and their ratio, once
with drafting and once without. Texts of both ways must be the same, or nothing is printed. Knows the server by HTTP only.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

QUESTIONS = [
    "what does os.path.join do?", "what does json.dumps do?", "what does shutil.copy do?", "what does sorted do?",
    "what does os.listdir do?", "what does random.shuffle do?", "what does re.sub do?", "what does time.sleep do?",
]  # fmt: skip


class Server:
    """The command in a process of its own."""

    def __init__(self, *args: str) -> None:
        command = [sys.executable, "-m", "mlxspec", "serve", "--port", "0", *args]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.port = 0
        for line in self.process.stderr:
            if found := re.search(r"http://[^ ]*:(\d+)/v1", line):
                self.port = int(found[1])
                break
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        if not self.port:
            raise SystemExit("The server did not start.")

    def _sent(self, body: dict[str, Any], path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse()

    def ask(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> dict[str, Any]:
        answer = json.loads(self._sent(body, path).read())
        if "error" in answer:
            raise SystemExit(answer["error"]["message"])
        return dict(answer)

    def first_token(self, body: dict[str, Any]) -> float:
        """Seconds to the first text of a stream."""
        started = time.perf_counter()
        response = self._sent({**body, "stream": True}, "/v1/completions")
        while line := response.readline():
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0].get("text"):
                break
        return time.perf_counter() - started

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def question(text: str, draft: str, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": max_tokens, "draft": draft, "ignore_eos": True}


def run(server: Server, draft: str, max_tokens: int, clients: int) -> tuple[float, list[str]]:
    """Seconds for all questions by so many clients, and the texts."""
    texts = [""] * len(QUESTIONS)

    def client(number: int) -> None:
        for i in range(number, len(QUESTIONS), clients):
            answer = server.ask(question(QUESTIONS[i], draft, max_tokens))
            texts[i] = answer["choices"][0]["message"]["content"]

    threads = [threading.Thread(target=client, args=(n,)) for n in range(clients)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started, texts


def throughput(server: Server, max_tokens: int, clients: int, repeat: int) -> None:
    num_tokens = max_tokens * len(QUESTIONS)
    print(f"tokens a second, median of {repeat}; one client after another, {clients} beside each other")
    for draft in ("auto", "off"):
        run(server, draft, max_tokens, clients)
        alone, beside = [], []
        for _ in range(repeat):
            seconds, texts = run(server, draft, max_tokens, 1)
            alone.append(seconds)
            seconds, same = run(server, draft, max_tokens, clients)
            beside.append(seconds)
            if texts != same:
                raise SystemExit("The texts differ, so their times say nothing.")
        one, many = statistics.median(alone), statistics.median(beside)
        on = "on" if draft == "auto" else "off"
        print(f"drafting {on:4} {num_tokens / one:8.0f} {num_tokens / many:8.0f}   {one / many:.2f}x")


def waiting(server: Server, chunk: int, num_prompt: int, repeat: int) -> None:
    """First token of a short request that comes while a long prompt is read, in times of one chunk."""
    ids = server.ask(
        {"content": "import os\nfor name in os.listdir('.'):\n    print(name)\n" * 400}, "/tokenize"
    )["tokens"]
    found, chunks = [], []
    for turn in range(repeat + 1):
        # another beginning each time, so that nothing of it is remembered
        prompt = [ids[(i * (turn + 3)) % 997] for i in range(num_prompt)]
        started = time.perf_counter()
        long = threading.Thread(target=server.first_token, args=({"prompt": prompt, "max_tokens": 1},))
        long.start()
        time.sleep(0.05)
        short = server.first_token({"prompt": f"def f{turn}(", "max_tokens": 2})
        long.join()
        whole = time.perf_counter() - started
        if turn:
            found.append(short)
            chunks.append(whole / (num_prompt / chunk))
    wait, one = statistics.median(found), statistics.median(chunks)
    print(
        f"first token of a short request beside a prompt of {num_prompt} tokens: {wait * 1e3:.0f} ms = {wait / one:.2f} times a chunk "
        f"of {chunk} ({one * 1e3:.0f} ms)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prefill-chunk", type=int, default=256)
    parser.add_argument(
        "--prompt-tokens", type=int, default=1900, help="the demo model's context ends at 2048"
    )
    args = parser.parse_args()
    server = Server("--max-rows", "8", "--prefill-chunk", str(args.prefill_chunk))
    try:
        throughput(server, args.max_tokens, args.clients, args.repeat)
        waiting(server, args.prefill_chunk, args.prompt_tokens, args.repeat)
    finally:
        server.stop()


if __name__ == "__main__":
    main()
